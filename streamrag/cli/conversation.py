"""Questions one after another, to a pipeline that is started once: from a terminal, a pipe or a file.

What was asked and answered stands before the documents of the next question. The engine's prefix cache has the KV of
all of that but the last turn, and that one is prefilled while retrieval runs.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias, TypeVar

from streamrag.cli.output import Output, markup
from streamrag.core import Turn
from streamrag.errors import EngineDeadError, PipelineClosedError, PromptTooLongError, StreamRagError
from streamrag.query.options import MAX_QUERY_CHARACTERS
from streamrag.telemetry import Answer

PROMPT = "> "
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 4 * (MAX_QUERY_CHARACTERS + 1)
"""Bytes of a line that are kept: a query of as many characters is refused."""

T = TypeVar("T")
Ask: TypeAlias = Callable[[str, tuple[Turn, ...]], Awaitable[Answer]]


class Conversation:
    """Turns that fit into the model beside what is retrieved."""

    def __init__(self, ask: Ask, max_characters: int) -> None:
        self.turns: tuple[Turn, ...] = ()
        self._ask = ask
        self._max_characters = max_characters

    async def ask(self, question: str) -> Answer:
        """The answer to `question`; both are then part of what is said. Raises what the query raises."""
        while True:
            try:
                answer = await self._ask(question, self.turns)
                break
            except PromptTooLongError:
                if not self.turns:
                    raise
                self._forget()
        self.turns += (Turn("user", question), Turn("assistant", answer.text))
        while sum(len(turn.text) for turn in self.turns) > self._max_characters and len(self.turns) > 2:
            self._forget()
        return answer

    def _forget(self) -> None:
        """Drop the older half of the turns at once: each time that turns go, the KV of all later ones is recomputed."""
        self.turns = self.turns[2 * ((len(self.turns) + 2) // 4) :]


async def converse(conversation: Conversation, progress: Output, output: Output, *, file: int = 0) -> int:
    """Answer every line of `file` until it ends; returns how many could not be answered.

    Ctrl-C stops an answer, and the conversation goes on. Without one under way it says how to leave, and the next one
    ends the program: the answer that it was meant for may have ended just before.

    :raises EngineDeadError: no question could be answered any more.
    """
    num_failed = 0
    is_terminal = os.isatty(file)

    def prompt() -> None:
        progress.print(PROMPT, end="")

    def say_how_to_leave() -> None:
        progress.print(markup("\n[dim]Ctrl-D leaves, and so does another Ctrl-C"))
        prompt()

    if is_terminal:
        progress.print(markup("[dim]Each line is a question. Ctrl-C stops an answer, Ctrl-D leaves"))
        asked = questions(file, prompt, say_how_to_leave)
    else:
        asked = questions(file)
    async for question in asked:
        try:
            if await unless_stopped(conversation.ask(question)) is None:
                num_failed += 1
                output.print()  # behind a half of an answer
                progress.print(markup("[yellow]stopped"))
        except (EngineDeadError, PipelineClosedError):
            raise
        except StreamRagError as error:
            num_failed += 1
            progress.print_line(markup(f"[red]{type(error).__name__}:[/] {{}}", error))
    if is_terminal:
        progress.print()
    return num_failed


async def questions(
    file: int, before_each: Callable[[], None] = lambda: None, at_ctrl_c: Callable[[], None] | None = None
) -> AsyncIterator[str]:
    """The lines of a file that say something. With `at_ctrl_c`, the first Ctrl-C while one is waited for calls it."""
    kept = b""
    while True:
        if not kept:
            before_each()
        part = await _read(file) if at_ctrl_c is None else await unless_stopped(_read(file))
        if part is None:
            assert at_ctrl_c is not None
            at_ctrl_c()
            part = await _read(file)
        *ended, begun = part.split(b"\n")
        for line in ended:
            if question := _text(kept + line):
                yield question
            kept = b""
        kept = (kept + begun)[:MAX_LINE_BYTES]
        if not part:
            break
    if question := _text(kept):
        yield question


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8-sig", "replace").strip()


async def _read(file: int) -> bytes:
    """Return what can be read now, or nothing at the end. A thread that reads a terminal could not be stopped."""
    loop = asyncio.get_running_loop()
    is_ready = asyncio.Event()
    try:
        loop.add_reader(file, is_ready.set)
    except PermissionError:  # of a file on a disk, which is always ready
        return os.read(file, READ_BYTES)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(file)
    return os.read(file, READ_BYTES)


class OnCtrlC:
    """Stops an answer at the first signal; at the next one, or at another signal, does what was done `otherwise`."""

    def __init__(self, task: "asyncio.Future[Any]", otherwise: Any) -> None:
        self.otherwise = otherwise
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._has_stopped = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._has_stopped and callable(self.otherwise):
            self.otherwise(number, frame)
        self._has_stopped = True
        self._loop.call_soon_threadsafe(self._task.cancel)


async def unless_stopped(doing: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `doing`; None if Ctrl-C has stopped it."""
    task = asyncio.ensure_future(doing)
    with stopped_by_ctrl_c(task):
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is None or this.cancelling():
                raise
            return None


@contextmanager
def stopped_by_ctrl_c(task: "asyncio.Future[Any]") -> Iterator[None]:
    """Within the block, Ctrl-C cancels the task and nothing else, unless it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, OnCtrlC(task, before))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
