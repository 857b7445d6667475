"""The envelope, and targets met or missed."""

import math
from dataclasses import replace

import pytest

from experiments.paper.points import HALF_KV, LIGHT, LOADED, Point
from experiments.paper.standing import Seconds, Standing, envelope, least, ratios
from experiments.paper.targets import TARGETS, Target


def seconds(p50: float, p95: float, p99: float) -> Seconds:
    return {"P50": p50, "P90": (p50 + p95) / 2, "P95": p95, "P99": p99, "max": 2 * p99}


def test_the_envelope_is_the_best_at_each_rank_of_those_that_are_not_worse_than_not_streaming() -> None:
    not_streaming = seconds(1.0, 3.0, 5.0)
    found, names = envelope(
        {
            "a": seconds(0.1, 1.0, 4.0),
            "b": seconds(0.2, 0.5, 5.0),
            "collapses": seconds(0.05, 0.4, 5.1),
        },
        not_streaming,
    )
    assert names == ("a", "b")
    assert found
    assert [found[rank] for rank in ("P50", "P95", "P99")] == [0.1, 0.5, 4.0]


def test_a_collapsed_load_has_no_envelope() -> None:
    assert envelope({"a": seconds(0.1, 1.0, 6.0)}, seconds(1.0, 3.0, 5.0)) == (None, ())
    assert all(map(math.isnan, ratios(None, seconds(1, 2, 3)).values()))
    assert least([]) is None


def made_standing(point: Point, ours: Seconds, **changes: object) -> Standing:
    base = Standing(
        point,
        (1,),
        ours,
        fcfs=seconds(0.10, 0.50, 1.5),
        envelope=seconds(0.09, 0.40, 1.2),
        eligible=("FCFS",),
        not_streaming=seconds(0.7, 3.0, 4.0),
        floor=seconds(0.02, 0.1, 0.4),
        busy_ratio=1.01,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def missed(standings: list[Standing]) -> list[tuple[str, str]]:
    return [(target.text, each.rank) for target in TARGETS for each in target.at(standings) if not each.is_met]


def test_a_fast_enough_way_meets_all_targets() -> None:
    assert missed([made_standing(LOADED[0], seconds(0.045, 0.25, 0.8))]) == []


def test_each_limit_is_missed_just_past_it() -> None:
    # The paper's FCFS takes 0.50 at P95: 0.40 is 1.25 times as fast.
    fast = made_standing(LOADED[0], seconds(0.045, 0.25, 0.8), envelope=None)
    assert ("the paper's FCFS over ours", "P95") not in missed([fast])
    slow = replace(fast, ours=seconds(0.045, 0.401, 0.8), floor=seconds(0.02, 0.2, 0.4))
    assert missed([slow]) == [("the paper's FCFS over ours", "P95")]
    assert missed([replace(fast, busy_ratio=1.021)]) == [("busy time over not streaming's", "busy")]
    # Beside not streaming with as many tokens a step, which keeps the engine less busy.
    assert missed([replace(fast, busy_ratio_same=1.021)]) == [("busy time over not streaming's", "busy")]
    waits = replace(fast, ours={**fast.ours, "max": 16.1})
    assert missed([waits]) == [("our longest wait over not streaming's", "max")]
    assert missed([replace(fast, not_streaming={**fast.not_streaming, "P90": 0.14})]) == [
        ("not streaming over ours, up to twice saturation", "P90")
    ]


def test_a_limit_that_the_bound_forbids_is_said_to_be_impossible() -> None:
    # The envelope takes 0.40 at P95, and any schedule 0.38: nobody can be 1.1 times as fast.
    close = made_standing(LOADED[0], seconds(0.045, 0.39, 0.8), bound=seconds(0.02, 0.38, 0.4))
    (target,) = (t for t in TARGETS if t.text == "the envelope over ours" and t.ranks == ("P95",))
    (found,) = target.at([close])
    assert (found.is_met, found.is_possible) == (False, False)
    assert found.bound == pytest.approx(0.40 / 0.38)
    assert target.why([found]) == "impossible: no schedule gets past 1.05 (P95, crawler 4 QPS, seed 1 alone)"
    found = found._replace(seeds=(1, 2))
    assert target.why([found]) == "impossible: no schedule gets past 1.05 (P95, crawler 4 QPS)"
    possible = replace(target, reason="known").why([found._replace(is_possible=True, bound=2.0)])
    assert possible == "1.03 (P95, crawler 4 QPS; the bound allows 2.00); known"
    (alone,) = target.at([replace(close, floor=seconds(0.02, 0.38, 0.4), bound=seconds(0.02, 0.2, 0.4))])
    assert alone.is_possible
    assert "a request alone on the engine 1.05" in target.why([alone])
    met = found._replace(is_met=True)
    assert target.why([met]) == target.why_beside_best([met], [met]) == ""
    told = replace(target, budget_reason="long steps").why_beside_best([met], [found])
    assert told == "with the best budget 1.03 (P95, crawler 4 QPS): long steps"
    told = replace(target, budget_reason="").why_beside_best([met], [found])
    assert told == "with the best budget 1.03 (P95, crawler 4 QPS)"
    assert target.why_beside_best([found], [found]) == "", "what is missed anyway is told once"


def test_limits_differ_by_point() -> None:
    half = made_standing(HALF_KV[0], seconds(0.05, 0.3, 0.55))
    of = [target for target in TARGETS if "half" in target.text]
    assert [[each.limit for each in target.at([half])] for target in of] == [[1.2], [2.5]]
    assert [[each.limit for each in target.at([replace(half, point=HALF_KV[1])])] for target in of] == [[1.2], [1.5]]
    assert all(target.at([replace(half, point=LIGHT[0])]) == [] for target in of)


def test_an_unknown_target_is_neither_met_nor_missed() -> None:
    unknown = made_standing(LOADED[0], seconds(0.045, 0.25, 0.8), fcfs=None, envelope=None)
    for target in TARGETS:
        if "FCFS" in target.text or "envelope" in target.text:
            assert target.at([unknown]) == []


def test_the_worst_figure_is_the_one_farthest_on_the_wrong_side() -> None:
    def target(*, is_least: bool) -> Target:
        return Target("", ("P50",), lambda s: s.ours, lambda p: 1.0, lambda p: True, is_least=is_least)

    found = [made_standing(LOADED[0], seconds(value, 1, 2)) for value in (0.9, 1.4, 2.0)]
    for is_least, worst in ((True, 0.9), (False, 2.0)):
        of = target(is_least=is_least)
        assert of.worst(of.at(found)).value == worst
