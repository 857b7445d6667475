"""What the script that teaches the demo's model computes, on a tiny model with random weights."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from teach_demo_model import SCALE, Lesson, Lora, logits_of, read_adapter, with_loras, write_adapter


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).eval()


def of_random_weights(loras: dict[str, Lora]) -> None:
    for lora in loras.values():
        torch.nn.init.normal_(lora.up)


def test_questions_over_the_same_passages_are_computed_as_each_alone(model: Any) -> None:
    of_random_weights(with_loras(model))
    shared = (5, 9, 13, 40)
    branches = (((7, 8), (1, 2, 3)), ((30,), (4,)), ((11, 12, 50), (6, 21)))
    with torch.no_grad():
        together = logits_of(model, Lesson(shared, branches))
        for logits, (asked, answer) in zip(together, branches, strict=True):
            alone = model(torch.tensor([[*shared, *asked, *answer]])).logits[0, -len(answer) - 1 : -1]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-4)


def test_an_adapter_is_read_as_it_was_written_and_is_weakened_by_its_strength(model: Any, tmp_path: Path) -> None:
    loras = with_loras(model)
    of_random_weights(loras)
    changes = {name: SCALE * lora.up @ lora.down for name, lora in loras.items()}
    for strength in (1.0, 0.5):
        write_adapter(tmp_path / "adapter", loras, strength)
        read_adapter(tmp_path / "adapter", loras)
        for name, lora in loras.items():
            torch.testing.assert_close(SCALE * lora.up @ lora.down, strength * changes[name], atol=1e-2, rtol=1e-2)
