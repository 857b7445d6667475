"""What late binding's empty steps cost in vLLM's own loop: the real engine's, on whatever it runs.

    python experiments/empty_steps.py [--json FILE]

While a step with prefill is in flight, a step of nothing but partial prompts is not planned: an empty one goes through
`EngineCore.step_with_batch_queue` in its place, as any other would. Timed in the engine's process are its planning,
what the loop and the executor do with it until the result of the step before it is taken, and taking its own result, of
which there is none. A CPU's executor computes in the loop itself, so that nothing of this overlaps with anything, and
the step before has ended when the empty one is planned: these are all of its costs. A GPU waits there for the step
before, which is what the empty one is for. Half a minute with a tiny model.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from streamrag.backends.vllm.client.arguments import scheduler_args
from streamrag.backends.vllm.client.measured import EngineClient, running_engine
from streamrag.backends.vllm.scheduler.scheduler import StreamingSchedulerMixin, streaming_scheduler
from streamrag.bench.profiling import NUM_IN_VOCABULARY, warm_up
from streamrag.bench.provenance import versions
from streamrag.bench.summary import percentile
from streamrag.files import write_whole
from streamrag.testing import make_tiny_llama

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY, LOG = "empty_steps", "empty.jsonl"
NUM_STREAMS, NUM_CHUNKS, NUM_TOKENS = 8, 60, 100
PAUSE_S = 0.02
PARTS = {
    "plan": "planning it",
    "handed": "from there until the result of the step before is taken",
    "taken": "taking its own result",
}


def scheduler(vllm_config: "VllmConfig", **kwargs: Any) -> StreamingSchedulerMixin:
    """For `scheduler_cls`: ours, which writes down a line for each empty step."""
    made = streaming_scheduler(vllm_config, **kwargs)
    assert isinstance(vllm_config.additional_config, dict)
    log = (Path(vllm_config.additional_config[KEY]) / LOG).open("a", buffering=1)
    schedule, update_from_output = made.schedule, made.update_from_output
    empty: dict[int, dict[str, float]] = {}
    """By the identity of its output: each that is on its way."""
    ends = 0.0

    def timed_schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal ends
        has_prefills = any(made._prefills_in_flight)
        begins = time.perf_counter()
        planned = schedule(*args, **kwargs)
        ends = time.perf_counter()
        if has_prefills and not planned.total_num_scheduled_tokens:
            empty[id(planned)] = {"plan": ends - begins}
        return planned

    def timed_update(planned: Any, output: Any) -> Any:
        begins = time.perf_counter()
        found = update_from_output(planned, output)
        of = empty.pop(id(planned), None)
        if of is not None:
            log.write(json.dumps(of | {"taken": time.perf_counter() - begins}) + "\n")
        for each in empty.values():
            each.setdefault("handed", begins - ends)
        return found

    for name, timed in {"schedule": timed_schedule, "update_from_output": timed_update}.items():
        setattr(made, name, timed)
    return made


async def grow(client: EngineClient, number: int) -> None:
    """A stream whose chunks keep coming: most steps compute partial prompts."""
    rng = random.Random(number)
    async with client.stream(f"stream {number}", [rng.randrange(NUM_IN_VOCABULARY)], 1) as stream:
        for _ in range(NUM_CHUNKS):
            await stream.append(rng.choices(range(NUM_IN_VOCABULARY), k=NUM_TOKENS))
            await asyncio.sleep(PAUSE_S * rng.uniform(0.5, 1.5))


async def measure(model: str, folder: str) -> bool:
    """Whether the engine schedules asynchronously, without which there are no such steps."""
    args: dict[str, Any] = {"max_num_batched_tokens": 2_048}
    args |= scheduler_args("streaming", "srpf", None, args)
    args["additional_config"] |= {KEY: folder}
    async with running_engine(model, args | {"scheduler_cls": "empty_steps.scheduler"}, policy=None) as client:
        await warm_up(client, 2_048, client.facts.max_model_len)
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(grow(client, number))
        print(
            f"{len(client.steps)} steps with something to compute, P50 "
            f"{1e3 * median(step.elapsed_s for step in client.steps):.2f} ms"
        )
        return client.is_async


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder:
        if not asyncio.run(measure(str(make_tiny_llama(Path(folder) / "model", max_model_len=8_192)), folder)):
            sys.exit("this engine plans no step ahead, so it has no empty ones")
        lines = [json.loads(line) for line in (Path(folder) / LOG).read_text().splitlines()]
    table = Table("microseconds", "P50", "P95", title=f"{len(lines)} empty steps", title_justify="left")
    found: dict[str, Any] = {"num": len(lines)}
    for name, words in PARTS.items():
        us = [1e6 * line[name] for line in lines if name in line]
        found |= {f"{name}_us": {"P50": percentile(us, 0.5), "P95": percentile(us, 0.95)}}
        table.add_row(words, *(f"{value:.0f}" for value in found[f"{name}_us"].values()))
    Console(highlight=False).print(table)
    if arguments.json:
        write_whole(arguments.json, json.dumps({"versions": versions(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
