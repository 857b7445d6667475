"""What `make gpu` compares and writes. Its parts are tried by hand: `--device cpu` takes minutes."""

import json
import os
import threading
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from streamrag.engine.costs.profile_files import load_profile
from studies.gpu import device, exact, loads
from studies.gpu import run as command
from studies.gpu.engines import LLAMA_8B, SIZES, measured_model


def test_an_answer_is_compared_up_to_the_first_token_that_differs() -> None:
    expected = [(5, -0.5), (6, -1.0), (7, -2.0)]
    assert exact.difference(expected, expected) == 0.0
    assert exact.difference([(5, -0.25), (6, -1.0), (7, -2.0)], expected) == 0.25
    assert exact.difference([(5, -0.5), (9, -1.5), (7, -9.0)], expected) == 0.5  # what follows has another prompt
    told = exact.compared([expected, [(5, -0.5), (9, -1.5), (7, -9.0)]], [expected, expected])
    assert told == {"median": 0.25, "least": 0.0, "most": 0.5, "num_same_tokens": 1}


def test_a_part_that_fails_is_told_and_run_again_and_one_that_is_done_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = command.Part(60, ("-c", "print('why'); raise SystemExit(3)"))
    assert not command.run("exact", failing, tmp_path)
    assert "why" in capsys.readouterr().out
    assert not command.run("exact", command.Part(0.2, ("-c", "import time; time.sleep(60)")), tmp_path)
    assert "not done after 0 s" in capsys.readouterr().out
    assert command.run("exact", command.Part(60, ("-c", "pass")), tmp_path)
    assert command.run("exact", failing, tmp_path)
    assert "exact: kept" in capsys.readouterr().out


def test_the_measured_model_needs_no_weights_on_a_gpu(tmp_path: Path) -> None:
    folder = measured_model("cuda", tmp_path)
    assert json.loads((folder / "config.json").read_text()) == LLAMA_8B
    parts = command.make_parts("cuda", {"attention_backend": "FLASH_ATTN"}, folder, tmp_path)
    assert tuple(parts) == (*command.NAMES, *command.MORE_NAMES)
    assert [parts[name].limit_s for name in command.NAMES] == [120, 180, 360, 120]
    assert sum(parts[name].limit_s for name in command.NAMES) < command.LIMIT_S == 15 * 60
    args = json.loads(parts["swap"].arguments[parts["swap"].arguments.index("--engine-args") + 1])
    assert args == {"dtype": "float32", "attention_backend": "TRITON_ATTN"}


def test_a_part_that_has_ended_leaves_no_process(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"import signal; file = open({str(pipe)!r}, 'w'); print('begun', flush=True); signal.pause()"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], stdout=-1).stdout.readline()"
    reading = threading.Thread(target=pipe.read_text)  # until the last process that could write has ended
    reading.start()
    assert command.run("exact", command.Part(600, ("-c", code)), tmp_path)
    reading.join()


def test_parts_run_in_order_within_the_time_of_all_and_the_page_is_written_after_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s, had_page, limits = [0.0], [], []
    output = tmp_path / "gpu-rehearsal"

    def call(arguments: Any, limit_s: float, file: Any) -> int | None:
        limits.append(limit_s)
        had_page.append((output / "gpu.md").exists())
        now_s[0] += 100.0
        return 0 if len(limits) != 2 else None

    monkeypatch.setattr(command, "call", call)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(command, "measured_model", lambda device, folder: folder)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--seconds", "290"])
    assert command.main() == 1
    out = capsys.readouterr().out
    assert limits == [120, 180, 90]
    assert had_page == [False, True, True]
    assert (
        out.index("probe: done")
        < out.index("swap: not done")
        < out.index("loads: done")
        < out.index("predict: no time")
    )
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu"])
    assert command.main() == 0
    out = capsys.readouterr().out
    assert limits[3:] == [180, 120]
    assert "probe: kept" in out
    assert "loads: kept" in out


def test_a_probe_that_dies_or_hangs_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PROBE", "import os; print('copying', flush=True); os.kill(os.getpid(), 11)")
    assert device.probe("cpu") == {"failed": "exit status -11: copying"}
    monkeypatch.setattr(device, "PROBE", "import signal; signal.pause()")
    monkeypatch.setattr(device, "PROBE_LIMIT_S", 0.2)
    assert device.probe("cpu") == {"failed": "not done after 0.2 s"}


def test_many_users_keep_an_engine_busy_for_the_share_and_one_user_waits_for_each_answer() -> None:
    profile = load_profile("h200-llama8b-tp2")
    plan = loads.plan_loads(SIZES["cuda"], profile)  # type: ignore[arg-type]
    assert list(plan) == ["crawls, one user", "crawls, 60 % busy", "searches, one user", "searches, 60 % busy"]
    for of in plan.values():
        queries = loads.trace_of(sizes=SIZES["cuda"], **of).queries
        assert len(queries) == of["num_queries"]
        if of["qps"] is None:
            assert all(b.arrival_s > a.arrival_s + a.end_s for a, b in pairwise(queries))
        else:
            busy_s = mean(loads.busy_s(query, profile) for query in queries)  # type: ignore[arg-type]
            assert of["qps"] * busy_s == pytest.approx(loads.SHARE, rel=0.2)
