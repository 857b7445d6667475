import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrag.errors import ConfigurationError
from streamrag.testing import make_tiny_llama


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    first = make_tiny_llama(tmp_path / "first", seed=3)
    second = make_tiny_llama(tmp_path / "second", seed=3)
    assert contents(first) == contents(second)
    other = make_tiny_llama(tmp_path / "other", seed=4)
    assert contents(first)["model.safetensors"] != contents(other)["model.safetensors"]


def test_a_corpus_makes_the_vocabulary(tmp_path: Path) -> None:
    from streamrag.backends.tokenizer import HuggingFaceTokenizer

    model = make_tiny_llama(tmp_path / "model", corpus=["zygomorphic zygomorphic zygomorphic"] * 9, vocab_size=300)
    assert len(HuggingFaceTokenizer(model).encode("zygomorphic zygomorphic")) <= 4


def test_transformers_loads_it_and_no_weight_is_missing(tiny_model: Path) -> None:
    """In a process of its own: torch, once imported, slows all later tests down."""
    program = (
        "import sys, transformers\n"
        "model, loading = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "assert not any(loading.values()), loading\n"
        "assert model.config.max_position_embeddings == 8192\n"
    )
    run = subprocess.run([sys.executable, "-c", program, tiny_model], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 65}, "hidden_size=65 must be num_heads=2 times a multiple of 32"),
        ({"num_heads": 4, "hidden_size": 64}, "must be num_heads=4 times a multiple of 32"),
        ({"num_kv_heads": 3}, "num_heads=2 must be a multiple of num_kv_heads=3"),
        ({"vocab_size": 100}, "vocab_size=100 must be at least 259"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_tiny_llama(tmp_path / "model", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(ConfigurationError, match="exists"):
        make_tiny_llama(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_a_failure_half_way_leaves_no_folder(tmp_path: Path) -> None:
    def broken_corpus() -> Any:
        yield "text"
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        make_tiny_llama(tmp_path / "model", corpus=broken_corpus())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["streamrag.testing", "streamrag.backends.vllm", "streamrag.backends.openai"])
def test_importing_a_backend_imports_no_engine(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'vllm', 'transformers', 'tokenizers', 'numpy', 'safetensors'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
