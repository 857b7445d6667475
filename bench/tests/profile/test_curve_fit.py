import random
from dataclasses import asdict, replace

import pytest

from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.errors import ConfigurationError
from streamrag_bench.profile.curve_fit import fit_copies, fit_table

TABLE = TableProfile("t", "cpu", ((1, 0.010), (100, 0.030), (200, 0.070)), 1e-6, 0.001, kv_tokens=1_000)


def test_a_fit_finds_what_made_the_measurements() -> None:
    rng = random.Random(0)
    true = replace(TABLE, own_pair_s=3e-6)
    measured = []
    for _ in range(120):
        parts = [(rng.choice([1, 16, 64, 100, 150]), rng.randrange(3_000)) for _ in range(rng.choice([1, 1, 2, 6]))]
        measured.append((parts, true.step_s(parts) * rng.uniform(0.99, 1.01)))
    found = replace(true, **asdict(fit_table(measured, [1, 100, 200])))
    for parts, _ in measured:
        assert found.step_s(parts) == pytest.approx(true.step_s(parts), rel=0.02)
    assert found.step_s([(500, 2_000)]) == pytest.approx(true.step_s([(500, 2_000)]), rel=0.05)


def test_a_line_needs_two_knots() -> None:
    with pytest.raises(ConfigurationError, match="1 knots"):
        fit_table([([(10, 0)], 0.01)], [10, 10])


def test_copies_go_through_their_medians_where_these_rise() -> None:
    measured = {4: [0.4, 0.5, 9.0], 1: [0.1, 0.2, 0.3], 2: [0.3]}
    assert fit_copies(measured) == ((1, 0.2), (2, 0.3), (4, 0.5))


def test_copies_that_seem_quicker_than_smaller_ones_are_as_quick() -> None:
    (_, first_s), (_, second_s), (_, third_s) = fit_copies({1: [0.3], 2: [0.2], 4: [0.9]})
    assert first_s == second_s
    assert 0.2 < first_s < 0.3
    assert third_s == pytest.approx(0.9)


def test_no_number_of_tokens_takes_less_than_no_time() -> None:
    """Steps of one request that are faster than half of one of two make a request cost more than any step of one."""
    measured = [([(4, 0)], 0.001), ([(2, 0), (2, 0)], 0.01), ([(2, 0), (1, 0), (1, 0)], 0.02)]
    fitted = fit_table(measured, [1, 4])
    assert min(seconds for _, seconds in fitted.points) >= 0
    assert fitted.request_s > 0
