"""Small host memories, and whether copying by cost loses there."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.tests.made import made_result
from experiments.small_host import HOSTS, LOADS, make_cells, rows_of, verdicts
from streamrag_bench.cell import CellResult
from streamrag_bench.store import CellStore


def test_cost_and_recompute_differ_in_nothing_else() -> None:
    cells = make_cells(LOADS, (101, 102))
    assert len(cells) == len(LOADS) * (1 + len(HOSTS))
    for (load, host), of_seeds in cells.items():
        assert [cell.seed for cell in of_seeds] == [101, 102]
        recompute = cells[load, ""]
        assert [replace(c, eviction="recompute", host_kv_bytes=None) for c in of_seeds] == list(recompute)
        assert {c.host_kv_bytes for c in of_seeds} == {HOSTS.get(host)}
        assert {c.eviction for c in of_seeds} == {"cost" if host else "recompute"}


@pytest.mark.parametrize(("factor", "is_met"), [(0.5, True), (1.019, True), (1.021, False)])
def test_a_rank_that_is_more_than_two_per_cent_worse_is_a_miss(tmp_path: Path, factor: float, is_met: bool) -> None:
    load = LOADS[0]._replace(num_queries=40)
    cells = {key: of for key, of in make_cells([load], (1,)).items() if key[1] in ("", "4 GiB")}
    store = CellStore(tmp_path)
    (recompute,), (cost,) = cells.values()
    made = made_result(recompute)
    store.write(made)
    store.write(slower(replace(made, settings=cost), factor))
    rows = list(rows_of(cells, store))
    assert [row["is_met"] for row in rows] == [True, is_met]
    assert rows[1]["worse"] == pytest.approx(factor)
    (told,) = verdicts(rows)
    assert told.startswith(f"{load.name}, host memory 4 GiB: at worst {factor:.2f} times")
    assert told.endswith("kept" if is_met else "MISSED")


def slower(made: CellResult, factor: float) -> CellResult:
    requests = tuple(
        replace(r, first_token_s=r.retrieval_end_s + factor * r.ttft_after_retrieval_s) for r in made.requests
    )
    return replace(made, requests=requests)
