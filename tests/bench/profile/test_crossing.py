from dataclasses import replace

from streamrag.bench.profile.crossing import crossing
from streamrag.engine.costs.copy_costs import CopyCosts, linear_copies
from streamrag.engine.costs.step_profiles import TableProfile, recompute_s

PROFILE = TableProfile("t", "cpu", ((1, 0.010), (100, 0.030)), 1e-7, 0.0, kv_tokens=1_000, block_size=10)


def with_copies(latency_s: float, block_s: float) -> tuple[TableProfile, CopyCosts]:
    copies = linear_copies(1, 1 / block_s, latency_s)
    return replace(PROFILE, copies=copies), copies


def test_the_crossing_is_where_copying_becomes_the_quicker_way() -> None:
    profile, copies = with_copies(0.010, 1e-4)
    found = crossing(profile, copies.in_s, 1_000)
    assert found is not None
    assert found % 10 == 0
    assert copies.in_s(found // 10) < recompute_s(profile, 0, found)
    assert copies.in_s(found // 10 - 1) >= recompute_s(profile, 0, found - 10)


def test_the_crossing_is_the_first_block_where_copying_is_always_quicker() -> None:
    profile, copies = with_copies(0.0, 1e-6)
    assert crossing(profile, copies.in_s, 1_000) == 10


def test_no_crossing_exists_where_recomputing_is_always_quicker() -> None:
    profile, copies = with_copies(0.0, 1.0)
    assert crossing(profile, copies.in_s, 1_000) is None
