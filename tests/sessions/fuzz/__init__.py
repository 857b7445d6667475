"""Random loads of sessions on vLLM's real client, scheduler and KV cache, with a runner that knows what KV must hold.

    python -m tests.sessions.fuzz --seeds 2000

Every run checks: each answer is that of one request with the text of its version, which is worked out anew from what
was appended; attention reads KV of its own prefix only; versions only grow, and questions that wait for one are
answered of it or a later one; a watch tells each change once; nobody is told that a session is closed before it is;
once all have gone, whoever left and wherever, nothing is left in the engine, its client or the event loop.

    load     an engine, its sessions and who is around them      truth    what answers must be
    engine   vLLM in virtual time, all but the model             run      plays one
"""

import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

from streamrag.backends.simulated.virtual_time import run_virtual

from .engine import prepare
from .load import make_session_load
from .run import Run, instantly

__all__ = ["play_batch", "run_seed"]


def run_seed(seed: int, met: Counter[str]) -> None:
    """Play one seed. Raises what went wrong, with the load noted."""
    prepare()
    load = make_session_load(seed)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)  # as for work that is left behind
            with (
                mock.patch("anyio.to_thread.run_sync", instantly),
                mock.patch("streamrag.sessions.ingestion.MAX_BATCH", load.max_batch),
            ):
                run_virtual(Run(load, met, Path(folder)).play())
    except Exception as error:  # whatever it is, it is said how to see it again
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        error.add_note(f"seed {seed} failed; repeat it:  python -m tests.sessions.fuzz --first {seed} --seeds 1")
        error.add_note(str(load))
        raise error from None


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
