"""A conversation with a pipeline, with questions from a terminal, a pipe or a file.

Earlier turns precede the documents in the next prompt. The engine's prefix cache has the KV of all but the last turn,
which is prefilled while retrieval runs.
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
"""Maximum bytes of a line; longer lines are truncated, and exceed the maximum length of a query."""

T = TypeVar("T")
Ask: TypeAlias = Callable[[str, tuple[Turn, ...]], Awaitable[Answer]]


class ChatHistory:
    """The turns of a conversation, dropped from the oldest on when they no longer fit into the model."""

    def __init__(self, ask: Ask, max_characters: int) -> None:
        self.turns: tuple[Turn, ...] = ()
        self._ask = ask
        self._max_characters = max_characters

    async def ask(self, question: str) -> Answer:
        """Return the answer to `question`, and add both to the turns.

        A prompt that is too long is sent again without the older half of the turns; without turns, the error is raised.
        Afterwards turns are forgotten until they have at most `max_characters`, or one question and answer remain.
        """
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
        """Drop the older half of the turns: each time that turns are dropped, the KV of all others is recomputed."""
        self.turns = self.turns[2 * ((len(self.turns) + 2) // 4) :]


async def converse(conversation: ChatHistory, progress: Output, output: Output, *, file: int = 0) -> int:
    """Answer every line of `file`, print errors of queries, and return the number of questions without an answer.

    Ctrl-C stops the current answer. If there is none, the first Ctrl-C prints how to leave, because it may have been
    meant for an answer that has just ended; the second ends the program.

    :raises EngineDeadError: the engine has died, so that no further question can be answered.
    """
    num_failed = 0
    is_terminal = os.isatty(file)

    def prompt() -> None:
        progress.print(PROMPT, end="")

    def print_how_to_leave() -> None:
        progress.print(markup("\n[dim]Ctrl-D leaves, and so does another Ctrl-C"))
        prompt()

    if is_terminal:
        progress.print(markup("[dim]Each line is a question. Ctrl-C stops an answer, Ctrl-D leaves"))
        lines = questions(file, prompt, print_how_to_leave)
    else:
        lines = questions(file)
    async for question in lines:
        try:
            if await unless_stopped(conversation.ask(question)) is None:
                num_failed += 1
                output.print()  # ends the line of the partial answer
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
    """Yield the lines of a file that are not blank, stripped and cut to `MAX_LINE_BYTES`.

    before_each: called before each wait for a new line.
    at_ctrl_c: called at the first Ctrl-C during a wait, after which the wait goes on; another Ctrl-C is not handled. If
        None, no Ctrl-C is handled.
    """
    buffer = b""
    while True:
        if not buffer:
            before_each()
        part = await _read(file) if at_ctrl_c is None else await unless_stopped(_read(file))
        if part is None:
            assert at_ctrl_c is not None
            at_ctrl_c()
            part = await _read(file)
        *ended, rest = part.split(b"\n")
        for line in ended:
            if question := _text(buffer + line):
                yield question
            buffer = b""
        buffer = (buffer + rest)[:MAX_LINE_BYTES]
        if not part:
            break
    if question := _text(buffer):
        yield question


def _text(line: bytes) -> str:
    """Decode a line, cut to the maximum, without surrounding white space."""
    return line[:MAX_LINE_BYTES].decode("utf-8-sig", "replace").strip()


async def _read(file: int) -> bytes:
    """Wait for bytes without a thread, which could not be interrupted, and return them; b"" at the end of the file."""
    loop = asyncio.get_running_loop()
    is_ready = asyncio.Event()
    try:
        loop.add_reader(file, is_ready.set)
    except PermissionError:  # regular files do not support polling, and are always ready
        return os.read(file, READ_BYTES)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(file)
    return os.read(file, READ_BYTES)


class OnCtrlC:
    """A signal handler that cancels a task at the first signal, and calls the handler `otherwise` at the next ones."""

    def __init__(self, task: "asyncio.Future[Any]", otherwise: Any) -> None:
        self.otherwise = otherwise
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._has_stopped = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Cancel the task; from the second signal on, call `otherwise` first."""
        if self._has_stopped and callable(self.otherwise):
            self.otherwise(number, frame)
        self._has_stopped = True
        self._loop.call_soon_threadsafe(self._task.cancel)


async def unless_stopped(doing: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `doing`, or None if Ctrl-C cancelled it; a cancellation of the caller is raised."""
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
    """Make Ctrl-C cancel only the task within the block, unless it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, OnCtrlC(task, before))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
