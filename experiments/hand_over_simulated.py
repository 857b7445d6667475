"""What a hand-over saves on GPUs, in virtual time: vLLM's own scheduler and KV cache manager, no model.

    python experiments/hand_over_simulated.py [--json FILE]

One engine with an 8 B model writes a text about 500 tokens of context, and is then asked a question about the text,
which streams into the second prompt by `from_tokens`, or is given at the end. Nothing else is on the engine. Two H200
are `h200-llama8b-tp2`; one L40S is `l40s-llama8b`, derived from its data sheet and measured nowhere. The client's own
time, 2.6 ms an update, is not simulated. Columns as in `hand_over.py`, in milliseconds.
"""

import argparse
import asyncio
import json
import math
import re
import sys
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table
from session_simulation import MAX_MODEL_LEN, Device, simulated

from streamrag import Append, Chunk, ModelInfo, Pipeline, SamplingParams, Turn, from_tokens, plain_chat
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.engine.costs.profile_files import load_profile
from streamrag.support.files import write_atomic
from streamrag.testing import ScriptedSource

DEVICES = {"2 x H200": "h200-llama8b-tp2", "L40S": "l40s-llama8b"}
LENGTHS = (150, 600, 2_400)
WAYS: tuple[int | None, ...] = (None, 16, 64, 256)
NUM_CONTEXT_WORDS = 500

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Words:
    """A tokenizer with a token for each word and the space before it."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return [zlib.crc32(word.encode()) % 100_000 for word in re.findall(r"\s*\S+|\s+$", text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def render_chat(self, turns: Sequence[Turn]) -> str:
        return plain_chat(turns)


@dataclass(frozen=True)
class Row:
    """One hand-over, in milliseconds."""

    device: str
    num_written: int
    min_chars: int | None
    first_ms: float
    gap_ms: float
    total_ms: float
    num_prompts: int
    num_prompt_tokens: int


async def hand_over(device: str, num_written: int, min_chars: int | None) -> Row:
    """Let the model write, and ask it about what it writes, on an engine of its own."""
    now = asyncio.get_running_loop().time
    params = SamplingParams(max_tokens=num_written, ignore_eos=True)
    steps = [Append(Chunk(" ".join(f"w{number}" for number in range(NUM_CONTEXT_WORDS)), "notes"))]
    written_s = first_s = math.nan
    async with simulated(Device(load_profile(DEVICES[device]))) as site:
        backend = site.backend
        backend.model = ModelInfo("simulated", Words(), MAX_MODEL_LEN)
        writer = Pipeline(ScriptedSource(steps), backend, owns_backend=False, clock=now)

        async def write(query: str) -> AsyncIterator[str]:
            nonlocal written_s
            num_words = 0
            async for chunk in writer.stream("What do these notes say?", params=params):
                for _ in chunk.token_ids:
                    num_words += 1
                    yield f" {num_words:04}" + "\n\n" * (num_words % 80 == 0)
            written_s = now()

        async def write_all(query: str) -> AsyncIterator[str]:
            yield "".join([piece async for piece in write(query)])

        source = from_tokens(write_all if min_chars is None else write, name="notes", min_chars=min_chars or 1)
        async with writer, Pipeline(source, backend, owns_backend=False, overlap=True, clock=now) as reader:
            begun_s = now()
            events = reader.stream(
                "Which errors do the notes name?", params=SamplingParams(max_tokens=8, ignore_eos=True)
            )
            async for _ in events:
                first_s = now() if math.isnan(first_s) else first_s
        answer = events.result
    first_ms, gap_ms, total_ms = 1e3 * (written_s - begun_s), 1e3 * (first_s - written_s), 1e3 * (first_s - begun_s)
    num_prompts = len(answer.record.chunks) if answer.record else 0
    return Row(device, num_written, min_chars, first_ms, gap_ms, total_ms, num_prompts, answer.num_prompt_tokens)


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("device", "tokens written", "min_chars", "first", "gap", "total", "prompts")
    for row in rows:
        way = "wait" if row.min_chars is None else str(row.min_chars)
        times = (f"{each:.1f}" for each in (row.first_ms, row.gap_ms, row.total_ms))
        table.add_row(row.device, str(row.num_written), way, *times, str(row.num_prompts))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    rows = [run_virtual(hand_over(*case)) for case in product(DEVICES, LENGTHS, WAYS)]
    console.print(table_of(rows))
    if arguments.json:
        as_json = {"command": "make bench-hand-over", "rows": [asdict(row) for row in rows]}
        write_atomic(arguments.json, json.dumps(as_json, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
