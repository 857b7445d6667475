"""What a verdict says, of loads whose answer is known."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from made import made_result, settings

from streamrag_bench.cell import Arm, CellResult, RequestResult
from streamrag_bench.grid import Grid
from streamrag_bench.report.comparison import compare
from streamrag_bench.report.verdict import Verdict, verdicts
from streamrag_bench.summary import digest

RETRIEVAL_S = 5.0


def cell(arm: Arm, waits_s: Sequence[float], *, seed: int = 1, busy_s: float = 10.0, **changes: object) -> CellResult:
    """A cell whose queries wait for these seconds after retrieval, and then a second for their last token."""
    requests = tuple(
        RequestResult(f"q{i}", i, i + RETRIEVAL_S, i + RETRIEVAL_S + wait_s, i + RETRIEVAL_S + wait_s + 1, 3, 0.1)
        for i, wait_s in enumerate(waits_s)
    )
    return CellResult(settings(arm=arm, seed=seed, **changes), requests, busy_s, 100.0, 1.0)


def verdict(*cells: CellResult) -> Verdict:
    (comparison,) = compare(map(digest, cells))
    (only,) = verdicts(comparison)
    return only


def noise(num: int, *, seed: int) -> list[float]:
    """Waits in a queue, drawn at random: long waits are neighbours."""
    draw = random.Random(f"{num} {seed}")
    waits_s, queue_s = [], 0.0
    for _ in range(num):
        queue_s = max(queue_s - draw.expovariate(1.0), 0.0) + 0.5 * draw.lognormvariate(-0.5, 1.0)
        waits_s.append(queue_s)
    return waits_s


def jittered(waits_s: Sequence[float], *, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [wait_s * draw.lognormvariate(0.0, 0.2) for wait_s in waits_s]


def test_a_gain_that_all_queries_share_is_no_noise() -> None:
    found = verdict(cell("no-streaming", [2.0] * 40), cell("streaming", [1.0] * 40))
    assert {change.effect for change in found.changes} == {"sooner"}


def test_a_regression_at_p99_is_told_from_a_gain_at_the_median() -> None:
    before = [2 + w for w in noise(1_000, seed=2)]
    after = [20.0 + i / 100 if i % 100 < 2 else wait_s - 1.5 for i, wait_s in enumerate(before)]
    found = verdict(cell("no-streaming", before), cell("streaming", after))
    effects = {change.percentile: change.effect for change in found.changes if change.time == "ttft_after_retrieval_s"}
    assert effects == {"p50": "sooner", "p95": "sooner", "p99": "later"}
    assert found.sentences[0].partition(" s later at P99")[1], "what is later at P99 comes first"


def test_a_slower_arm_is_later_at_every_percentile() -> None:
    before = noise(500, seed=4)
    found = verdict(cell("no-streaming", before), cell("streaming", [2 * w + 1 for w in before]))
    assert {change.effect for change in found.changes} == {"later"}


def test_a_difference_of_four_milliseconds_is_no_difference() -> None:
    before = noise(500, seed=5)
    found = verdict(cell("no-streaming", before), cell("streaming", [w + 0.004 for w in before]))
    assert {change.effect for change in found.changes} == {"no difference"}


@pytest.mark.parametrize("num", [30, 100, 500])
def test_noise_is_no_change(num: int) -> None:
    called = []
    for seed in range(20):
        load = noise(num, seed=seed)
        cells = (cell("no-streaming", jittered(load, seed=2 * seed)), cell("streaming", jittered(load, seed=-seed - 1)))
        called += [c.effect for c in verdict(*cells).changes if c.effect in ("later", "sooner")]
    assert len(called) <= 6  # of 120


def test_queries_too_few_to_tell_are_not_said_to_show_anything() -> None:
    before, after = [1.0, 2.0, 9.0, 1.5], [2.0, 1.0, 7.0, 3.0]
    found = verdict(cell("no-streaming", before), cell("streaming", after))
    assert found.changes[0].effect == "within noise"


def test_a_query_is_compared_with_itself_in_the_same_seed() -> None:
    before = [cell("no-streaming", noise(200, seed=seed), seed=seed) for seed in (1, 2)]
    after = [cell("streaming", noise(200, seed=seed), seed=seed) for seed in (2, 3)]
    after[0] = replace(after[0], requests=after[0].requests[:0:-1])
    found = verdict(*before, *after)
    assert (found.num_queries, found.num_unanswered) == (199, 1)


def test_thrown_away_tokens_are_those_that_updates_invalidated_or_that_were_computed_again() -> None:
    cells = [made_result(settings(arm=arm, workload="anns")) for arm in ("no-streaming", "streaming")]
    found = verdict(*cells)
    records = [r.record for r in cells[1].requests if r.record]
    num = sum(record.num_invalidated + record.num_recomputed for record in records)
    assert found.num_thrown_away == num > 0
    assert found.num_computed == sum(record.num_computed for record in records)


def test_an_answer_of_one_token_has_no_separate_last_token() -> None:
    for num, has_last in ((1, False), (2, True)):
        cells = [cell(arm, [1.0], num_output_tokens=num) for arm in ("no-streaming", "streaming")]  # type: ignore[arg-type]
        assert any(change.time == "total_s" for change in verdict(*cells).changes) == has_last


def test_every_arm_and_rate_has_a_verdict_that_is_json() -> None:
    grid = Grid("virtual", "anns", arms=("no-streaming", "warming", "streaming"), qps=(1, 2), num_queries=20)
    (comparison,) = compare(digest(made_result(each)) for each in grid.cells())
    found = list(verdicts(comparison))
    assert [(each.qps, each.arm) for each in found] == [
        (qps, arm) for qps in (1, 2) for arm in ("warming", "streaming srpf/recompute")
    ]
    written = json.loads(json.dumps([each.as_json() for each in found], allow_nan=False))
    assert written[0]["changes"][0].keys() >= {"time", "percentile", "baseline_s", "arm_s", "noise_s", "effect"}
    assert written[0]["num_thrown_away"] is None, "warming requests do not tell"


def test_without_the_arm_to_compare_with_there_is_no_verdict() -> None:
    (comparison,) = compare([digest(cell("streaming", [1.0]))])
    assert list(verdicts(comparison)) == []
