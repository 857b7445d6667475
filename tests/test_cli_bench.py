"""`streamrag bench` as a person uses it, on the real simulator with a few queries."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from streamrag.bench.cell import CellResult, CellSettings, RequestResult
from streamrag.bench.store import CellStore
from streamrag.cli import main
from streamrag.cli.bench import command as bench
from streamrag.cli.bench.options import grid_of
from streamrag.engine.costs.profile_files import load_profile, save_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile

SMALL = ["--workload", "crawler", "--qps", "2", "--queries", "4", "--seeds", "1", "--processes", "1"]


def named(command: Sequence[str]) -> dict[str, object]:
    """Which lists the options become."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    grid = grid_of(parser.parse_args(command))
    names = ("policies", "qps", "seeds", "profile", "evictions", "host_kv_bytes", "scheduler_options")
    return {name: getattr(grid, name) for name in names}


def test_commas_within_parentheses_belong_to_the_value() -> None:
    lists = named(["simulate", "--workload", "anns", "--qps", "1,0.5", "--policy", "fcfs,srpf(0.5, 20000),k_lpm(inf)"])
    assert lists["policies"] == ("fcfs", "srpf(0.5, 20000)", "k_lpm(inf)")
    assert lists["qps"] == (1.0, 0.5)


def test_scheduler_options_are_json_or_text() -> None:
    options = ["can_partial_evict=true", "num_partial_tokens=null", "low_water=0.2", "records=a=b.jsonl"]
    command = ["simulate", "--workload", "anns", "--qps", "1", "--eviction", "cost", "--host-kv-bytes", "64e9"]
    given = named([*command, *(word for option in options for word in ("--scheduler-option", option))])
    assert given["scheduler_options"] == {
        "can_partial_evict": True,
        "num_partial_tokens": None,
        "low_water": 0.2,
        "records": "a=b.jsonl",
    }
    assert given["evictions"] == ("cost",)
    assert given["host_kv_bytes"] == 64_000_000_000


def test_kv_is_copied_or_computed_unless_nothing_is_known_of_copies(tmp_path: Path) -> None:
    command = ["simulate", "--workload", "anns", "--qps", "1"]
    assert named(command)["evictions"] == ("cost",)
    profile = load_profile("h100-llama8b-tp2")
    assert isinstance(profile, AnalyticProfile)
    save_profile(replace(profile, host_bandwidth_bytes_per_s=None), tmp_path / "no-copies.json")
    assert named([*command, "--profile", str(tmp_path / "no-copies.json")])["evictions"] == ("recompute",)


def test_a_scheduler_option_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        named(["simulate", "--workload", "anns", "--qps", "1", "--scheduler-option", "low_water"])
    assert "'low_water' is not NAME=VALUE" in capsys.readouterr().err


def test_poisson_arrivals_have_three_seeds_and_those_of_a_trace_one(tmp_path: Path) -> None:
    assert named(["simulate", "--workload", "crawler", "--qps", "1"])["seeds"] == (1, 2, 3)
    assert named(["simulate", "--workload", str(tmp_path)])["seeds"] == (1,)
    assert named(["run", "--workload", "crawler", "--qps", "1", "--model", "m"])["seeds"] == (1,)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["simulate", "--workload", "crawler"], "give --qps"),
        (["simulate", *SMALL, "--slo", "ttft=1"], "ttft_after_retrieval_s"),
        (["simulate", *SMALL, "--policy", "magic"], "no policy 'magic'"),
        (["report", "/nowhere"], "holds no results"),
        (["timeline", "/nowhere/cell.json.gz"], "is not the result of a cell"),
        (["timeline", "--workload", "crawler", "--qps", "1,2"], "name 2"),
        (
            ["timeline", "--workload", "crawler", "--qps", "1", "--model", "m", "--profile", "p"],
            "wall time takes a model",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *command]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--profile"])
def test_the_two_clocks_cannot_be_mixed(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb = ["simulate"] if option == "--model" else ["run", "--model", "m"]
    with pytest.raises(SystemExit):
        main(["bench", *verb, *SMALL, option, "x"])
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_a_benchmark_is_run_reported_and_not_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, figures = tmp_path / "results", tmp_path / "cells.json"
    command = ["bench", "simulate", *SMALL, "--output", str(folder), "--json", str(figures), "--keep-steps"]
    command += ["--slo", "ttft_s=1000"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "streaming srpf/cost" in shown.out
    assert "simulated with profile h200-llama8b-tp2" in shown.out
    assert shown.out.index("Verdict: streaming srpf/cost at 2 QPS ") > shown.out.index("no-streaming")
    assert "\n  Cost: " in shown.out.partition("Verdict")[2]
    assert "For your machine: streamrag profile" in shown.out
    assert "2/2" in shown.err
    written = json.loads(figures.read_text())
    cells, (verdict,) = written["cells"], written["verdicts"]
    assert verdict["headline"] in " ".join(shown.out.split())
    assert all(cell["is_simulated"] for cell in cells)
    assert [cell["settings"]["arm"] for cell in cells] == ["no-streaming", "streaming"]
    assert all(cell["goodput"] == pytest.approx(4 / cell["completion_s"]) for cell in cells)
    report = (folder / "report.html").read_text()
    assert report.count("data:image/svg+xml") >= 1
    assert report.count(verdict["headline"]) == 2, "above the tables, and in full at the end"

    files = {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    (folder / "report.html").unlink()
    assert main(command) == 0
    assert "2 of 2 cells are finished already" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()} == files
    assert (folder / "report.html").exists()

    streaming = next(path for path in files if "streaming-srpf" in path.name)
    assert main(["bench", "timeline", str(streaming), "--output", str(tmp_path / "timeline.json")]) == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {"retrieval", "prefill", "step"} <= {event["name"] for event in events}


def test_a_failed_cell_is_named_and_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "simulate", *SMALL, "--output", str(tmp_path), "--json", str(tmp_path / "cells.json")]
    assert main([*command, "--kv-tokens", "16,1680000", "--arms", "no-streaming", "--qps", "2,4"]) == 1
    shown = capsys.readouterr()
    assert "failed: no-streaming, crawler, 4 queries, KV cache of 16 tokens" in shown.err
    assert shown.err.count("kv_tokens=16") == 1, "what fails alike is told once"
    assert "4 QPS, seed 1: the same" in shown.err
    written = json.loads((tmp_path / "cells.json").read_text())
    assert [cell["settings"]["kv_tokens"] for cell in written["cells"]] == [1_680_000] * 2
    assert len(written["failed"]) == 2
    assert "2 cells failed" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_leaves_no_process_and_says_how_to_go_on(tmp_path: Path) -> None:
    many = ["--workload", "crawler", "--qps", "4", "--seeds", "1", "--processes", "2", "--output", str(tmp_path)]
    program = [sys.executable, "-c", "from streamrag.cli import main; raise SystemExit(main())", "bench", "simulate"]
    with subprocess.Popen([*program, *many], stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        logs = tmp_path / "logs"
        while len(list(logs.glob("*.log"))) < 2:  # both cells have a process of their own by then
            assert running.poll() is None
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGINT)
        _, written = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "0 of 2 cells are finished" in written
    assert "the same command resumes there" in written
    assert list(CellStore(tmp_path).cells.glob("*")) == []
    while running.pid in sessions():  # what forked the processes ends when it notices; pytest's timeout is the limit
        time.sleep(0.05)


def sessions() -> list[int]:
    """The session of every process there is; those of the program's are its own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found.append(int(session))
    return found


def test_a_report_says_how_many_contexts_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = CellSettings("virtual", "crawler", "streaming", qps=1.0, max_context_tokens=4_000)
    request = RequestResult("q", 0.0, 1.0, 1.5, 2.0, num_chunks=3, floor_s=0.1)
    cut = {"max_context_tokens": 4_000, "num_contexts_cut": 1}
    CellStore(tmp_path).write(CellResult(settings, (request, request), 1.0, 2.0, 0.1, provenance=cut))
    assert main(["bench", "report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "note: 1 of 2 contexts exceed 4,000 tokens; chunks that do not fit were left out" in printed.err
    assert "contexts of at most 4,000 tokens" in printed.out


@pytest.mark.parametrize("width", ["80", "50"])
def test_no_figure_is_cut_in_a_narrow_terminal(
    width: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal is as wide as it is
    monkeypatch.setenv("NO_COLOR", "1")
    settings = CellSettings("virtual", "crawler", "streaming", policy="edf_with_a_long_name(12345)", qps=1.0)
    request = RequestResult("q", 0.0, 1.0, 1_234_568.5, 2_345_678.0, num_chunks=3, floor_s=0.1)
    CellStore(tmp_path).write(CellResult(settings, (request,), 1.0, 2.0, 0.1))
    assert main(["bench", "report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("1,234,568") == 3
    assert "…" not in printed


def test_a_budget_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", *SMALL, "--max-context-tokens", "0"]) == 1
    assert "max_context_tokens=0 must be greater than or equal to 1" in capsys.readouterr().err
