"""A policy of your own: which prompt the engine works on next, as a function, and what the records say it did.

    python examples/own_policy.py [MODEL]

The engine runs in a process of its own, and imports the function there by its name, "module.function". Its process has
the `sys.path` of this one: a module beside the script that is started is found, as here, and so is an installed one.
Without a model it makes a tiny one with random weights, which writes noise.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from streamrag import (
    AnswerStream,
    Pipeline,
    RequestView,
    RetrieverSource,
    SamplingParams,
    SchedulerOptions,
    VllmBackend,
)
from streamrag.telemetry import read_records
from streamrag.testing import make_tiny_llama


def newest_question_first(request: RequestView, now_s: float) -> tuple[bool, float]:
    """Complete prompts before partial ones; in each, the question that was asked last. The smallest is served first.

    The last of the order are the first to lose their KV when memory runs out. So a key must not turn against a request
    because it was served: with "fewest computed tokens first", say, two requests that do not fit together would take
    the memory from each other for ever. What goes into this key changes only when a chunk comes.
    """
    return (not request.is_complete, -request.arrival_s)


def retrieve(query: str) -> list[str]:
    return [f"All that is known about this: {query}"]


async def main(model: Path, records: Path) -> None:
    scheduler = SchedulerOptions(policy="own_policy.newest_question_first", records=str(records))
    backend = VllmBackend(model, scheduler=scheduler)
    async with Pipeline(RetrieverSource(retrieve), backend, on_progress=print) as pipeline:
        questions = ["Why is the sky blue?", "Why is grass green?", "Why is snow white?"]
        streams = [pipeline.stream(question, params=SamplingParams(max_tokens=8)) for question in questions]
        await asyncio.gather(*(answer(stream) for stream in streams))
    for record in read_records(records):
        waited_s = (record.scheduled_s or record.finished_s) - record.arrival_s
        print(
            f"{record.outcome} after {record.finished_s - record.arrival_s:.3f} s, {waited_s:.3f} s of them in the "
            f"queue: {len(record.chunks)} chunks, {record.num_computed} prompt tokens computed, "
            f"{record.num_from_cache} from the prefix cache, {len(record.preemptions)} preemptions"
        )


async def answer(stream: AnswerStream) -> None:
    async for _ in stream:
        pass


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else make_tiny_llama(Path(folder, "model"))
        asyncio.run(main(given, Path(folder, "records.jsonl")))
