"""What `make gpu` compares and writes. Its parts are tried by hand: `--device cpu` takes ten minutes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from experiments.gpu import __main__ as command
from experiments.gpu import exact, page
from experiments.gpu.engines import LLAMA_8B, measured_model


def test_an_answer_is_compared_up_to_the_first_token_that_differs() -> None:
    expected = [(5, -0.5), (6, -1.0), (7, -2.0)]
    assert exact.difference(expected, expected) == 0.0
    assert exact.difference([(5, -0.25), (6, -1.0), (7, -2.0)], expected) == 0.25
    assert exact.difference([(5, -0.5), (9, -1.5), (7, -9.0)], expected) == 0.5  # what follows has another prompt
    told = exact.compared([expected, [(5, -0.5), (9, -1.5), (7, -9.0)]], [expected, expected])
    assert told == {"median": 0.25, "least": 0.0, "most": 0.5, "num_same_tokens": 1}


def test_the_page_has_what_was_measured_and_names_what_was_not(tmp_path: Path) -> None:
    ways = {way: {"median": 0.004, "least": 0.0, "most": 0.009, "num_same_tokens": 30} for way in exact.WAYS}
    found = {"num_prompts": 32, "num_tokens": 153_600, "dtype": "float32", "is_async": True, "ways": ways}
    found["preempted"] = {exact.APPENDED: 0, exact.UPDATED: 12}
    (tmp_path / "exact.json").write_text(json.dumps(found))
    (tmp_path / "device.json").write_text(json.dumps({"device": "NVIDIA H200", "num_cores": 16, "vllm": "0.32.0"}))
    measured = {
        "num_queries": 20,
        "ttft_after_retrieval_s": {"p50": 0.1, "p95": 0.2},
        "floor_s": {"p50": 0.05},
        "busy_s": 3.0,
    }
    decode = {"num_requests": 64, "step_to_step_s": 0.01, "engine_step_s": 0.008, "tokens_per_s": 6_400.0}
    loads = {
        "loads": {"light": {"qps": 1.5}},
        "cells": {"light": {"streaming": {"measured": measured}}},
        "decode": {"streaming": [decode, decode | {"step_to_step_s": 0.009}]},
    }
    (tmp_path / "loads.json").write_text(json.dumps(loads))
    page.write_page(tmp_path, tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    assert "NVIDIA H200, 16 cores, vLLM 0.32.0" in text
    assert "| streamed: updated | 30 of 32 | 4.0e-03 | 9.0e-03 | 12 |" in text
    assert "| light, 1.50/s | streaming | 20 | 100 |  | 200 |  | 50 | 3.0 |" in text
    assert "| streamrag's scheduler | 64 | 9.000 | 8.000 | 6,400 |" in text
    assert text.count("Not measured.") == 4


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
    assert tuple(parts) == command.NAMES
    args = json.loads(parts["exact"].arguments[parts["exact"].arguments.index("--engine-args") + 1])
    assert args == {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
