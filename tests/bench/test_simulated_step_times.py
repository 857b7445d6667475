"""Steps with copies, made by hand: how long they take, what is counted, and what a timeline is told."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from streamrag.bench.cell import CopyTotals
from streamrag.bench.simulated_step_times import CopyLog, StepTimes
from streamrag.engine.costs.copy_costs import CopyCosts, linear_copies
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile

H200 = load_profile("h200-llama8b-tp2")
assert isinstance(H200, AnalyticProfile)
BLOCK_BYTES = 1 << 20
FAST = linear_copies(BLOCK_BYTES, BLOCK_BYTES / 0.001)  # a millisecond a block
PARTS = [("a#0", (2_000, 0))]
COMPUTE_S = H200.step_s([(2_000, 0)])


@dataclass
class Copies:
    """As `streamrag.backends.vllm.copy_wire.HostCopies`."""

    saves: list[tuple[int, int]] = field(default_factory=list)
    held_saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)


def step(copies: Copies | None, *, new: dict[str, list[int]] | None = None) -> SimpleNamespace:
    """As vLLM's `SchedulerOutput`, with new requests and the blocks that they are given."""
    return SimpleNamespace(
        kv_connector_metadata=copies,
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(blocks,)) for r, blocks in (new or {}).items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["old#7"], new_block_ids=[None]),
    )


def times(costs: CopyCosts | None, log: CopyLog | None = None) -> StepTimes:
    return StepTimes(H200, lambda step: PARTS, copies=costs, log=log)


def test_without_copies_a_step_takes_what_it_computes() -> None:
    for costs, copies in ((None, None), (FAST, None), (FAST, Copies())):
        assert times(costs)(step(copies), 5.0) == pytest.approx(COMPUTE_S)
    assert times(None).totals is None
    assert times(FAST).totals == CopyTotals()


def test_a_step_waits_for_the_blocks_that_it_overwrites_and_not_for_those_it_only_reads() -> None:
    saves, held = [(1, 0), (2, 1), (3, 2)], [(4, 3)]
    assert times(FAST)(step(Copies(saves)), 5.0) == pytest.approx(0.003 + COMPUTE_S)
    assert times(FAST)(step(Copies(held_saves=held)), 5.0) == pytest.approx(COMPUTE_S)
    standing = replace(FAST, is_overlapped=False)
    assert times(standing)(step(Copies(saves, held)), 5.0) == pytest.approx(0.004 + COMPUTE_S)


def test_loads_run_beside_the_forward_as_far_as_they_can() -> None:
    few, many = ([(slot, slot) for slot in range(num)] for num in (2, 1_000))
    assert times(FAST)(step(Copies(loads=few)), 5.0) == pytest.approx(COMPUTE_S)
    assert times(FAST)(step(Copies(loads=many)), 5.0) == pytest.approx(1.0 + COMPUTE_S / 32)


def test_blocks_bytes_and_seconds_are_counted_over_all_ranks() -> None:
    of = times(FAST)
    of(step(Copies([(1, 0)], [(2, 1), (3, 2)], [(3, 4)])), 0.0)
    of(step(Copies([(1, 3)])), 1.0)
    totals = of.totals
    assert totals is not None
    assert (totals.num_blocks_saved, totals.num_blocks_loaded) == (4, 1)
    assert (totals.num_bytes_out, totals.num_bytes_in) == (4 * 2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert (totals.out_s, totals.in_s) == pytest.approx((0.004, 0.001))


def test_copies_are_told_by_who_held_the_blocks() -> None:
    log = CopyLog(FAST, block_size=16)
    of = times(FAST, log)
    of(step(Copies(), new={"a#0": [1, 2, 3], "b#1": [4]}), 0.0)
    # A third one is given what the two had to give up; later the first gets other blocks for its own.
    of(step(Copies(saves=[(1, 0), (4, 1), (2, 2)]), new={"c#2": [1, 4, 2]}), 1.0)
    of(step(Copies(loads=[(0, 5), (2, 6)]), new={"a#0": [3, 5, 6]}), 2.0)
    assert [(c.query_id, c.direction, c.num_tokens) for c in log.copies] == [
        ("a", "to-host", 32),
        ("b", "to-host", 16),
        ("a", "to-device", 32),
    ]
    assert [(c.start_s, c.end_s) for c in log.copies] == [
        pytest.approx((1.0, 1.002)),
        pytest.approx((1.002, 1.003)),
        pytest.approx((2.0, 2.002)),
    ]


def test_held_blocks_are_saved_before_the_next_step_overwrites() -> None:
    log = CopyLog(FAST, block_size=16)
    of = times(FAST, log)
    held = [(block, block) for block in range(100)]
    of(step(Copies(held_saves=held), new={"a#0": list(range(100))}), 0.0)
    of(step(Copies(saves=[(0, 100)])), 0.05)
    assert [(c.start_s, c.end_s, c.num_tokens) for c in log.copies] == [
        pytest.approx((0.0, 0.1, 1_600)),
        pytest.approx((0.1, 0.101, 16)),
    ]
