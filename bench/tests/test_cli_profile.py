"""`streamrag profile`, as a person uses it."""

import shutil
from pathlib import Path

import pytest

from streamrag.cli import main
from streamrag.engine.costs.default_profile import check_fits
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import TableProfile


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["profile", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "streamrag profile --model ./Llama-3.1-8B-Instruct --output h200.json" in shown
    assert "--max-num-batched-tokens" in shown


def test_numbers_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--max-model-len", "0"])
    assert "'0' must be a whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{dummy}", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"max_model_len": 9}', "max_model_len has an option of its own, --max-model-len"),
    ],
    ids=["no JSON", "no object", "named twice"],
)
def test_engine_args_that_cannot_be_used_are_explained(
    capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--engine-args", text])
    assert message in capsys.readouterr().err


def test_an_unusable_path_is_an_error_before_the_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--output", str(tmp_path / "none" / "x.json")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main(["profile", "--model", str(tmp_path / "none"), "--output", str(tmp_path / "x.json")]) == 1
    assert "there is no model at" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.engine
def test_a_machine_is_measured_written_and_printed(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, which are all written when an engine starts
    output = tmp_path / "tiny.json"
    limits = ["--max-model-len", "512", "--max-num-batched-tokens", "256", "--engine-args", '{"load_format": "dummy"}']
    # Without the weights, which such an engine makes up itself.
    model = tmp_path / tiny_model.name
    model.mkdir()
    shutil.copy(tiny_model / "config.json", model)
    assert main(["profile", "--model", str(model), "--output", str(output), *limits]) == 0
    profile = load_profile(str(output))
    assert isinstance(profile, TableProfile)
    assert profile.copies is not None
    check_fits(
        profile, block_size=32, tensor_parallel_size=1, block_bytes=profile.copies.block_bytes, is_overlapped=False
    )
    assert profile.num_layers == 2
    assert 0 < profile.step_s([(16, 0)]) <= profile.step_s([(256, 0)]) < 5
    assert profile.step_s([(1, 100)] * 4) >= profile.step_s([(1, 100)])
    assert 0 <= profile.delivery_s < 1
    assert profile.provenance["model"] == tiny_model.name
    assert profile.provenance.keys() >= {"date", "dtype", "vllm-cpu", "torch", "python", "tensor_parallel_size"}
    assert set(profile.provenance["recompute_s"]["alone"]) == {"64", "128", "256", "508"}
    shown = capfd.readouterr()
    assert f"{tiny_model.name} on CPU" in shown.out
    assert "median error of the fit" in shown.out
    assert "INFO" not in shown.out + shown.err
