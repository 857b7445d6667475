"""A session: data that stream in, and questions about them."""

import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from functools import partial
from typing import Annotated, Self, Unpack

from pydantic import Field

from streamrag.core import Backend, Chunk, SamplingParams, Source
from streamrag.core.trace_context import conversation
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.query.answer_stream import AnswerStream, EventStream
from streamrag.sessions.data import SessionData, SessionState
from streamrag.sessions.drops import DataDropped
from streamrag.sessions.limits import SessionBooks, SessionLimits
from streamrag.sessions.log import SessionLog
from streamrag.sessions.question import DECISIVE_GAP, WatchOptions
from streamrag.sessions.questions import AskOptions, Questions
from streamrag.sessions.tasks import SessionTasks
from streamrag.sessions.watches import Admit, Watch, Watches
from streamrag.support.tasks import run_regardless
from streamrag.support.validation import Count, Number, SecondsOrZero, validated

MAX_WAITING = 4096
MAX_WAITING_CHARACTERS = 4_000_000
"""Most data that wait for the engine, unless the caller says otherwise."""


class Session:
    """Context that streams in, kept computed, and any number of questions about it at once.

    Made by `Pipeline.session`, and used as an async context manager. An answer is the model's to the very text of its
    version: computing ahead makes it fast, and changes nothing in it.

    window_tokens: most tokens of data in the prompt; the oldest go for new ones.
    slide_share: share of the window that goes at a time. The rest is then computed anew, in the background, while
        questions are answered from the version before.
    max_waiting, max_waiting_characters: data that waits while the engine computes; beyond it the oldest is dropped.
    batch_interval_s: least seconds between two batches of data, each of which takes the engine a step at least: askers
        wait for fewer steps, and for newer data.
    log: a file that the session's text is kept in; if it is there, the session goes on where it ended.
    tenant, books: whose it is, and where it is counted while it is open; nowhere, without.
    admit: makes room for each answer to a watched question, or refuses it for now; without, there is always room.
    """

    @validated
    def __init__(
        self,
        backend: Backend,
        *,
        system: Annotated[str | None, Field()] = None,
        template: Annotated[PromptTemplate | None, Field()] = None,
        window_tokens: Count | None = None,
        slide_share: Annotated[Number, Field(gt=0, lt=1)] = 0.5,
        max_waiting: Count = MAX_WAITING,
        max_waiting_characters: Count = MAX_WAITING_CHARACTERS,
        batch_interval_s: SecondsOrZero = 0.0,
        log: SessionLog | str | os.PathLike[str] | None = None,
        name: str = "session",
        tenant: Annotated[str, Field()] = "",
        books: SessionBooks | None = None,
        admit: Admit = lambda question: lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = SessionLog(log) if log is not None and not isinstance(log, SessionLog) else log
        self._tenant = tenant
        self._books = SessionBooks(SessionLimits()) if books is None else books
        self._conversation_id = f"session {uuid.uuid4().hex}"
        self._tasks = SessionTasks(name)
        self._data = SessionData(
            backend,
            self._log,
            system=system,
            template=template,
            window_tokens=window_tokens,
            slide_share=slide_share,
            max_waiting=max_waiting,
            max_waiting_characters=max_waiting_characters,
            batch_interval_s=batch_interval_s,
            name=name,
        )
        self._questions = Questions(
            backend,
            self._data,
            self._tasks,
            conversation_id=self._conversation_id,
            clock=clock,
            find_ahead=lambda question, version: self._watches.find(question, version),
        )
        self._watches = Watches(self._questions, self._data, self._log, admit)
        self._has_begun = False

    # --------------------------------------------------------------------------------------------- starting and ending

    async def start(self) -> None:
        """Have the system text computed. Called by the context manager.

        :raises PromptTooLongError: window and system text do not fit the model's length.
        :raises PipelineClosedError: the session was closed, also meanwhile.
        :raises ConfigurationError: it has been started before.
        :raises SessionLogError: the log cannot be opened, or is of another session.
        :raises TooManySessionsError: of this tenant, or of all, as many are open as may be.
        """
        self._data.check_not_closed()
        if self._has_begun:
            raise ConfigurationError("the session has been started before: open another one")
        self._has_begun = True
        try:
            ingestion = await self._data.open(partial(self._books.enter, self, self._tenant))
            self._data.check_not_closed()
        except BaseException:
            self._has_begun = False
            self._books.remove(self)
            if self._log is not None:
                await self._log.aclose()
            raise
        token = conversation.set(self._conversation_id)  # for the task that it starts
        self._data.start(ingestion, self._on_version)
        conversation.reset(token)
        self._watches.resume()

    async def aclose(self, *, forgets: bool = False) -> None:
        """End all questions and watches, and free the session's KV; with `forgets`, remove its log too."""
        self._data.close()
        await run_regardless(self._close(forgets), "streamrag session closes")

    async def _close(self, forgets: bool) -> None:
        try:
            await self._watches.aclose()
            await self._tasks.aclose()
            was_started = await self._data.aclose()
            if self._log is not None and (was_started or forgets):
                await self._log.aclose(removes=forgets)
        finally:
            self._books.remove(self)

    def _on_version(self) -> None:
        self._questions.cache.clear()
        self._watches.on_version()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def version(self) -> int:
        """Version of the data that questions are answered from at once."""
        return self._data.ingestion.ready.version

    @property
    def watches(self) -> dict[str, Watch]:
        """Watches that have a name, by name."""
        return dict(self._watches.named)

    @property
    def state(self) -> SessionState:
        """Counts of the data, and the state of the log."""
        return self._data.state

    # ------------------------------------------------------------------------------------------------------------ data

    async def append(self, data: Chunk | str) -> int:
        """Add data at the end and return its version: how many chunks have been appended, and system texts frozen.

        Never waits for the engine. Yields to the event loop every 64 chunks, and on every chunk once the buffer is half
        full, so that a tight loop cannot starve ingestion. If more comes than can be taken in, the oldest data that
        wait are dropped: see `state` and `drops`. If cancelled, nothing is appended.

        :raises SessionLogError: a session with a log takes no chunk of more than a million characters.
        :raises PipelineClosedError: the session was closed.
        """
        return await self._data.append(data)

    async def extend(self, data: Sequence[Chunk | str]) -> int:
        """Add several chunks at the end, all of them or none, and return the newest version.

        :raises ConfigurationError: there are more than may wait at once, `max_waiting` and `max_waiting_characters`.
        :raises SessionLogError: a chunk is too long for the log.
        :raises PipelineClosedError: the session was closed.
        """
        return await self._data.extend(data)

    async def flush(self) -> int:
        """Wait until all that has been appended is in the log, and on the disk as far as the system knows (`fsync`).

        Returns the version that is. Without it, what a killed process had appended in its last moments may be missing.

        :raises SessionLogError: the disk does not take it; the session goes on, and so does trying.
        :raises ConfigurationError: the session has no log.
        """
        self._data.check_open()
        if self._log is None:
            raise ConfigurationError("the session has no log: open it with log=PATH")
        return await self._log.flush()

    async def follow(self, source: Source | AsyncIterable[Chunk | str], query: str = "") -> int:
        """Append all that a source or an async iterator yields, until it ends, and return the newest version.

        Of each update of a source only the new chunks are appended. An iterator that is a generator is closed at the
        end, also after an error.

        source: a source, or an async iterator of texts or chunks.
        query: what a source is asked.

        :raises SourceError: it failed, or yielded something else; what came before stays.
        :raises ConfigurationError: it is neither a source nor an async iterator.
        :raises PipelineClosedError: the session was closed.
        """
        return await self._data.follow(source, query, self._tasks)

    async def freeze(self, system: str) -> int:
        """Have another system text from now on: other instructions, and with them documents, or a summary of data that
        have gone.

        All that stands behind it is computed anew in the background, as when the window slides, and meanwhile questions
        are answered from the version before. Returns the version that has it, as `append` does; a later one has the
        text that was frozen last. In a session with a log it is there again when that is resumed.

        :raises PromptTooLongError: beside the window it leaves no room for a question. Nothing has changed.
        :raises ConfigurationError: it is no str.
        :raises SessionLogError: a session with a log takes no system text of more than a million characters.
        :raises PipelineClosedError: the session was closed, also meanwhile.
        """
        return await self._data.freeze(system)

    async def newest(self, *, behind: int = 0, at_most: int = 100) -> list[tuple[int, str]]:
        """Return the newest data in the window, oldest first, each with its version and its text in the prompt.

        behind: only data that came after this version.
        at_most: how many chunks.
        """
        return await self._data.newest(behind, at_most)

    def versions(self) -> AsyncGenerator[int, None]:
        """Yield the version that questions are answered from, whenever it has changed; a slow reader gets the newest.

        :raises PipelineClosedError: the session was closed.
        """
        return self._data.versions()

    def drops(self) -> AsyncGenerator[DataDropped, None]:
        """Yield data that are dropped from now on, those of a quarter of a second together.

        :raises PipelineClosedError: the session was closed.
        :raises BackendError: it has failed.
        """
        return self._data.drops()

    # ------------------------------------------------------------------------------------------------------- questions

    def ask(self, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """Return the answer to `question`, chunk by chunk, from the newest version that is computed.

        Raises, when iterated, DeadlineExceededError, PromptTooLongError, BackendError and PipelineClosedError; and
        ConfigurationError for answers that cannot be told from each other.
        """
        return AnswerStream(self._questions.ask(question, **options))

    def ask_events(self, question: str, **options: Unpack[AskOptions]) -> EventStream:
        """Return the same as events: each piece of the answer, then the whole with its version and timings."""
        return EventStream(self._questions.ask(question, **options))

    def watch(
        self,
        question: str,
        *,
        answers: tuple[str, ...] = (),
        every_s: float = 0.0,
        priority: int = 0,
        params: SamplingParams | None = None,
        with_gap: bool = False,
        decisive_gap: float = DECISIVE_GAP,
        name: str | None = None,
    ) -> Watch:
        """Have `question` answered ahead after each change of the data; iterate it for answers that changed.

        Who asks the same question of the same version, in the same way, has the answer at once: with the same
        `answers`, or else the same `params`.

        answers, with_gap, decisive_gap: see `ask`.
        every_s: least seconds between two answers.
        priority: the higher are answered first; among equals, the one that was answered longest ago.
        name: under which it is found in `watches`; another one of that name goes. In a session with a log it is there
            again when that is resumed, unless it was closed before the session.

        :raises ConfigurationError: values that cannot work.
        :raises SessionLogError: it has a name, and is too long for the log.
        """
        self._data.check_open()
        params = SamplingParams(max_tokens=64) if params is None else params
        options = WatchOptions(question, answers, every_s, priority, with_gap, decisive_gap, params, name)
        return self._watches.add(options)
