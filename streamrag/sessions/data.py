"""The data of a session: appending them, reading them back, and the state of the prompt."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from pydantic import Field

from streamrag.core import Backend, Chunk, Source
from streamrag.core.retrieval import checked_chunk
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import ConfigurationError, PipelineClosedError, SessionLogError
from streamrag.modes import PromptTemplate
from streamrag.sessions.drops import DataDropped, Drops
from streamrag.sessions.feed import append_all, check_followed
from streamrag.sessions.ingestion import CLOSED, Ingestion, Snapshot
from streamrag.sessions.log import LogState, SessionLog
from streamrag.sessions.prompts import SESSION_TEMPLATE, SessionPrompts
from streamrag.sessions.tasks import SessionTasks
from streamrag.sessions.window import Buffer, Numbered, Window
from streamrag.support.messages import plain_text, short_repr
from streamrag.support.validation import Count, CountOrZero, validated

CHUNKS_PER_TURN = 64
"""Chunks that are appended before `append` yields to the event loop: half a millisecond."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """Counts of a session's data, and the state of its log."""

    version: int
    """Version of the data that questions are answered from."""
    num_appended: int
    """Chunks appended plus system texts frozen: the newest version."""
    num_waiting: int
    """Chunks in the buffer, which wait for the engine."""
    num_dropped: int
    """Chunks dropped from the buffer, because the engine could not keep up."""
    num_slid: int
    """Chunks removed from the prompt when the window slid."""
    num_tokens: int
    """Tokens of head and data."""
    num_frozen_tokens: int
    """Tokens of the head."""
    window_tokens: int
    """Most tokens that the data may take."""
    num_failures: int
    """Number of times that the engine gave up the stream."""
    log: LogState | None = None
    """State of the log, if there is one."""


class SessionData:
    """The data of one session, from `append` to the prompt. For the options see `Pipeline.session`."""

    def __init__(
        self,
        backend: Backend,
        log: SessionLog | None,
        *,
        system: str | None,
        template: PromptTemplate | None,
        window_tokens: int | None,
        slide_share: float,
        max_waiting: int,
        max_waiting_characters: int,
        batch_interval_s: float,
        name: str,
        conversation_id: str,
    ) -> None:
        self._backend = backend
        self._log = log
        base = SESSION_TEMPLATE if template is None else template
        self._template = base if system is None else replace(base, system=plain_text(system))
        self._is_text_given = system is not None or template is not None
        self._window_tokens = window_tokens
        self._slide_share = slide_share
        self._batch_interval_s = batch_interval_s
        self._name = name
        self._conversation_id = conversation_id
        self.buffer = Buffer(max_waiting, max_waiting_characters, self._on_drop)
        self._drops = Drops()
        self._num_in_turn = 0
        self._ingestion: Ingestion | None = None
        self._is_closed = False

    async def open(self, admit: Callable[[int], None]) -> Ingestion:
        """Read the log, start writing it, and return ingestion that holds its data but is not started. Raises as
        `Session.start` does, also for a given system text that is neither the log's first nor its newest; the caller
        then closes the log.

        The window's size is the given one, that of the log, or else three quarters of the tokens that the head leaves.

        admit: called with the tokens of the window; raises TooManySessionsError if a limit is reached.
        """
        contents = None if self._log is None else await self._log.open()
        template, window_tokens = self._template, self._window_tokens
        if self._log is not None and contents is not None:
            if self._is_text_given and template.system not in (contents.header.system, contents.system):
                raise SessionLogError(
                    f"{self._log.path} is of a session with another system text: give none, or that one, "
                    "or choose another file"
                )
            template = replace(template, system=contents.system)
            window_tokens = window_tokens or contents.header.window_tokens
        model = self._backend.model
        prompts = await in_thread(model.tokenizer, partial(SessionPrompts, model, template, self._conversation_id))
        window_tokens = window_tokens or max(prompts.room * 3 // 4, 1)
        prompts.check_window(window_tokens)
        admit(window_tokens)
        window = Window(window_tokens, self._slide_share, prompts.passage_end)
        ingestion = Ingestion(self._backend, self._name, self.buffer, window, prompts, self._log)
        pieces = []
        if contents is not None:
            numbered = [Numbered(number, chunk) for number, chunk in contents.chunks.items()]
            pieces = await prompts.pieces_in_background(numbered)
            window.num_slid = contents.header.num_slid
            self.buffer.num_appended = contents.header.num_appended
            self.buffer.num_dropped = contents.header.num_dropped
        if self._log is not None:
            self._log.start(template.system, window_tokens, self._slide_share, contents)
            if contents is not None:
                await self._log.wait_for_attempt()
        ingestion.resume(pieces)
        return ingestion

    def start(self, ingestion: Ingestion, on_version: Callable[[], None]) -> None:
        """Start the ingestion that `open` returned; it calls `on_version` for each version, and at its end."""
        self._ingestion = ingestion
        ingestion.start(on_version, self._drops.end, self._batch_interval_s)

    def close(self) -> None:
        """Reject data and questions from now on."""
        self._is_closed = True

    async def aclose(self) -> bool:
        """Stop ingestion, free its KV, and return whether it was started."""
        if self._ingestion is not None:
            await self._ingestion.aclose()
        return self._ingestion is not None

    def check_not_closed(self) -> None:
        """Raise PipelineClosedError if the session was closed."""
        if self._is_closed:
            raise PipelineClosedError(f"{CLOSED}: open another one")

    def check_open(self) -> None:
        """Raise PipelineClosedError if the session was closed, BackendError if it has failed."""
        self.check_not_closed()
        self.ingestion.check()

    @property
    def ingestion(self) -> Ingestion:
        """The ingestion; raises ConfigurationError if the session was not started."""
        if self._ingestion is None:
            raise ConfigurationError("the session has not been started: use `async with pipeline.session(...)`")
        return self._ingestion

    @property
    def state(self) -> SessionState:
        """Counts of the data, and the state of the log; raises ConfigurationError before the start."""
        ready, window = self.ingestion.ready, self.ingestion.window
        return SessionState(
            version=ready.version,
            num_appended=self.buffer.num_appended,
            num_waiting=len(self.buffer),
            num_dropped=self.buffer.num_dropped,
            num_slid=window.num_slid,
            num_tokens=len(ready.token_ids),
            num_frozen_tokens=len(ready.prompts.head),
            window_tokens=window.max_tokens,
            num_failures=self.ingestion.num_failures,
            log=self._log.state if self._log else None,
        )

    async def at_least(self, version: int) -> Snapshot:
        """Wait until this version is computed, and return the newest one. Raises as `check_open` does."""
        snapshot = await self.ingestion.at_least(version)
        self.check_open()
        return snapshot

    @validated
    async def newest(self, behind: CountOrZero, at_most: Count) -> list[tuple[int, str]]:
        """Return version and text of the last `at_most` chunks in the window with versions over `behind`, oldest first;
        raise as `check_open` does."""
        self.check_open()
        pieces = self.ingestion.window.newest(behind, at_most)
        prompts = self.ingestion.ready.prompts
        return await in_thread(prompts.tokenizer, partial(prompts.texts_of, pieces), is_background=True)

    async def versions(self) -> AsyncGenerator[int, None]:
        """Yield the newest version to answer from when it has grown from now on, without end; raise as `check_open`."""
        version = self.ingestion.ready.version
        while True:
            version = (await self.at_least(version + 1)).version
            yield version

    async def drops(self) -> AsyncGenerator[DataDropped, None]:
        """Yield one event for all data dropped within a short time, from now on. Raise as `check_open` does: at once if
        the session is not open, else after the last event, when ingestion has ended."""
        self.check_open()
        async with aclosing(self._drops.read()) as drops:
            async for dropped in drops:
                yield dropped
        self.check_open()

    async def append(self, data: Chunk | str) -> int:
        """Append data to the buffer and the log, and return their version; raise as `check_open` and `_checked` do."""
        self.check_open()
        chunk = self._checked(data)
        await self._yield_sometimes()
        self.check_open()
        return self.ingestion.append(chunk)

    async def extend(self, data: Sequence[Chunk | str]) -> int:
        """Append all of `data`, or none if one is invalid or they exceed the buffer; return the newest version, also
        for an empty list. Raise ConfigurationError for a str or what is no sequence. See `Session.extend`."""
        if isinstance(data, str) or not isinstance(data, Sequence):
            raise ConfigurationError(
                f"data={short_repr(data)} must be a list of chunks or texts; one of them is for append"
            )
        self.check_open()
        chunks = []
        for each in data:
            chunks.append(self._checked(each))
            await self._yield_sometimes()
        self.check_open()
        self.buffer.check(chunks)
        for chunk in chunks:
            self.ingestion.append(chunk)
        return self.buffer.num_appended

    async def follow(self, source: Source | AsyncIterable[Chunk | str], query: str, tasks: SessionTasks) -> int:
        """Append all that `source` yields, in one of `tasks`, and return the newest version; see `Session.follow`."""
        check_followed(source, query)
        self.check_open()
        await tasks.start(partial(append_all, source, query, self.append), "source")
        return self.buffer.num_appended

    @validated
    async def freeze(self, system: Annotated[str, Field()]) -> int:
        """Have ingestion replace the system text in a new version, and return that at once; see `Session.freeze`."""
        self.check_open()
        system = plain_text(system)
        if self._log is not None:
            self._log.check_system(system)
        current = self.ingestion.ready.prompts
        prompts = await in_thread(current.tokenizer, partial(current.with_system, system))
        prompts.check_window(self.ingestion.window.max_tokens)
        self.check_open()
        return self.ingestion.freeze(prompts, system)

    def _on_drop(self, number: int) -> None:
        if self._log is not None:
            self._log.drop(number)
        self._drops.put(number, self.buffer.num_dropped)

    def _checked(self, data: Chunk | str) -> Chunk:
        """Return data as a plain chunk without fields that the template hides. Raise ConfigurationError if data are
        invalid, SessionLogError if too long to log."""
        chunk = checked_chunk(Chunk(data, "") if isinstance(data, str) else data)
        chunk = self.ingestion.ready.prompts.without_hidden(chunk)
        if self._log is not None:
            self._log.check(chunk)
        return chunk

    async def _yield_sometimes(self) -> None:
        """Yield to the event loop every `CHUNKS_PER_TURN` calls, and on every call once the buffer is half full."""
        self._num_in_turn += 1
        if self._num_in_turn >= CHUNKS_PER_TURN or self.buffer.is_half_full:
            self._num_in_turn = 0
            await asyncio.sleep(0)
