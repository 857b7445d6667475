from math import inf

import pytest

from streamrag.backends.simulated.virtual_time import run_virtual
from studies.routing.cells import ROUTERS, Cell, cells, digest, make_engine, run_cell
from studies.routing.fleet import Fault, Fleet, simulate
from studies.routing.loads import LOADS

FIGURES = ("mean_s", "p99_s", "hit_rate", "imbalance")


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("load", ["conversations", "rag"])
def test_each_query_is_answered_once_and_the_tracker_is_empty_afterwards(router, load):
    queries = LOADS[load](2.0, 60, 1)

    async def run():
        fleet = Fleet(3, make_engine("lean"), [ROUTERS[router]()])
        outcome = await fleet.run(queries)
        (caller,) = fleet.callers
        assert all(not (state.num_open or state.num_new_tokens) for state in caller.tracker.states(fleet._engines))
        return outcome

    outcome = run_virtual(run())
    assert sorted(done.query.arrival_s for done in outcome.done) == [query.arrival_s for query in queries]
    figures = outcome.figures()
    assert figures["num_failed"] == figures["num_replays"] == 0
    assert figures["imbalance"] >= 1
    assert figures["hit_rate"] < 1


def test_a_replica_that_is_killed_loses_only_queries_that_have_shown_a_token():
    queries = LOADS["conversations"](12.0, 200, 1)
    outcome = simulate(2, make_engine("lean"), [ROUTERS["round robin"]()], queries, Fault(0.5, 0.8, inf))
    figures = outcome.figures()
    assert len(outcome.done) == 200
    assert figures["num_failed"] > 0
    assert figures["num_replays"] > 0
    assert all(done.ttft_s > 0 for done in outcome.done if not done.has_failed)
    assert {done.replica for done in outcome.done if done.num_replays and not done.has_failed} == {"r1"}


def test_a_slow_replica_delays_queries_while_it_is_slow():
    queries = LOADS["azure"](4.0, 100, 1)
    slow, usual = (
        simulate(2, make_engine("lean"), [ROUTERS["round robin"]()], queries, fault).figures()
        for fault in (Fault(0.2, 0.8, 3.0), None)
    )
    assert slow["p99_s"] > 1.5 * usual["p99_s"]


def test_a_cell_gives_the_same_figures_every_time():
    one, other = (run_cell(Cell("rag", 2, "soonest", 30), {}) for _ in range(2))
    assert {name: one[name] for name in FIGURES} == {name: other[name] for name in FIGURES}


def test_each_cell_is_planned_once_and_names_a_router(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrivals")
    planned = cells(1.0, {"azure": trace})
    assert len(set(planned)) == len(planned)
    assert all(cell.router in ROUTERS for cell in planned)
    assert {cell.trace for cell in planned if cell.load == "azure"} == {digest(trace)}
    assert {cell.trace for cell in planned if cell.load != "azure"} == {""}


def test_arrivals_are_known_by_what_they_are_and_not_by_the_name_of_their_file(tmp_path):
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for path, text in ((one, "arrivals"), (same, "arrivals"), (other, "others")):
        path.write_text(text)
    assert cells(1.0, {"azure": one}) == cells(1.0, {"azure": same}) != cells(1.0, {"azure": other})
