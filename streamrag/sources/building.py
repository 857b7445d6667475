"""What building an index and filling a table have in common."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from streamrag.errors import ConfigurationError

OnProgress: TypeAlias = Callable[[int, int, str], None]


def check_caller(function: str, passage_words: int, max_file_bytes: int) -> None:
    """:raises ConfigurationError: a value that cannot work, or a call from a coroutine."""
    if passage_words < 10:
        raise ConfigurationError(f"passage_words={passage_words!r} must be at least 10")
    if max_file_bytes < 1:
        raise ConfigurationError(f"max_file_bytes={max_file_bytes!r} must be at least 1")
    refuse_event_loop(function)


def refuse_event_loop(function: str) -> None:
    """:raises ConfigurationError: it is called from a coroutine, and would block everything else."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError(f"{function} would block the event loop: use `await asyncio.to_thread({function}, ...)`")


def nothing_to_index(folder: Path | str, skipped: Iterable[tuple[str, str]]) -> ConfigurationError:
    """The error for a folder, or a file, that gives no passages."""
    reasons = ", ".join(
        f"{count} {reason}" for reason, count in Counter(reason for _, reason in sorted(skipped)).items()
    )
    return ConfigurationError(f"{folder} holds no text, Markdown or HTML to index (skipped: {reasons or 'nothing'})")
