"""One query through two engines: a prefill lane computes its prompt, a decode lane samples the answer.

    python -m studies.lanes.demo [--model FOLDER]

Without a model, that of `make demo` is made. Needs NIXL. Two cores show that the transfer of KV is correct, not that it
is fast: both engines share the cores.
"""

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from rich.console import Console

from streamrag import AnswerChunk, SamplingParams, VllmBackend
from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.backends.lanes.kv_transfer import KvTransfer
from streamrag.backends.vllm.client.lane_engine import INSTALL, Lane
from streamrag.core import Prefilled, Prompt, Turn, common_prefix_len
from streamrag.testing import make_demo_model

QUESTION = "What do the notes say about prefill?"
NOTES = [
    "Reading a prompt is called prefill: the model computes a key and a value for every token. ",
    "Writing is called decode: one token after another, each of which attends to all that stand before it. ",
    "Separate engines for the two do not slow each other down, but the keys and values must move between them. ",
]
PARAMS = SamplingParams(max_tokens=32)

console = Console(highlight=False, width=None if Console().is_terminal else 120)


def engine(model: Path, kind: Lane | None) -> VllmBackend:
    """Return an engine with a small KV cache."""
    return VllmBackend(
        model,
        lane=kind,
        kv_cache_bytes=1 << 27,
        collect_stats=kind == "decode",
        max_model_len=2_048,
        engine_args={"dtype": "float32"},
    )


async def prompts(backend: DisaggregatedBackend | VllmBackend, pause_s: float) -> AsyncIterator[Prompt]:
    """Yield the prompt as it grows, a note at a time."""
    tokenizer, text = backend.model.tokenizer, QUESTION + "\n"
    before: tuple[int, ...] = ()
    for number, note in enumerate(NOTES, start=1):
        text += note * 6
        token_ids = tuple(tokenizer.encode(tokenizer.render_chat([Turn("user", text)]), allow_special=True))
        yield Prompt(token_ids, common_prefix_len(before, token_ids), is_complete=number == len(NOTES))
        before = token_ids
        await asyncio.sleep(pause_s)


async def ask(
    backend: DisaggregatedBackend | VllmBackend, pause_s: float = 0.3, *, is_shown: bool = False
) -> tuple[tuple[int, ...], float]:
    """Return the answer's tokens and the seconds from the complete prompt to the first of them."""
    began_s, complete_s, first_s = time.monotonic(), 0.0, 0.0
    token_ids, text = tuple[int, ...](), ""

    async def timed() -> AsyncIterator[Prompt]:
        nonlocal complete_s
        async for prompt in prompts(backend, pause_s):
            complete_s = time.monotonic()
            if is_shown:
                state = "complete" if prompt.is_complete else "partial"
                console.print(f"{complete_s - began_s:6.2f} s  prompt of {len(prompt.token_ids)} tokens, {state}")
            yield prompt

    async with aclosing(backend.generate(timed(), PARAMS)) as events:
        async for event in events:
            now_s = time.monotonic()
            if isinstance(event, Prefilled) and is_shown:
                console.print(f"{now_s - began_s:6.2f} s  prefill lane: {event.num_tokens} tokens computed")
            elif isinstance(event, AnswerChunk):
                first_s = first_s or now_s
                token_ids += event.token_ids
                text += event.text
    if is_shown:
        console.print(f"{time.monotonic() - began_s:6.2f} s  decode lane: {len(token_ids)} tokens sampled: {text!r}")
    return token_ids, first_s - complete_s


def shown(passed: KvTransfer, num_bytes: int) -> str:
    """Describe a transfer of KV."""
    return (
        f"          {passed.prefill_lane} ══▶ {passed.decode_lane}: {passed.num_tokens} tokens in {passed.num_blocks} "
        f"blocks, of which {num_bytes:,} bytes were sent; {1e3 * passed.seconds:.0f} ms until the first token"
    )


async def in_lanes(model: Path) -> tuple[int, ...]:
    """Ask twice through two engines, print what happened, and return the first answer."""
    transfers: list[KvTransfer] = []
    decode = engine(model, "decode")
    backend = DisaggregatedBackend([engine(model, "prefill")], [decode])
    backend.on_transfer = transfers.append
    assert decode.stats is not None
    await backend.start(lambda line: None)
    try:
        answers, num_before = [], 0
        for title in ("first", "the same prompt again: the decode lane has its full blocks"):
            console.print(f"\n{title}")
            token_ids, _ = await ask(backend, is_shown=True)
            answers.append(token_ids)
            console.print(shown(transfers[-1], decode.stats.num_received_bytes - num_before))
            num_before = decode.stats.num_received_bytes
    finally:
        await backend.aclose()
    assert answers[0] == answers[1]
    return answers[0]


async def in_one(model: Path) -> tuple[int, ...]:
    """Return the answer of a single engine."""
    backend = engine(model, None)
    await backend.start(lambda line: None)
    try:
        token_ids, _ = await ask(backend)
    finally:
        await backend.aclose()
    return token_ids


async def demo(model: Path) -> int:
    console.print("two engines start: one prefill lane, one decode lane")
    answer = await in_lanes(model)
    expected = await in_one(model)
    console.print(f"\na single engine gives the same {len(answer)} tokens: {'yes' if answer == expected else 'NO'}")
    return int(answer != expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model; by default, that of `make demo`")
    arguments = parser.parse_args()
    if importlib.util.find_spec("nixl") is None:
        console.print(f"NIXL is not installed. Install it with:  {INSTALL}")
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else the threads of two engines wait for each other
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(demo(arguments.model or make_demo_model(Path(folder) / "model")))


if __name__ == "__main__":
    sys.exit(main())
