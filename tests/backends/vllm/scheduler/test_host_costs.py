"""Expected and observed costs of KV in host memory, of requests that are told of by hand."""

from collections.abc import Sequence

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from streamrag.backends.vllm.scheduler.host_memory.costs import HostCosts, Match
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.engine.costs.copy_costs import linear_copies
from streamrag.engine.costs.price import Price
from streamrag.engine.costs.step_profiles import StepPart, TableProfile
from streamrag.engine.recompute_or_swap import DROPPED, CostChoice
from streamrag.records import RestoreRecord

BLOCK_SIZE = 4
BLOCK_BYTES = 1_000
FAST, SLOW = 1e9, 1e2  # bytes a second: a block takes a microsecond, or ten seconds


def price(bytes_per_s: float) -> Price:
    """Costs of an engine whose steps take a millisecond a token, and nothing else."""
    copies = linear_copies(BLOCK_BYTES, bytes_per_s)
    points = ((1, 0.001), (1_000, 1.0))
    profile = TableProfile("p", "d", points, 0.0, 0.0, kv_tokens=0, block_size=BLOCK_SIZE, copies=copies)
    return Price(profile, BLOCK_SIZE)


def costs(bytes_per_s: float = FAST) -> HostCosts:
    return HostCosts(price(bytes_per_s), BLOCK_SIZE)


def evicted(name: str = "a", num_tokens: int = 40) -> StreamRequest:
    """A request that has lost the KV of its whole prompt."""
    request = Request(name, list(range(num_tokens)), SamplingParams(max_tokens=1), None)
    stream = StreamRequest.adopt(request, None, 0.0, 0.0)
    stream.log.on_step(0, num_tokens, 0.0)
    lose(stream)
    return stream


def lose(request: StreamRequest) -> None:
    request.was_evicted = True
    request.log.on_loss(request.num_prompt_tokens, DROPPED, 1.0)


def loading(found: HostCosts, request: StreamRequest, num_blocks: int, now_s: float = 2.0) -> None:
    comparison = CostChoice(price(FAST)).resume(0, num_blocks, now_s)
    found.on_resume(request, Match(0, num_blocks, comparison, num_blocks * BLOCK_SIZE), now_s)


def recomputing(found: HostCosts, request: StreamRequest, start: int, num_blocks: int) -> None:
    comparison = CostChoice(price(SLOW)).resume(start, num_blocks, 2.0) if num_blocks else None
    found.on_resume(request, Match(start, num_blocks, comparison, 0), 2.0)


def run(found: HostCosts, parts: Sequence[tuple[str, StepPart]], duration_s: float) -> None:
    found.on_step_end(parts, duration_s, 0.0, waited_for_copies=False)


def observed(request: StreamRequest) -> list[float | None]:
    return [restore.observed_s for restore in request.log.restores]


def save_s(request: StreamRequest) -> list[float]:
    return [preemption.save_s for preemption in request.log.preemptions]


# ------------------------------------------------------------------------------------------------------ what is chosen


def test_a_load_is_noted_with_both_costs() -> None:
    found, request = costs(), evicted()
    loading(found, request, 5, now_s=7.0)
    (restore,) = request.log.restores
    assert restore == RestoreRecord(7.0, "swap", 20, restore.recompute_s, restore.swap_s, None)
    assert restore.recompute_s == pytest.approx(0.020)
    assert restore.swap_s == pytest.approx(5e-6)
    assert restore.expected_s == restore.swap_s


def test_a_recomputation_is_noted_with_both_costs() -> None:
    found, request = costs(SLOW), evicted()
    recomputing(found, request, 3, 5)
    (restore,) = request.log.restores
    assert (restore.choice, restore.num_tokens) == ("recompute", 20)
    assert restore.recompute_s == restore.expected_s == pytest.approx(0.020)
    assert restore.swap_s == pytest.approx(50)


def test_without_anything_in_host_memory_all_that_was_lost_is_recomputed() -> None:
    found, request = costs(), evicted(num_tokens=38)
    recomputing(found, request, 3, 0)
    (restore,) = request.log.restores
    assert (restore.choice, restore.num_tokens, restore.swap_s) == ("recompute", 36 - 12, None)  # whole blocks
    assert restore.expected_s == pytest.approx(0.024)


def test_kv_still_in_the_prefix_cache_is_no_restore() -> None:
    found, request = costs(), evicted(num_tokens=38)
    recomputing(found, request, 10, 0)
    assert request.log.restores == []


def test_a_request_that_was_not_evicted_has_no_restore() -> None:
    found, request = costs(), evicted()
    request.was_evicted = False
    loading(found, request, 5)
    assert request.log.restores == []


# ------------------------------------------------------------------------------------------------------ what loads take


def test_a_load_takes_its_share_of_the_report_it_is_in() -> None:
    found, a, b = costs(), evicted("a"), evicted("b")
    loading(found, a, 3)
    loading(found, b, 1)
    assert observed(a) == [None]
    found.on_copied(0, 0.0, 4, 0.8)
    assert observed(a) == [pytest.approx(0.6)]
    assert observed(b) == [pytest.approx(0.2)]


def test_a_load_in_two_reports_takes_its_share_of_both() -> None:
    found, a, b = costs(), evicted("a"), evicted("b")
    loading(found, a, 4)
    loading(found, b, 2)
    found.on_copied(0, 0.0, 1, 0.1)
    found.on_copied(0, 0.0, 5, 0.5)
    assert observed(a) == [pytest.approx(0.1 + 0.3)]
    assert observed(b) == [pytest.approx(0.2)]


def test_each_restore_of_a_request_has_its_own_time() -> None:
    found, request = costs(), evicted()
    loading(found, request, 2)
    found.on_copied(0, 0.0, 2, 0.5)
    lose(request)
    loading(found, request, 2)
    found.on_copied(0, 0.0, 2, 0.75)
    assert observed(request) == [pytest.approx(0.5), pytest.approx(0.75)]


# ---------------------------------------------------------------------------------------------- what recomputing takes


def test_a_recomputation_takes_its_share_of_each_step_that_it_is_in() -> None:
    found, request = costs(SLOW), evicted()
    recomputing(found, request, 0, 4)
    # A step of its own would have computed one token in any case.
    run(found, [("a", (8, 0))], 0.8)
    assert observed(request) == [None]
    run(found, [("b", (24, 0)), ("a", (8, 8))], 2.0)
    assert observed(request) == [pytest.approx(0.8 * 7 / 8 + 2.0 * 8 / 32)]


def test_tokens_computed_past_the_lost_ones_are_no_part_of_the_restore() -> None:
    found, request = costs(SLOW), evicted()
    recomputing(found, request, 2, 2)
    run(found, [("a", (32, 8))], 4.0)
    assert observed(request) == [pytest.approx(1.0)]
    run(found, [("a", (1, 40))], 4.0)
    assert observed(request) == [pytest.approx(1.0)]


def test_steps_of_others_add_nothing() -> None:
    found, request = costs(SLOW), evicted()
    recomputing(found, request, 0, 2)
    run(found, [("b", (8, 0))], 100.0)
    run(found, [("b", (8, 8)), ("a", (8, 0))], 1.0)
    assert observed(request) == [pytest.approx(0.5)]


@pytest.mark.parametrize("how", ["it starts again", "it has ended"])
def test_the_cost_of_a_restore_that_is_cut_off_is_unknown(how: str) -> None:
    found, request = costs(SLOW), evicted()
    recomputing(found, request, 0, 4)
    run(found, [("a", (8, 0))], 1.0)
    if how == "it starts again":
        run(found, [("a", (8, 0))], 1.0)
    else:
        found.on_finish("a")
    run(found, [("a", (8, 8))], 1.0)
    assert observed(request) == [None]


def test_a_restore_after_one_that_was_cut_off_is_observed() -> None:
    found, request = costs(SLOW), evicted()
    recomputing(found, request, 0, 4)
    run(found, [("a", (8, 0)), ("b", (8, 0))], 1.0)
    lose(request)
    recomputing(found, request, 0, 4)
    run(found, [("a", (16, 0)), ("b", (16, 8))], 1.0)
    assert observed(request) == [None, pytest.approx(0.5)]


# ------------------------------------------------------------------------------------------------------ what saves take


def test_saves_are_expected_as_parts_of_one_copy() -> None:
    found, a, b = costs(SLOW), evicted("a"), evicted("b")
    found.on_saves_sent(a, 2, 3)
    found.on_saves_sent(b, 1, 3)
    expected = [(p.num_tokens_saved, p.expected_save_s, p.save_s) for r in (a, b) for p in r.log.preemptions]
    assert expected == [(8, pytest.approx(20), 0.0), (4, pytest.approx(10), 0.0)]


def test_saves_end_in_the_order_in_which_they_were_sent() -> None:
    found, a, b = costs(), evicted("a"), evicted("b")
    found.on_saves_sent(a, 2, 3)
    found.on_saves_sent(b, 1, 3)
    found.on_write_through(2)
    found.on_saves_sent(b, 3, 3)
    found.on_copied(4, 1.0, 0, 0.0)
    assert save_s(a) == [pytest.approx(0.5)]
    assert save_s(b) == [pytest.approx(0.25)]
    found.on_copied(4, 2.0, 0, 0.0)  # the other block that was written through, and the last three
    assert save_s(a) == [pytest.approx(0.5)]
    assert save_s(b) == [pytest.approx(0.25 + 1.5)]


def test_a_save_belongs_to_the_eviction_that_made_it_necessary() -> None:
    found, request = costs(), evicted()
    found.on_saves_sent(request, 2, 2)
    lose(request)
    found.on_saves_sent(request, 1, 1)
    found.on_copied(2, 0.5, 0, 0.0)
    assert save_s(request) == [pytest.approx(0.5), 0.0]
    found.on_copied(1, 0.125, 0, 0.0)
    assert save_s(request) == [pytest.approx(0.5), pytest.approx(0.125)]


def test_the_two_directions_are_counted_apart() -> None:
    found, a, b = costs(), evicted("a"), evicted("b")
    found.on_saves_sent(a, 2, 2)
    loading(found, b, 2)
    found.on_copied(0, 0.0, 2, 0.25)
    assert (save_s(a), observed(b)) == ([0.0], [pytest.approx(0.25)])
    found.on_copied(2, 0.5, 0, 0.0)
    assert (save_s(a), observed(b)) == ([pytest.approx(0.5)], [pytest.approx(0.25)])


def test_after_a_failure_nothing_is_said_of_what_was_sent_before() -> None:
    found, a, b = costs(), evicted("a"), evicted("b")
    found.on_saves_sent(a, 2, 2)
    loading(found, b, 2)
    found.on_failed_copies()
    found.on_copied(2, 0.5, 2, 0.5)
    assert (save_s(a), observed(b)) == ([0.0], [None])
    found.on_saves_sent(a, 2, 2)
    found.on_copied(2, 0.75, 0, 0.0)
    assert save_s(a) == [pytest.approx(0.75)]


# ------------------------------------------------------------------------------------------- where nothing is compared


def test_without_prices_nothing_is_expected_and_steps_are_shared_by_tokens() -> None:
    found, request = HostCosts(None, BLOCK_SIZE), evicted()
    recomputing(found, request, 0, 0)
    assert [(r.recompute_s, r.swap_s) for r in request.log.restores] == [(0.0, None)]
    found.on_step_end([("a", (40, 0)), ("b", (10, 0))], 1.0, 0.25, waited_for_copies=False)
    assert observed(request) == [pytest.approx(0.8)]
    found.on_saves_sent(request, 2, 2)
    found.on_copied(2, 0.5, 0, 0.0)
    assert [(p.expected_save_s, p.save_s) for p in request.log.preemptions] == [(0.0, 0.5)]
