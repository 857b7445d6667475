"""Teach the demo's model to answer with a sentence of its documents, and to cite it: a LoRA, on a CPU, resumable.

    python scripts/teach_demo_model.py MODEL DOCS... --state FOLDER --out ADAPTER [--lessons N] [--go-on-from ADAPTER]
                                        [--strength S]

MODEL is SmolLM2-135M-Instruct as it comes, a folder that transformers load: what `streamrag demo-model` writes has been
taught already, unless the adapter is not there when it is made. DOCS are folders of documentation, as Debian's packages
python3-doc and postgresql-doc have. Prompts are those of the demo, and of the default template. Every 24th page is held
out, for the curve in FOLDER/curve.jsonl. Stopped and started again with the same arguments it goes on where it was.
`--lessons 0 --go-on-from ADAPTER --strength S` weakens an adapter that is there.
"""

import argparse
import json
import math
import os
import random
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from teaching_examples import Example, Page, make_examples, read_pages
from torch import nn
from transformers import LlamaForCausalLM

from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import common_prefix_len
from streamrag.demo.demo_folder import TEMPLATE
from streamrag.modes import PromptTemplate
from streamrag.modes.prompt import PromptAssembler
from streamrag.support.files import atomic_replace

RANK, SCALE = 8, 2.0
TAUGHT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BATCH, LEARNING_RATE, WARM_UP = 2, 8e-4, 10
"""In lessons, and in steps of so many."""

MAX_QUESTIONS, MAX_TOKENS = 6, 1000
DEFAULT_SHARE = 0.3
"""Of lessons with the default template, and not the demo's."""

HELD_OUT_EVERY, NUM_HELD_OUT = 24, 8
CHECK_EVERY, SAVE_EVERY = 50, 5
"""In steps of `BATCH` lessons."""
END = "<|im_end|>"
PLAIN_QUESTIONS = Path(__file__).with_name("plain_questions.toml")

console = Console(highlight=False)


class Lora(nn.Module):  # type: ignore[misc]
    """A frozen linear layer, and what is added to it."""

    def __init__(self, frozen: Any) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(RANK, frozen.in_features) / math.sqrt(frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Any) -> Any:
        low = nn.functional.linear(x, self.down.to(x.dtype))
        return self.frozen(x) + SCALE * nn.functional.linear(low, self.up.to(x.dtype))


@dataclass(frozen=True)
class Lesson:
    """Questions over the same passages in one sequence, each of which sees the passages and itself.

        | shared | question 1, answer 1 | question 2, answer 2 | ...
                 |<----- branch ------->|

    Positions of each branch go on where the shared part ends, so what it computes is what it would alone.
    """

    shared: tuple[int, ...]
    branches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """What is left of the prompt, and the answer."""

    @property
    def num_tokens(self) -> int:
        return len(self.shared) + sum(len(asked) + len(answer) for asked, answer in self.branches)


def plain_questions() -> dict[str, str]:
    """Return the plain questions, by the sentences that answer them."""
    with PLAIN_QUESTIONS.open("rb") as file:
        return {sentence: question for question, sentence in tomllib.load(file).items()}


def with_loras(model: Any) -> dict[str, Lora]:
    """Put a LoRA around each linear layer of the blocks; returns them by the names of the layers."""
    model.requires_grad_(False)
    loras = {}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TAUGHT:
            loras[name] = Lora(module)
            setattr(model.get_submodule(parent), last, loras[name])
    return loras


def make_lesson(examples: Sequence[Example], tokenizer: Any, template: PromptTemplate = TEMPLATE) -> Lesson:
    """Of examples that have the same passages."""
    end = tokenizer.encode(END, allow_special=True)
    prompts, answers = [], []
    for example in examples:
        assembler = PromptAssembler(tokenizer, template, example.question, max_model_len=8192, max_tokens=256)
        prompts.append(tuple(assembler.assemble(example.chunks, is_complete=True).prompt.token_ids))
        answers.append((*tokenizer.encode(example.answer), *end))
    first, *others = prompts
    num_shared = min([len(first) - 1, *(common_prefix_len(first, other) for other in others)])
    branches = zip((prompt[num_shared:] for prompt in prompts), answers, strict=True)
    return Lesson(first[:num_shared], tuple(branches))


def lessons(
    pages: Sequence[Page], tokenizer: Any, seed: str, plain: Mapping[str, str], first: int = 0
) -> Iterator[Lesson]:
    """Without end; those of one `seed` are always the same, from whichever they begin."""
    number = first
    while True:
        rng = random.Random(f"{seed} {number}")
        while True:
            template = PromptTemplate() if rng.random() < DEFAULT_SHARE else TEMPLATE
            lesson = make_lesson(make_examples(pages, rng, MAX_QUESTIONS, plain), tokenizer, template)
            if lesson.num_tokens <= MAX_TOKENS:
                break
        yield lesson
        number += 1


def logits_of(model: Any, lesson: Lesson) -> list[Any]:
    """At the places that predict the answers, for each branch."""
    num_shared = len(lesson.shared)
    ids, positions, predicting = [*lesson.shared], [*range(num_shared)], []
    branch_of = [0] * num_shared
    for number, (asked, answer) in enumerate(lesson.branches, 1):
        predicting.append(range(len(ids) + len(asked) - 1, len(ids) + len(asked) + len(answer) - 1))
        ids += (*asked, *answer)
        num = len(asked) + len(answer)
        positions += range(num_shared, num_shared + num)
        branch_of += [number] * num
    branch = torch.tensor(branch_of)
    seen = ((branch == branch[:, None]) | (branch == 0)).tril()
    mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    hidden = model.model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask[None, None],
        use_cache=False,
    ).last_hidden_state[0]
    logits = model.lm_head(hidden[[at for places in predicting for at in places]]).float()
    return list(logits.split([len(places) for places in predicting]))


def loss_of(model: Any, lesson: Lesson) -> Any:
    """Mean over the questions."""
    answers = [torch.tensor(answer) for _, answer in lesson.branches]
    losses = map(nn.functional.cross_entropy, logits_of(model, lesson), answers)
    return sum(losses) / len(answers)


def check(model: Any, held_out: Sequence[Lesson]) -> dict[str, float]:
    """How well the model predicts answers that it was not taught."""
    losses, num_right, num_tokens, num_whole = [], 0, 0, 0
    with torch.no_grad():
        for lesson in held_out:
            for logits, (_, answer) in zip(logits_of(model, lesson), lesson.branches, strict=True):
                target = torch.tensor(answer)
                losses.append(float(nn.functional.cross_entropy(logits, target)))
                right = logits.argmax(-1) == target
                num_right += int(right.sum())
                num_tokens += len(target)
                num_whole += bool(right.all())
    return {
        "loss": sum(losses) / len(losses),
        "tokens_right": num_right / num_tokens,
        "answers_right": num_whole / len(losses),
    }


def rate(step: int, num_steps: int) -> float:
    """Rises for some steps, then falls to nothing."""
    return LEARNING_RATE * min((step + 1) / WARM_UP, (num_steps - step) / max(num_steps - WARM_UP, 1))


def teach(model: Any, loras: dict[str, Lora], arguments: argparse.Namespace, pages: list[Page], tokenizer: Any) -> None:
    state: Path = arguments.state
    taught = [page for number, page in enumerate(pages) if number % HELD_OUT_EVERY]
    unseen = [page for number, page in enumerate(pages) if not number % HELD_OUT_EVERY]
    plain = plain_questions()
    source = lessons(unseen, tokenizer, "held out", plain)
    held_out = [next(source) for _ in range(NUM_HELD_OUT)]
    parameters = [p for lora in loras.values() for p in (lora.down, lora.up)]
    if arguments.go_on_from is not None:
        read_adapter(arguments.go_on_from, loras)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    first = 0
    checkpoint = state / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, lora in loras.items():
            lora.load_state_dict(saved["loras"][name], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        console.print(f"goes on at step {first}")
    num_steps = arguments.lessons // BATCH
    source = lessons(taught, tokenizer, "taught", plain, first * BATCH)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("teaching", total=num_steps, completed=first)
        for step in range(first, num_steps + 1):
            if step % CHECK_EVERY == 0 or step == num_steps:
                told = {"step": step, "num_lessons": step * BATCH, **check(model, held_out), "at": time.time()}
                with (state / "curve.jsonl").open("a") as file:
                    file.write(json.dumps(told) + "\n")
                console.print(told)
            if step % SAVE_EVERY == 0 or step == num_steps:
                save(checkpoint, loras, optimizer, step)
            if step == num_steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate(step, num_steps)
            for _ in range(BATCH):
                (loss_of(model, next(source)) / BATCH).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.advance(task)


def save(path: Path, loras: dict[str, Lora], optimizer: Any, step: int) -> None:
    of_loras = {name: {"down": lora.down.data, "up": lora.up.data} for name, lora in loras.items()}
    with atomic_replace(path) as unfinished:
        torch.save({"step": step, "loras": of_loras, "optimizer": optimizer.state_dict()}, unfinished)


def write_adapter(path: Path, loras: dict[str, Lora], strength: float) -> None:
    """As `streamrag demo-model` merges it: `up @ down` is added to the weight of each layer."""
    tensors = {}
    for name, lora in loras.items():
        tensors[f"{name}.down"] = lora.down.data.to(torch.float16).contiguous()
        tensors[f"{name}.up"] = (strength * SCALE * lora.up.data).to(torch.float16).contiguous()
    with atomic_replace(path) as unfinished:
        save_file(tensors, unfinished)


def read_adapter(path: Path, loras: dict[str, Lora]) -> None:
    """What `write_adapter` wrote."""
    tensors = load_file(path)
    for name, lora in loras.items():
        lora.down.data = tensors[f"{name}.down"].float()
        lora.up.data = tensors[f"{name}.up"].float() / SCALE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of the model to teach")
    parser.add_argument("docs", type=Path, nargs="+", metavar="DOCS", help="folders with text, Markdown or HTML")
    parser.add_argument("--state", type=Path, required=True, metavar="FOLDER", help="for the checkpoint and the curve")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the adapter to write")
    parser.add_argument("--go-on-from", type=Path, metavar="FILE", help="an adapter to begin with")
    parser.add_argument(
        "--lessons", type=int, default=2000, metavar="N", help=f"of up to {MAX_QUESTIONS} questions (2000)"
    )
    parser.add_argument(
        "--strength", type=float, default=1.0, metavar="S", help="less keeps more of what it could do before (1.0)"
    )
    parser.add_argument("--pages", type=int, default=300, metavar="N", help="of each folder, at random (300)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="more than idle cores slow it down (1)")
    arguments = parser.parse_args()
    arguments.state.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokenizer = HuggingFaceTokenizer(arguments.model)
    rng = random.Random(0)
    pages = [page for docs in arguments.docs for page in read_pages(docs, rng, arguments.pages)]
    rng.shuffle(pages)
    console.print(f"{len(pages)} pages, {sum(len(page.passages) for page in pages)} passages")
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    loras = with_loras(model)
    console.print(f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,} weights to learn")
    teach(model, loras, arguments, pages, tokenizer)
    write_adapter(arguments.out, loras, arguments.strength)


if __name__ == "__main__":
    os.nice(19)
    main()
