"""A tiny model for tests, created in seconds, which runs on the real engine.

    model = make_tiny_llama(tmp_path / "model")
    async with Pipeline(source, backend=VllmBackend(model)) as pipeline: ...

Its weights are random, so its output is noise.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.support.files import new_folder

BOS, START, END = "<|begin_of_text|>", "<|start|>", "<|end|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)

BUILT_IN_TEXT = """
A language model reads its prompt before it writes. Reading is called prefill: the model computes a key and a value for
every token of the prompt, and keeps them in the KV cache. Writing is called decode: one token after another, each of
which attends to all that stand before it. The time to the first token is mostly prefill when the prompt is long.

Retrieval finds passages that may answer a question. A crawler fetches pages, follows their links, and keeps the parts
that match the query. A vector index stores one embedding for each passage, walks a graph of neighbours on disk, and
returns the nearest. Both take time, and a program that waits for retrieval to end before it starts prefill wastes it.

Streaming the context means to prefill what has arrived while the rest is still on its way. When a chunk is appended,
the old tokens keep their place, and only the new ones are computed. When the whole context is updated, the tokens up
to the first difference are shared, and those behind it are invalidated and computed again. The scheduler decides which
request runs, which one waits, and which one gives up its blocks when memory is short.

def stream(query, source, backend):
    for chunk in source.stream(query):
        prompt = prompt + tokenizer.encode(chunk.text)
        backend.prefill(prompt)
    return backend.generate(prompt)

It takes 1 page, 2 links, 30 passages, 400 tokens, 5.6 seconds, 78 blocks and 90 % of the memory.
"""

SHARPNESS = 3.0
"""Factor of query and key weights. At 1, attention over a long random context is close to its mean, which hardly
depends on the context; at 3 a few positions dominate."""


def make_tiny_llama(
    folder: str | os.PathLike[str],
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 512,
    max_model_len: int = 8192,
    corpus: Iterable[str] | None = None,
    seed: int = 0,
) -> Path:
    """Write a Llama checkpoint with random weights and its byte-level BPE tokenizer, for vLLM and transformers.

    The tokenizer is trained on `corpus`, or on a built-in text, and has the special tokens `<|begin_of_text|>`,
    `<|start|>` and `<|end|>` and a chat template made of them. A corpus too small for `vocab_size` gives fewer tokens.
    The same arguments give the same files.

    Weights are N(0, 1/fan_in), query and key weights times 3, and embeddings N(0, 0.02²), not tied to the output:
    attention and MLP then outweigh the last token's embedding, so that greedy output depends on the whole context and
    does not repeat one token, as it does with the usual N(0, 0.02²) throughout.

    `folder` must not exist, or be empty; it is created atomically.

    :raises ConfigurationError: `folder` exists, or the sizes are inconsistent.
    """
    folder = Path(folder)
    _check_sizes(hidden_size, num_heads, num_kv_heads or num_heads, vocab_size)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or num_heads,
        "head_dim": hidden_size // num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    with new_folder(folder) as unfinished:
        config["vocab_size"] = _write_tokenizer(unfinished, corpus or (BUILT_IN_TEXT,), vocab_size, max_model_len)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2))
        (unfinished / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 2}))
        _write_weights(unfinished / "model.safetensors", config, seed)
    return folder


def _check_sizes(hidden_size: int, num_heads: int, num_kv_heads: int, vocab_size: int) -> None:
    """Raise ConfigurationError for sizes that vLLM's CPU attention or the tokenizer cannot have."""
    if hidden_size % num_heads or (hidden_size // num_heads) % 32:
        raise ConfigurationError(
            f"hidden_size={hidden_size} must be num_heads={num_heads} times a multiple of 32: "
            "vLLM's CPU attention has kernels for such heads only"
        )
    if num_heads % num_kv_heads:
        raise ConfigurationError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    if vocab_size < 259:
        raise ConfigurationError(f"vocab_size={vocab_size} must be at least 259: 256 bytes and 3 special tokens")


def _write_tokenizer(folder: Path, corpus: Iterable[str], vocab_size: int, max_model_len: int) -> int:
    """Train the tokenizer, write its two files, and return its number of tokens. Raises without tokenizers."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    except ImportError:
        raise MissingDependencyError("tokenizers", "pip install tokenizers numpy safetensors") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return int(tokenizer.get_vocab_size())


def _write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    """Draw and write the weights, in float32; the same seed gives the same file."""
    try:
        import numpy as np
        from safetensors.numpy import save_file
    except ImportError:
        raise MissingDependencyError("numpy or safetensors", "pip install tokenizers numpy safetensors") from None
    random = np.random.default_rng(seed)
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv = config["head_dim"] * config["num_key_value_heads"]

    def linear(num_out: int, num_in: int, gain: float = 1.0) -> "np.ndarray[Any, np.dtype[np.float32]]":
        return random.standard_normal((num_out, num_in), dtype=np.float32) * np.float32(gain / num_in**0.5)

    ones = np.ones(hidden, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": linear(config["vocab_size"], hidden, 0.02 * hidden**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": linear(config["vocab_size"], hidden),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": ones,
            f"{layer}.post_attention_layernorm.weight": ones,
            f"{layer}.self_attn.q_proj.weight": linear(hidden, hidden, SHARPNESS),
            f"{layer}.self_attn.k_proj.weight": linear(kv, hidden, SHARPNESS),
            f"{layer}.self_attn.v_proj.weight": linear(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": linear(hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": linear(intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": linear(intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": linear(hidden, intermediate),
        }
    save_file(weights, path, metadata={"format": "pt"})
