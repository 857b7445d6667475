"""How soon a result is final: what is counted, the file, and what a hostile one may say."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from source_helpers import running, updates
from toy_corpus import EMBEDDER

from streamrag import Append, Calibration, Chunk, ConfigurationError, CutShort, Hint, SourceError, Update, VectorSource
from streamrag.bench.report.calibration_picture import draw_calibration
from streamrag.cli import main
from streamrag.sources.emission.calibrate import calibrate
from streamrag.sources.emission.calibration import FORMAT, MAX_LENGTH, MAX_TIMES, VERSION, Count, Odds, Stage, Times
from streamrag.sources.emission.calibration_queries import LeaveOneOut, draw_sentences, read_queries
from streamrag.testing import ScriptedSource

A, B, C, D = (Chunk(text, f"{text}.md") for text in "abcd")


def refined(query: str) -> Iterator[Any]:
    """Four stages: the third passage is replaced after the first, in every other query."""
    yield Update((A, B, C), Hint(3))
    if query.endswith("odd"):
        yield Update((A, B, D), Hint(2))


def counts(calibration: Calibration, what: str, length: int = 0) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (each.left, each.stable): (each.num, each.num_final)
        for each in calibration.counts
        if (each.what, each.length) == (what, length)
    }


async def test_it_counts_what_was_final_at_each_stage_and_how_long_it_had_been_the_same() -> None:
    progress = list[tuple[int, int]]()
    queries = [f"{number} {'odd' if number % 2 else 'even'}" for number in range(10)]
    found = await calibrate(ScriptedSource(refined), queries, on_progress=lambda *done: progress.append(done))
    assert (found.source, found.num_queries, len(found.stages)) == ("ScriptedSource", 10, 4)
    assert progress == [(number, 10) for number in range(1, 11)]
    assert counts(found, "order") == {
        (3, 0): (10, 5),
        (2, 1): (5, 5),
        (2, 0): (5, 5),
        (1, 2): (5, 5),
        (1, 1): (5, 5),
        (0, 3): (5, 5),
        (0, 2): (5, 5),
    }
    assert counts(found, "set") == counts(found, "order")
    assert counts(found, "prefix", 2) == {(3, 0): (10, 10), (2, 1): (10, 10), (1, 2): (10, 10), (0, 3): (10, 10)}
    assert counts(found, "prefix", 3) == counts(found, "order")
    assert len(found.stages[3].when_final) == len(found.stages[3].when_not) == 5
    assert found.stages[2].when_not == ()


async def test_a_set_is_final_before_its_order() -> None:
    steps = (Update((A, B), Hint(2)), Update((B, A), Hint(1)), Update((B, A), Hint(0)))
    found = await calibrate(ScriptedSource(steps), ["why?"])
    assert counts(found, "set") == {(2, 0): (1, 1), (1, 1): (1, 1), (0, 2): (1, 1)}
    assert counts(found, "order") == {(2, 0): (1, 0), (1, 0): (1, 1), (0, 1): (1, 1)}


async def test_a_passage_is_the_same_whatever_its_score() -> None:
    scored = Chunk("a", "a.md", score=0.5)
    found = await calibrate(ScriptedSource((Update((A,), Hint(1)), Update((scored,), Hint(0)))), ["why?"])
    assert counts(found, "order") == {(1, 0): (1, 1), (0, 1): (1, 1)}


async def test_probabilities_are_smoothed_and_a_longer_prefix_is_never_likelier() -> None:
    queries = [f"{number} {'odd' if number % 2 else 'even'}" for number in range(10)]
    odds = Odds(await calibrate(ScriptedSource(refined), queries))
    assert odds.final("order", 0, 3) == 6 / 12
    assert odds.final("order", 0, 3, 0) == (5 + 2 * 6 / 12) / 12
    assert odds.final("order", 0, 3, 5) == 6 / 12  # nothing was ever the same for so long then
    assert odds.final("order", 0, 2, 1) == (5 + 2 * 11 / 12) / 7
    assert odds.final("order", 0, 60) == 1 / 2
    likely = odds.prefixes(3, [0, 0, 0])
    assert likely == [(10 + 2 * 11 / 12) / 12] * 2 + [odds.final("order", 0, 3, 0)]
    assert odds.prefixes(3, [0] * (MAX_LENGTH + 40))[MAX_LENGTH:] == [1 / 2] * 40
    assert odds.prefixes(3, []) == []


async def test_times_are_shared_out_to_stages_that_changed_nothing() -> None:
    now = iter(range(1000))
    found = await calibrate(
        ScriptedSource((Update((A,), Hint(3)), Update((B,), Hint(1)))), ["why?"], clock=lambda: float(next(now))
    )  # begins at 0, updates at 1 and 2, ends at 3
    by_left = [(stage.late_s, *stage.when_final, *stage.when_not) for stage in found.stages]
    assert by_left == [
        (0.0, Times(0.0, 0.0)),
        (1.0, Times(1.0, 1.0)),
        (0.5, Times(0.5, 1.5)),
        (0.5, Times(0.5, 2.0)),
    ]


async def test_of_many_times_a_few_examples_are_kept() -> None:
    found = await calibrate(ScriptedSource(refined), ["even"] * 100)
    assert [len(stage.when_final) for stage in found.stages] == [MAX_TIMES] * 4


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((Update((A,)),), "nothing"),
        ((Update((A,), Hint(None, 2.0)),), "nothing"),
        ((Update((A,), Hint(-1)),), "nothing"),
        ((Update((A,), Hint(64)),), "nothing"),
        ((Update((A,), Hint(1.5)),), "nothing"),
        ((Append(A, Hint(2)), Append(B, Hint(2))), "2 after 2"),
        ((Append(A, Hint(2)), Append(B, Hint(3))), "3 after 2"),
    ],
)
async def test_a_source_that_does_not_say_its_stage_cannot_be_calibrated(steps: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"num_chunks says {said}"):
        await calibrate(ScriptedSource(steps), ["why?"])


async def test_queries_that_fail_or_are_cut_short_are_left_out() -> None:
    def steps(query: str) -> Iterator[Any]:
        yield Update((A,), Hint(1))
        if query == "fails":
            raise SourceError("no luck")
        if query == "is cut short":
            yield CutShort("no time")

    found = await calibrate(ScriptedSource(steps), ["fails", "is cut short", "works"])
    assert found.num_queries == 1
    with pytest.raises(SourceError, match=r"any of 2 queries; the last time: retrieval was cut short: no time"):
        await calibrate(ScriptedSource(steps), ["fails", "is cut short"])
    with pytest.raises(SourceError, match=r"gave no complete result for any of 1 queries$"):
        await calibrate(ScriptedSource(()), ["finds nothing"])
    with pytest.raises(ConfigurationError, match="0 queries"):
        await calibrate(ScriptedSource(steps), [])


# -------------------------------------------------------------------------------------------------------- the file


@pytest.fixture
async def made() -> Calibration:
    return await calibrate(ScriptedSource(refined), [f"{n} {'odd' if n % 2 else 'even'}" for n in range(9)])


def test_a_file_is_read_as_it_was_written(made: Calibration, tmp_path: Path) -> None:
    made.write(tmp_path / "calibration.json")
    assert Calibration.read(tmp_path / "calibration.json") == made
    draw_calibration(tmp_path / "drawn.png", made)
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_says_so(made: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        made.write(tmp_path / "nowhere" / "calibration.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "does not say"),
        ({"version": VERSION + 1}, "its version is 2"),
        ({"version": "x" * 999}, "its version is x{40},"),
        ({"extra": 1}, "Unexpected keyword argument"),
        ({"stages": []}, "at least 1 item"),
        ({"num_queries": 0}, "must be greater than or equal to 1"),
        ({"num_queries": 1}, "more queries than there are"),
        ({"counts": [{"what": "prefix", "length": 0, "left": 0, "stable": 0, "num": 1, "num_final": 1}]}, "count of"),
        ({"counts": [{"what": "order", "length": 0, "left": 0, "stable": 0, "num": 1, "num_final": 2}]}, "count of"),
        ({"counts": [{"what": "order", "length": 0, "left": 63, "stable": 0, "num": 1, "num_final": 1}]}, "a stage"),
        (
            {"counts": [{"what": "order", "length": 0, "left": 64, "stable": 0, "num": 1, "num_final": 1}]},
            "=64 must be less",
        ),
        ({"counts": [{"what": "order", "length": 0, "left": 0, "stable": 0, "num": 1, "num_final": 1}] * 2}, "twice"),
        ({"stages": [{"late_s": -1.0, "when_final": [], "when_not": []}]}, r"=-1.0 must be greater"),
        ({"stages": [{"late_s": 1.0, "when_final": [{"next_s": 2.0, "end_s": 1.0}], "when_not": []}]}, "next_s=2"),
        (
            {"stages": [{"late_s": 1.0, "when_final": [{"next_s": 0.0, "end_s": 0.0}] * 17, "when_not": []}]},
            "at most 16 items",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, made: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    made.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigurationError, match=message):
        Calibration.read(path)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"[]", b"{", b"\xff", b"NaN", b"[" * 5000, b'{"format": NaN}', b"x" * (17 << 20)):
        (tmp_path / "calibration.json").write_bytes(content)
        with pytest.raises(ConfigurationError, match="is no calibration"):
            Calibration.read(tmp_path / "calibration.json")
    with pytest.raises(ConfigurationError, match="is no calibration"):
        Calibration.read(tmp_path)
    with pytest.raises(ConfigurationError, match="is no calibration"):
        Calibration.read("/dev/zero")


def test_a_damaged_file_is_read_or_refused_and_never_more(made: Calibration, tmp_path: Path) -> None:
    path, chance = tmp_path / "calibration.json", random.Random(1)
    made.write(path)
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            start = chance.randrange(len(damaged))
            damaged[start : start + chance.randint(0, 9)] = chance.choice(
                (b"", b"9" * 20, b"-1", b"1e999", b'"', b"[]")
            )
        path.write_bytes(damaged)
        try:
            read = Calibration.read(path)
        except ConfigurationError:
            continue
        assert all(0 < Odds(read).final(each.what, each.length, each.left, each.stable) < 1 for each in read.counts)


def test_a_count_and_a_stage_that_cannot_be_are_refused_when_made() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Count("order", 0, 0, 0, num=1, num_final=-1)
    with pytest.raises(ValueError, match="less than or equal to 1000000"):
        Stage(float("nan"), (), ())
    assert FORMAT in "streamrag-calibration"


# ------------------------------------------------------------------------------------------ queries, and a real index


def test_queries_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "queries.txt"
    path.write_text("\ufeffWho?\n\n  What? \nWho?\nWhere?\n", encoding="utf-8")
    assert read_queries(path, 100) == ["Who?", "What?", "Where?"]
    assert read_queries(path, 2) == ["Who?", "What?"]
    for content, message in ((b"\n \n", "has no queries"), (b"\xff\xfe\x00", "cannot be read"), (b"x" * 2001, "2,001")):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            read_queries(path, 100)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_queries(tmp_path / "missing.txt", 100)


@pytest.fixture
def index(toy_index: Callable[[int], Path]) -> Path:
    """Large enough that a short list of candidates misses some passages."""
    return toy_index(600)


def test_sentences_are_drawn_evenly_and_alike_for_a_seed(index: Path, tmp_path: Path) -> None:
    drawn = draw_sentences(index, 50, 1)
    assert len(drawn) == 50
    assert drawn == draw_sentences(index, 50, 1) != draw_sentences(index, 50, 2)
    stored = [json.loads(line) for line in (index / "passages.jsonl").read_text().splitlines()]
    for sentence, where in drawn.items():
        assert [each["text"] for each in stored if (each["uri"], each["passage"]) == where] == [sentence]
    assert len(draw_sentences(index, 10_000, 1)) == 600
    texts = [json.loads(line)["text"] for line in (index / "passages.jsonl").read_text().splitlines()]
    places = sorted(texts.index(text) for text in drawn)
    assert places[0] < 100
    assert places[-1] > 500
    (tmp_path / "passages.jsonl").write_text('{"text": "too short"}\n')
    with pytest.raises(ConfigurationError, match="no passage"):
        draw_sentences(tmp_path, 5, 1)
    for line in ("{}", "5", "{", '{"text": 5}', '{"text": "One sentence of five words."}'):
        (tmp_path / "passages.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigurationError, match="is damaged"):
            draw_sentences(tmp_path, 5, 1)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        draw_sentences(tmp_path / "nowhere", 5, 1)


async def test_the_passage_that_a_query_is_a_sentence_of_is_left_out() -> None:
    others = [Chunk(text, "a.md", passage=number) for number, text in enumerate("abcd")]
    source = LeaveOneOut(
        ScriptedSource((Update(tuple(others), Hint(1)), Update(tuple(others[1:]), Hint(0)))), {"b": ("a.md", 1)}, 2
    )
    assert source.name == "ScriptedSource"
    held_out = [Update((others[0], others[2]), Hint(1)), Update((others[2], others[3]), Hint(0))]
    assert [event async for event in source.stream("b")] == held_out
    assert [event async for event in source.stream("what people ask")] == [
        Update((others[0], others[1]), Hint(1)),
        Update((others[1], others[2]), Hint(0)),
    ]


async def test_a_vector_index_tells_its_stage_though_it_only_yields_what_changed(index: Path) -> None:
    async with running(VectorSource(index, k=5, embedder=EMBEDDER)) as source:
        first, *_ = await updates(source, "w1 w2 w3 w4 w5")
        assert first.hint == Hint(num_chunks=4)  # the first stage always changes what is best
        found = await calibrate(source, [*draw_sentences(index, 40, 1)])
    assert len(found.stages) == 5
    assert sum(num for (left, _), (num, _) in counts(found, "order").items() if left == 4) == 40
    assert sum(final for (left, _), (_, final) in counts(found, "order").items() if left == 0) == 40
    assert {stable for left, stable in counts(found, "prefix", 1) if left == 0} <= {0, 1, 2, 3, 4}


def test_an_index_is_calibrated_from_the_command_line(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot, asked = tmp_path / "calibration.json", tmp_path / "drawn.png", tmp_path / "asked.txt"
    command = ["index", "calibrate", str(index), "--embedder", EMBEDDER, "--out", str(out)]
    assert main([*command, "--plot", str(plot), "--num-queries", "12", "--no-hybrid"]) == 0
    printed = capsys.readouterr()
    assert "12 queries" in printed.out
    assert "searching, 12 of 12" in printed.err or "searching" in printed.err
    assert Calibration.read(out).num_queries == 12
    assert plot.read_bytes().startswith(b"\x89PNG")
    asked.write_text("w1 w2 w3\nw4 w5 w6\n")
    assert main([*command, "--queries", str(asked), "-k", "3"]) == 0
    assert max(count.length for count in Calibration.read(out).counts) == 3
    capsys.readouterr()
    assert main([*command, "--queries", str(asked)]) == 0
    assert Calibration.read(out).source == "HybridSource"
    assert len(Calibration.read(out).stages) == 2  # keywords, and the one of the vectors
    reranked = ["--rerank", "toy_reranker:backwards", "--num-queries", "6", "-k", "4"]
    assert main([*command, *reranked]) == 0
    assert len(Calibration.read(out).stages) == 7  # candidates for five passages, in batches of four
    assert max(count.length for count in Calibration.read(out).counts) == 4
    assert main([*command, *reranked, "--sentences", "2"]) == 0
    assert max(count.length for count in Calibration.read(out).counts) == 2
    assert main([*command, "--sentences", "2"]) == 1
    assert "sentences need a reranker to score them: name one" in capsys.readouterr().err
    assert main([*command, "--queries", str(tmp_path / "missing.txt")]) == 1
    assert main([*command, "--num-queries", "0"]) == 1
    assert main([*command[:-1], str(tmp_path / "nowhere" / "calibration.json")]) == 1
    assert "there is no folder" in capsys.readouterr().err
