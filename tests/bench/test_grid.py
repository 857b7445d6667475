"""Which cells a benchmark has, and what they are called."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrag.bench.cell import CellSettings
from streamrag.bench.grid import Grid, describe_cell, describe_load, load_of, variant_name
from streamrag.errors import ConfigurationError


def test_policies_and_evictions_multiply_the_streaming_arm_only() -> None:
    grid = Grid(
        "virtual",
        "crawler",
        arms=("no-streaming", "warming", "stock-sessions", "streaming"),
        policies=("fcfs", "srpf(0.5, 20000)"),
        evictions=("recompute", "swap"),
        qps=(1, 2),
        seeds=(1, 2, 3),
    )
    cells = grid.cells()
    assert len(cells) == (3 + 2 * 2) * 2 * 3
    assert len(set(cells)) == len(cells)
    assert {variant_name(cell) for cell in cells if cell.arm == "streaming"} == {
        "streaming fcfs/recompute",
        "streaming fcfs/swap",
        "streaming srpf(0.5, 20000)/recompute",
        "streaming srpf(0.5, 20000)/swap",
    }


def test_host_memory_and_options_are_for_the_cells_that_use_them() -> None:
    grid = Grid(
        "virtual",
        "crawler",
        arms=("no-streaming", "stock-sessions", "streaming"),
        evictions=("recompute", "cost"),
        host_kv_bytes=1_000,
        scheduler_options={"low_water": 0.2},
        qps=(1,),
    )
    assert {variant_name(cell): (cell.host_kv_bytes, cell.scheduler_options) for cell in grid.cells()} == {
        "no-streaming": (None, {}),
        "stock-sessions": (None, {}),
        "streaming srpf/recompute low_water=0.2": (None, {"low_water": 0.2}),
        "streaming srpf/cost host_kv_bytes=1,000 low_water=0.2": (1_000, {"low_water": 0.2}),
    }
    assert len({load_of(cell) for cell in grid.cells()}) == 1


def test_the_first_seed_is_complete_before_the_next_begins() -> None:
    cells = Grid("virtual", "anns", qps=(1, 2), delays=(1.0, 30.0), kv_tokens=(1000, 2000), seeds=(7, 8)).cells()
    assert [cell.seed for cell in cells] == [7] * 16 + [8] * 16


def test_a_trace_may_bring_its_own_arrivals(tmp_path: Path) -> None:
    trace = tmp_path / "crawl.jsonl"
    trace.touch()
    assert {cell.qps for cell in Grid("virtual", str(trace)).cells()} == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qps": ()}, "give --qps"),
        ({"workload": "/nowhere/trace.jsonl"}, "none of crawler, anns, anns-last, nor a trace"),
        ({"arms": ("magic",)}, r"arms\[0\]='magic' must be 'no-streaming', 'warming'"),
        ({"policies": ("magic",)}, "no policy 'magic'"),
        ({"evictions": ("magic",)}, r"evictions\[0\]='magic' must be 'recompute', 'swap' or 'cost'"),
        ({"host_kv_bytes": 0}, "host_kv_bytes=0 must be"),
        ({"qps": (0.0,)}, r"qps\[0\]=0.0 must be"),
        ({"qps": (float("nan"),)}, r"qps\[0\]=nan must be"),
        ({"delays": (-1.0,)}, r"delays\[0\]=-1.0 must be"),
        ({"kv_tokens": (0,)}, r"kv_tokens\[0\]=0 must be"),
        ({"num_queries": 0}, "num_queries=0 must be"),
        ({"seeds": ()}, "seeds.* at least 1 item"),
        ({"model": "llama"}, "virtual time takes a hardware profile"),
        ({"clock": "wall", "profile": "h200"}, "wall time takes a model"),
    ],
)
def test_a_grid_that_no_cell_could_run_with_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Grid(**{"clock": "virtual", "workload": "crawler", "qps": (1.0,), **changes})


def test_cells_that_can_be_compared_have_one_load() -> None:
    a = CellSettings("virtual", "crawler", "no-streaming", qps=1.0, seed=1)
    b = CellSettings("virtual", "crawler", "streaming", policy="lcas", eviction="swap", qps=4.0, seed=2)
    c = replace(b, scheduler_options={"lean": True})
    assert load_of(a) == load_of(b) == load_of(c)
    assert variant_name(c) == "streaming lcas/swap lean=True"
    assert load_of(a) != load_of(CellSettings("virtual", "crawler", "no-streaming", qps=1.0, delay=10.0))


def test_names_tell_what_is_not_usual() -> None:
    plain = CellSettings("virtual", "anns", "streaming", qps=0.5)
    assert describe_cell(plain) == "streaming srpf/recompute, anns, 0.5 QPS, seed 1"
    odd = CellSettings("virtual", "/data/a trace.jsonl", "warming", delay=30, kv_tokens=150_000, num_output_tokens=8)
    assert describe_load(odd) == "a trace.jsonl, gaps 30x, KV cache of 150,000 tokens, 8 output tokens"
    assert describe_cell(odd).endswith("the trace's arrivals, seed 1")
