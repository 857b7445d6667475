"""A session: data that stream in, and questions about them."""

import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from functools import partial
from typing import Annotated, Self, TypedDict, Unpack

from pydantic import Field

from streamrag.core import Backend, Chunk, SamplingParams, Source
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.query.answer_stream import AnswerStream, EventStream
from streamrag.sessions.data import SessionData, SessionState
from streamrag.sessions.drops import DataDropped
from streamrag.sessions.limits import MAX_WAITING, MAX_WAITING_CHARACTERS, SessionLimits, SessionRegistry
from streamrag.sessions.log import SessionLog
from streamrag.sessions.question_options import DECISIVE_MARGIN, WatchOptions
from streamrag.sessions.questions import AskOptions, Questions
from streamrag.sessions.tasks import SessionTasks
from streamrag.sessions.watched_questions import Admit, Watch, Watches
from streamrag.support.tasks import run_shielded
from streamrag.support.validation import Count, Number, SecondsOrZero, validated


class SessionOptions(TypedDict, total=False):
    """The options of one session. None counts as not given."""

    system: str | None
    """Replaces the template's system text."""
    template: PromptTemplate | None
    """The words around data and question; each chunk is one `passage`."""
    window_tokens: int | None
    """Most tokens of data in the prompt; three quarters of the model's length by default."""
    slide_share: float
    """Share of the window that is removed at once when it is full; half by default. The rest is then computed again in
    the background, while questions are answered from the previous version."""
    max_waiting: int | None
    """Most chunks that wait for the engine before the oldest are dropped; 4,096 by default."""
    max_waiting_characters: int | None
    """Most characters that wait for the engine before the oldest are dropped; four million by default."""
    batch_interval_s: float
    """Least seconds between batches of data; 0 by default. Fewer delay questions less, but their data are older."""
    log: str | os.PathLike[str] | None
    """A file for the session's text, from which the session resumes, with its versions, if it exists."""
    name: str
    """For errors and schedulers; "session" by default."""
    tenant: str
    """The owner, for the pipeline's `session_limits`."""


class Session:
    """Context that streams in and is kept computed, and any number of concurrent questions about it.

    Create it with `Pipeline.session`, and use it as an async context manager; for the options see `SessionOptions`.
    Computing ahead only makes answers faster: each is the model's answer to the exact text of its version.

    registry: the registry that counts the session while it is open; None does not count it.
    admit: admits each answer to a watched question, or rejects it for now; by default, all are admitted.
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
        registry: SessionRegistry | None = None,
        admit: Admit = lambda question: lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = SessionLog(log) if log is not None and not isinstance(log, SessionLog) else log
        self._tenant = tenant
        self._registry = SessionRegistry(SessionLimits()) if registry is None else registry
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
            conversation_id=f"session {uuid.uuid4().hex}",
        )
        self._questions = Questions(
            backend,
            self._data,
            self._tasks,
            clock=clock,
            find_ahead=lambda question, version: self._watches.find(question, version),
        )
        self._watches = Watches(self._questions, self._data, self._log, admit)
        self._is_started = False

    async def start(self) -> None:
        """Open the log, start computing the prompt, and restore the log's watches. Called by the context manager. If
        opening fails, the log is closed, and `start` may be called again.

        :raises PromptTooLongError: window and system text do not fit the model's length.
        :raises PipelineClosedError: the session was closed, before or during the call.
        :raises ConfigurationError: the session has been started before.
        :raises SessionLogError: the log cannot be opened, or is of another session.
        :raises TooManySessionsError: a limit of the tenant or of the pipeline is reached.
        """
        self._data.check_not_closed()
        if self._is_started:
            raise ConfigurationError("the session has been started before: open another one")
        self._is_started = True
        try:
            ingestion = await self._data.open(partial(self._registry.enter, self, self._tenant))
            self._data.check_not_closed()
        except BaseException:
            self._is_started = False
            self._registry.remove(self)
            if self._log is not None:
                await self._log.aclose()
            raise
        self._data.start(ingestion, self._on_version)
        self._watches.resume()

    async def aclose(self, *, forgets: bool = False) -> None:
        """End all questions and watches, and free the session's KV; with `forgets`, delete its log too."""
        self._data.close()
        await run_shielded(self._close(forgets), "streamrag session closes")

    async def _close(self, forgets: bool) -> None:
        """End watches, questions and ingestion in this order, then close the log if the session was started, or delete
        it if `forgets`. Remove the session from the registry even after an error."""
        try:
            await self._watches.aclose()
            await self._tasks.aclose()
            was_started = await self._data.aclose()
            if self._log is not None and (was_started or forgets):
                await self._log.aclose(removes=forgets)
        finally:
            self._registry.remove(self)

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
        """Version of the data that questions are answered from."""
        return self._data.ingestion.ready.version

    @property
    def watches(self) -> dict[str, Watch]:
        """Named watches, by name."""
        return dict(self._watches.named)

    @property
    def state(self) -> SessionState:
        """Counts of the data, and the state of the log."""
        return self._data.state

    async def append(self, data: Chunk | str) -> int:
        """Append data, and return their version: the number of chunks appended plus system texts frozen so far.

        Never waits for the engine. Yields to the event loop every 64 chunks, and on every chunk once the buffer is half
        full, so that a tight loop cannot starve ingestion. When the buffer is full, its oldest chunks are dropped: see
        `state` and `drops`. If cancelled, nothing is appended.

        :raises SessionLogError: with a log, the chunk has more than a million characters.
        :raises PipelineClosedError: the session was closed.
        """
        return await self._data.append(data)

    async def extend(self, data: Sequence[Chunk | str]) -> int:
        """Append several chunks, all of them or none, and return the newest version.

        :raises ConfigurationError: they exceed `max_waiting` or `max_waiting_characters`.
        :raises SessionLogError: a chunk is too long for the log.
        :raises PipelineClosedError: the session was closed.
        """
        return await self._data.extend(data)

    async def flush(self) -> int:
        """Wait until all appended data are in the log and synced to disk (`fsync`), and return the version on disk.

        Without it, data that a killed process appended in its last moments may be missing.

        :raises SessionLogError: the data cannot be written. The session continues, and writing is tried again.
        :raises ConfigurationError: the session has no log.
        """
        self._data.check_open()
        if self._log is None:
            raise ConfigurationError("the session has no log: open it with log=PATH")
        return await self._log.flush()

    async def follow(self, source: Source | AsyncIterable[Chunk | str], query: str = "") -> int:
        """Append everything that a source or an async iterator yields, and return the newest version when it ends.

        Of each update of a source only the new chunks are appended. A generator is closed at the end, even after an
        error.

        source: a source, or an async iterator of texts or chunks.
        query: the query for the source.

        :raises SourceError: it failed, or yielded something else. Earlier chunks stay in the session.
        :raises ConfigurationError: it is neither a source nor an async iterator.
        :raises PipelineClosedError: the session was closed.
        """
        return await self._data.follow(source, query, self._tasks)

    async def freeze(self, system: str) -> int:
        """Replace the system text, for example by new instructions or a summary of older data; return the new version.

        The data behind it are computed again in the background, as when the window slides. Meanwhile questions are
        answered from the previous version. A session that resumes from a log has the text that was frozen last.

        :raises PromptTooLongError: text and window leave no room for a question. Nothing has changed.
        :raises ConfigurationError: it is not a str.
        :raises SessionLogError: with a log, the text has more than a million characters.
        :raises PipelineClosedError: the session was closed, before or during the call.
        """
        return await self._data.freeze(system)

    async def newest(self, *, behind: int = 0, at_most: int = 100) -> list[tuple[int, str]]:
        """Return the newest chunks in the window, oldest first, each with its version and its text in the prompt.

        behind: only chunks with a higher version.
        at_most: most chunks to return.
        """
        return await self._data.newest(behind, at_most)

    def versions(self) -> AsyncGenerator[int, None]:
        """Yield each new version that questions are answered from; a slow reader skips to the newest.

        :raises PipelineClosedError: the session was closed.
        """
        return self._data.versions()

    def drops(self) -> AsyncGenerator[DataDropped, None]:
        """Yield an event when data are dropped from now on, at most one per quarter of a second.

        :raises PipelineClosedError: the session was closed.
        :raises BackendError: it has failed.
        """
        return self._data.drops()

    def ask(self, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """Return the answer to `question` as a stream of chunks, from the newest version that is computed.

        Raises, when iterated, DeadlineExceededError, PromptTooLongError, BackendError and PipelineClosedError; and
        ConfigurationError for given answers that cannot be told apart.
        """
        return AnswerStream(self._questions.ask(question, **options))

    def ask_events(self, question: str, **options: Unpack[AskOptions]) -> EventStream:
        """Return the answer as a stream of events: its pieces, then the whole with its version and timings."""
        return EventStream(self._questions.ask(question, **options))

    def watch(
        self,
        question: str,
        *,
        answers: tuple[str, ...] = (),
        min_interval_s: float = 0.0,
        priority: int = 0,
        params: SamplingParams | None = None,
        with_margin: bool = False,
        decisive_margin: float = DECISIVE_MARGIN,
        name: str | None = None,
    ) -> Watch:
        """Return a watch, which answers `question` ahead after each change of the data, with at most 64 tokens unless
        `params` are given. Iterate the watch for answers that have changed.

        `ask` returns such an answer at once, for the same question and version with the same `answers` or, without
        `answers`, the same `params`.

        answers, with_margin, decisive_margin: see `ask`. Without `answers`, the margin is that of the first token.
        min_interval_s: least seconds between two answers.
        priority: higher ones are answered first; among equals, the one that was answered longest ago.
        name: its key in `watches`; replaces a watch of the same name. A session that resumes from a log restores named
            watches, unless they were closed before the session.

        A backend without log-probabilities (`OpenAIBackend`) follows the tokens that its server samples, which a
        warning says for `answers` and `with_margin`.

        :raises ConfigurationError: values that cannot work, such as `answers` for a server that takes only text.
        :raises SessionLogError: the watch has a name, and is too long for the log.
        :raises PipelineClosedError: the session was closed.
        """
        self._data.check_open()
        if answers or with_margin:
            self._questions.check_logprobs()
        params = SamplingParams(max_tokens=64) if params is None else params
        options = WatchOptions(question, answers, min_interval_s, priority, with_margin, decisive_margin, params, name)
        return self._watches.add(options)
