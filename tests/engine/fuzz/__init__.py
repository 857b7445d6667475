"""Random loads against vLLM's real scheduler and KV cache, with a runner that knows what each KV slot must hold.

    python -m tests.engine.fuzz --seeds 20000

Every run checks: attention reads KV of its own prefix and of the present weights only; each answer equals that of a
fresh request with the last prompt; every chunk is acknowledged once, in order, before the first token, and not before
it is computed; every request ends once, and what is nonsense ends in an error of its own; nothing stalls or spins,
and a pause comes to rest; no block, queue entry, runner state or entry of any container is left behind; every request
has one record, which says what its client and the runner saw.

    scenarios    an engine and its load            clients    what each client knows: the truth
    situations   what is rare, added to it         run        plays one: loop, clients, operator
    events       all that can happen               checks     what must hold
"""

import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from streamrag.backends.vllm.scheduler.hooks import streaming_scheduler

from .checks import Checks
from .clients import FuzzError
from .run import Run
from .scenarios import Scenario
from .situations import make_scenario
from .transfers import FIRST_SEED, make_transfers

__all__ = ["FuzzError", "play", "play_batch", "run_seed", "run_seeds"]


def play(scenario: Scenario, met: Counter[str], make_scheduler: Callable[..., Any] = streaming_scheduler) -> None:
    """Raises what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(scenario, make_scheduler, met, Path(folder) / "records.jsonl")
        checks = Checks(run)
        run.play(checks.step, checks.asleep)
        checks.end()


def run_seed(seed: int, met: Counter[str], make_scheduler: Callable[..., Any] = streaming_scheduler) -> None:
    """Play one seed. Raises what went wrong, with the scenario noted."""
    scenario = make_scenario(seed) if seed < FIRST_SEED else make_transfers(seed)
    try:
        play(scenario, met, make_scheduler)
    except Exception as error:  # whatever it is, it is said how to see it again
        error.add_note(f"seed {seed} failed; repeat it:  python -m tests.engine.fuzz --first {seed} --seeds 1")
        error.add_note(str(scenario))
        raise


def play_batch(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """What was met, and which seeds went wrong, and how."""
    met: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        try:
            run_seed(seed, met)
        except Exception:  # whatever it is, it is told
            failures.append((seed, traceback.format_exc()))
    return met, failures


def run_seeds(seeds: Iterable[int], report: Callable[[], None] = lambda: None) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        run_seed(seed, met)
        report()
    return met
