"""The importer of the public benchmark's statistics, on small copies of the traces' forms."""

import json
import sys
from pathlib import Path

import pytest

from studies.public_benchmark.load_statistics import RANKS, arrival_gaps, main, table


def write_lines(path: Path, *values: object) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_quantiles_are_ascending_and_have_the_extremes() -> None:
    assert table([3, 1, 2], 0) == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_gaps_are_those_of_busy_windows_in_units_of_their_mean() -> None:
    busy = [float(10 * i) for i in range(50)]
    assert arrival_gaps([*busy, 5_000.0]) == pytest.approx([1.0] * 49)


def test_the_tables_are_made_of_the_users_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {"sys_prompt": [1], "passages_ids": [2, 3], "history": [4], "web_search": []}
    request = {"timestamp": "5", "input_length": 60, "output_length": 9, "hash_ids": ids, "session_id": "a"}
    write_lines(tmp_path / "0_trace.jsonl", request, {**request, "timestamp": "7"}, {**request, "timestamp": "8"})
    for file, key, lengths in (
        ("1_sys_prompt.jsonl", "sys_prompt", {1: 20}),
        ("2_passages.jsonl", "passage", {2: 10, 3: 15}),
        ("3_history.jsonl", "history", {4: 5}),
        ("5_web_search.jsonl", "web_search", {}),
    ):
        write_lines(tmp_path / file, *({f"{key}_id": i, "token_length": n} for i, n in lengths.items()))
    mooncake = [{"timestamp": t, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]} for t in (0, 100, 400)]
    write_lines(tmp_path / "m.jsonl", *mooncake)
    rows = "".join(f"2023-11-16 18:15:4{i}.0,300,44\n" for i in range(3))
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    output = tmp_path / "statistics.json"
    paths = {"ragpulse": tmp_path, "mooncake": tmp_path / "m.jsonl", "azure": tmp_path / "a.csv", "output": output}
    options = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    monkeypatch.setattr(sys, "argv", ["load_statistics", *options])
    main()
    made = json.loads(output.read_text())
    assert made["ranks"] == list(RANKS)
    ragpulse = made["lengths"]["ragpulse"]
    assert (ragpulse["system_tokens"][5], ragpulse["history_tokens"][5], ragpulse["retrieved_tokens"][5]) == (20, 5, 25)
    assert ragpulse["arrival_gaps"][0] == pytest.approx(2 / 3, abs=1e-4)
    assert made["lengths"]["mooncake"]["retrieved_tokens"][5] == 600
    assert made["lengths"]["azure"]["answer_tokens"][5] == 44
    committed = json.loads((Path(main.__globals__["OUTPUT"])).read_text())
    assert made["retrieval"] == committed["retrieval"], "published and recorded retrieval are in the checkout"
    assert made["lengths"].keys() == committed["lengths"].keys()
