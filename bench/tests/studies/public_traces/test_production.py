import json
from pathlib import Path

import pytest

from streamrag.errors import TraceError
from streamrag.trace.read import read_trace
from streamrag.trace.values import TracedUpdate
from streamrag_bench.trace.statistics import describe
from studies.public_traces.production import read_azure_llm, read_mooncake
from studies.public_traces.run import main

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write_mooncake(path: Path, *requests: tuple[float, int, list[int]]) -> Path:
    lines = (
        json.dumps({"timestamp": at_ms, "input_length": length, "output_length": 7, "hash_ids": ids})
        for at_ms, length, ids in requests
    )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncake_blocks_are_chunks_and_equal_leading_ids_are_shared_prefixes(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "m.jsonl", (0, 1300, [0, 1, 2]), (0, 1024, [0, 1]), (1500, 600, [0, 9]))
    trace = read_mooncake(path)
    assert [query.arrival_s for query in trace.queries] == [0, 0, 1.5]
    assert [query.num_output_tokens for query in trace.queries] == [7, 7, 7]
    first = trace.queries[0].events[0]
    assert isinstance(first, TracedUpdate)
    assert first.at_s == trace.queries[0].end_s == 0
    assert [(chunk.key, chunk.num_tokens) for chunk in first.chunks] == [("0", 512), ("1", 512), ("2:276", 276)]
    found = describe(trace)
    assert found.tokens_per_query.values == (600, 1024, 1300)
    assert found.prefix_seen_share == (1024 + 512) / (1300 + 1024 + 600)
    assert found.mode == "plain"


def test_only_the_first_requests_are_read_on_request(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "m.jsonl", (0, 1, [0]), (1, 1, [1]), (2, 1, [2]))
    assert len(read_mooncake(path, max_queries=2).queries) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[]", "line 2: Input should be a valid dictionary"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 1}',
            "line 2: 0 hash_ids of 512 tokens do not make 600",
        ),
        (
            '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            "line 2: 2 hash_ids of 512 tokens do not make 512",
        ),
        (
            '{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "line 2: timestamp: Input should",
        ),
        ('{"timestamp": 1, "output_length": 1, "hash_ids": [1]}', "line 2: input_length: Field required"),
    ],
)
def test_a_broken_line_of_mooncake_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "m.jsonl", (0, 1, [0]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError) as raised:
        read_mooncake(path)
    assert str(raised.value).startswith(f"{path}, {message}")


def test_azure_requests_arrive_as_they_did_and_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n")
    first, second = read_azure_llm(path).queries
    assert (first.arrival_s, round(second.arrival_s, 6)) == (0, 4.314579)
    assert (first.num_output_tokens, second.num_output_tokens) == (44, 109)
    assert describe(read_azure_llm(path)).tokens_per_query.values == (374, 396)
    assert describe(read_azure_llm(path)).prefix_seen_share == 0
    assert len(read_azure_llm(path, max_queries=1).queries) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,1,1", "line 2: TIMESTAMP='yesterday' must be a time"),
        ("2023-11-16 18:15:46,many,1", "line 2: ContextTokens='many' must be a number of tokens"),
        ("2023-11-16 18:15:46,1,-1", "line 2: GeneratedTokens=-1 must be a number of tokens"),
    ],
)
def test_a_broken_row_of_azure_is_named(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + row + "\n")
    with pytest.raises(TraceError) as raised:
        read_azure_llm(path)
    assert str(raised.value).startswith(f"{path}, {message}")


def test_missing_files_are_named(tmp_path: Path) -> None:
    for read in (read_mooncake, read_azure_llm):
        with pytest.raises(TraceError, match="none cannot be read: No such file"):
            read(tmp_path / "none")


def test_a_public_trace_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_mooncake(tmp_path / "m.jsonl", *[(0, 600, [0, 1])] * 3)
    output = tmp_path / "trace.jsonl.zst"
    command = ["mooncake", str(source), "--output", str(output), "--queries", "2"]
    assert main(command) == 0
    assert len(read_trace(output).queries) == 2
    assert main(command) == 1
    assert "exists" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
