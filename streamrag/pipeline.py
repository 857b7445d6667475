"""Join a source, a mode and a backend into a pipeline that answers queries."""

import asyncio
import os
import warnings
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import anyio

from streamrag.core import Backend, Mode, Progress, Source
from streamrag.core.lifecycle import start_all
from streamrag.core.retrieval import Retrieval
from streamrag.errors import ConfigurationError, PipelineClosedError, TooManyQueriesError
from streamrag.modes import PromptTemplate, UpdateMode
from streamrag.query.answer_stream import AnswerStream, Emit, EventStream
from streamrag.query.options import Query, QueryOptions, check_options
from streamrag.query.overlap import OverlapChooser
from streamrag.query.run import QueryRun
from streamrag.query.state import QueryState
from streamrag.support.clock import Clock, monotonic
from streamrag.support.messages import plain_text, short_repr, type_name
from streamrag.support.tasks import is_cancelled, wait_shielded
from streamrag.support.validation import Count, Flag, SecondsOrZero, validated
from streamrag.telemetry import Answer

if TYPE_CHECKING:
    from streamrag.open_questions import ListenOptions, OpenQuestion, QueriesAhead
    from streamrag.sessions.limits import SessionLimits, SessionRegistry
    from streamrag.sessions.session import Session, SessionOptions
    from streamrag.trace.recorder import TraceRecorder

FORKED = "it was started in the process that this one was forked from, and lives there: make a new one here"


class Pipeline:
    """Answers queries from a source with a backend, and owns both.

    Entering the pipeline starts the engine and the workers, leaving it stops them. Without `async with`, the first
    query starts them, and `aclose()` stops them.

    source: the retriever that yields chunks.
    backend: the model that generates tokens.
    owns_source: whether the pipeline starts and closes the source; False to share it between pipelines.
    owns_backend: whether the pipeline starts and closes the backend; False to share it between pipelines.
    mode: turns chunk events into a context; the default, `UpdateMode`, follows the source.
    template: the words around the context.
    overlap: whether to prefill while retrieval runs. "auto" learns from the queries which way brings the first token
        sooner, see `Answer.overlap`; False retrieves everything first, the baseline of all measurements.
    answer_ahead: whether to draft answers while retrieval runs; needs `VllmBackend(answer_ahead=True)`.
    max_concurrent_queries: most queries that run at the same time; beyond that, `when_full` decides.
    when_full: "wait" queues the query, "refuse" raises TooManyQueriesError.
    on_source_error: "raise", or "answer" from the chunks that had arrived and tell the model that retrieval failed.
    on_progress: called with a human-readable line at each step of starting.
    recorder: writes a trace of the retrieval to a file; the pipeline starts and closes it.
    session_limits: most sessions, and tokens in their windows, per tenant and in total.
    clock: the clock for all times.

    :raises ConfigurationError: values that cannot work.
    """

    @validated
    def __init__(
        self,
        source: Source,
        backend: Backend,
        *,
        owns_source: bool = True,
        owns_backend: bool = True,
        mode: Mode | None = None,
        template: PromptTemplate | None = None,
        overlap: Flag | Literal["auto"] = "auto",
        answer_ahead: Flag = False,
        max_concurrent_queries: Count = 64,
        when_full: Literal["wait", "refuse"] = "wait",
        on_source_error: Literal["raise", "answer"] = "raise",
        on_progress: Progress | None = None,
        recorder: "TraceRecorder | None" = None,
        session_limits: "SessionLimits | None" = None,
        clock: Clock = monotonic,
    ) -> None:
        mode = UpdateMode() if mode is None else mode
        _check_part(source, "source", "stream")
        _check_part(backend, "backend", "generate")
        _check_part(mode, "mode", "fold")
        if recorder is not None:
            _check_part(recorder, "recorder", "record")
        self.source = source
        self.backend = backend
        parts = ((source, owns_source), (backend, owns_backend), (recorder, True))
        self._owned = [part for part, is_owned in parts if is_owned]
        self.overlap = overlap
        self.answer_ahead = answer_ahead
        self.max_concurrent_queries = max_concurrent_queries
        self._mode = mode
        self.template = template or PromptTemplate()
        self._refuses = when_full == "refuse"
        self._answers_despite_source_error = on_source_error == "answer"
        self._recorder = recorder
        self._session_limits = session_limits
        self._session_registry: SessionRegistry | None = None
        self.queries_ahead: QueriesAhead | None = None
        """The counts of queries for questions that are still being asked; None before the first `listen`."""
        self._on_progress = on_progress or (lambda line: None)
        self._clock = clock
        self._admission = anyio.CapacityLimiter(self.max_concurrent_queries)
        self._overlap_chooser = OverlapChooser()
        self._starting: asyncio.Task[None] | None = None
        self._process_id: int | None = None
        self._parts = AsyncExitStack()
        self._queries: set[asyncio.Task[Answer]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_queries(self) -> int:
        """Number of queries that are waiting or running."""
        return sum(not task.done() for task in self._queries)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the pipeline was started in, and must be used in; None before. Raises in a fork."""
        self._raise_forked()
        return self._starting.get_loop() if self._starting is not None else None

    def stream(self, query: str, **options: Unpack[QueryOptions]) -> AnswerStream:
        """Return the answer to `query` as a stream of chunks. For the options see `QueryOptions`.

        Raises ConfigurationError for options that are unknown or cannot work. Raises, when iterated, SourceError,
        BackendError, PromptTooLongError, DeadlineExceededError, TooManyQueriesError and PipelineClosedError.
        """
        return self._stream_from(self.source, query, options)

    def events(self, query: str, **options: Unpack[QueryOptions]) -> EventStream:
        """Return the events of `query`, the last of which has the answer. Options and errors as in `stream`."""
        return EventStream(partial(self._start_query, self._query(query, options), source=self.source))

    def listen(self, **options: Unpack["ListenOptions"]) -> "OpenQuestion":
        """Return a question that is still being asked, for which retrieval and prefill begin early; see `OpenQuestion`.

        Use it as an async context manager. For the options see `ListenOptions`, which raise as in `stream`.
        """
        from streamrag.open_questions import QueriesAhead, open_question

        if self.queries_ahead is None:
            self.queries_ahead = QueriesAhead(max(1, self.max_concurrent_queries // 2))
        if options.get("overlap") is None:
            options["overlap"] = self.overlap
        return open_question(self._stream_from, self.source, self.queries_ahead, options)

    def _stream_from(self, source: Source, query: str, options: QueryOptions) -> AnswerStream:
        """Return the answer to `query` from this source, whose retrieval is recorded only if it is the pipeline's."""
        return AnswerStream(partial(self._start_query, self._query(query, options), source=source))

    def session(self, **options: Unpack["SessionOptions"]) -> "Session":
        """Return a new session: context that streams in while it is open, and questions about it; see `Session`.

        Use the session as an async context manager, inside the pipeline's; entering the session raises
        TooManySessionsError if it exceeds the pipeline's `session_limits`. See `SessionOptions` for the options; None
        counts as not given. Raises PipelineClosedError if the pipeline is closed.
        """
        from streamrag.sessions.limits import SessionLimits, SessionRegistry
        from streamrag.sessions.session import Session

        if self._is_closed:
            raise PipelineClosedError("this pipeline has been closed: make a new one")
        if self._session_registry is None:
            self._session_registry = SessionRegistry(self._session_limits or SessionLimits())
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        return Session(self.backend, **given, registry=self._session_registry, clock=self._clock)

    async def start(self) -> None:
        """Start the engine and the workers, unless they are running. Queries that arrive meanwhile wait.

        Raises ConfigurationError and BackendError. Nothing is left running then, and the next call tries again.
        """
        if self._is_closed:
            raise PipelineClosedError("this pipeline has been closed: make a new one")
        await self._start()

    async def _start(self) -> None:
        """Wait until the parts are started, once for all callers, and anew after a failure; also for queries submitted
        before `aclose`. Raises PipelineClosedError once the pipeline closes, and in a fork."""
        self._raise_forked()
        if self._closing is not None:
            raise PipelineClosedError("the query was stopped before its end: its pipeline was closed")
        if self._starting is None or (self._starting.done() and not _succeeded(self._starting)):
            self._starting = asyncio.create_task(self._start_parts(), name="streamrag start")
            self._process_id = os.getpid()
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise PipelineClosedError("this pipeline was closed while it was starting") from None

    def _raise_forked(self) -> None:
        """Raise PipelineClosedError in a fork of the process that started the pipeline."""
        if self._process_id not in (None, os.getpid()):
            raise PipelineClosedError(FORKED)

    @validated
    async def aclose(self, *, drain_s: SecondsOrZero = 0.0) -> None:
        """Reject new queries, drain running ones for up to `drain_s` seconds, then end queries, sessions and parts.

        Cancelling the call, or calling it again, ends the drain at once; either still returns only when everything has
        stopped. Aborted queries raise PipelineClosedError. Raises what a session or a part raised when closing.
        """
        self._is_closed = True
        try:
            if self._queries and drain_s > 0 and self._closing is None:
                await asyncio.wait(self._queries, timeout=drain_s)
        finally:
            if self._closing is None:
                self._closing = asyncio.create_task(self._close(), name="streamrag close")
            await wait_shielded([self._closing])
        self._closing.result()  # raises what a part raised on closing

    async def _close(self) -> None:
        """Cancel queries and starting, close sessions, then the parts; raise the first session's error after that."""
        tasks: list[asyncio.Task[Any]] = [*self._queries, *([self._starting] if self._starting else [])]
        for task in tasks:
            task.cancel()
        await wait_shielded(tasks)
        try:
            sessions = self._session_registry.close() if self._session_registry else []
            closing = [asyncio.create_task(session.aclose()) for session in sessions]
            await wait_shielded(closing)
            for task in closing:
                task.result()
        finally:
            await self._parts.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        starting = getattr(self, "_starting", None)  # missing if __init__ raised
        if starting is not None and not self._is_closed and (not starting.done() or _succeeded(starting)):
            warnings.warn(
                "a Pipeline was dropped without being closed: its engine and workers may still run; "
                "use `async with Pipeline(...)`, or `await pipeline.aclose()`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _query(self, text: str, options: QueryOptions) -> Query:
        """Return the valid query with the pipeline's defaults, or raise ConfigurationError. Ignore options of None."""
        check_options(options)
        values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        system = values.pop("system", None)
        if not isinstance(system, str | None):
            raise ConfigurationError(f"system={short_repr(system)} must be a str")
        values["template"] = template = values.get("template", self.template)
        if system is not None and isinstance(template, PromptTemplate):
            values["template"] = replace(template, system=plain_text(system))
        return Query(text, **{"overlap": self.overlap, "answer_ahead": self.answer_ahead, **values})

    def _start_query(self, query: Query, emit: Emit, *, source: Source) -> "asyncio.Task[Answer]":
        """Return the query's new task; raise PipelineClosedError, or TooManyQueriesError if `when_full` refuses it."""
        if self._is_closed:
            raise PipelineClosedError("this pipeline has been closed: make a new one, or ask before leaving its block")
        num_queries = sum(not task.done() and not task.cancelling() for task in self._queries)
        if self._refuses and num_queries >= self.max_concurrent_queries:
            raise TooManyQueriesError(
                f"{num_queries} queries are running, and max_concurrent_queries={self.max_concurrent_queries}: "
                'try again later, raise it, or let queries wait with when_full="wait"'
            )
        state = QueryState(
            Retrieval(source, query.text),
            self.backend,
            self._mode,
            emit,
            self._clock,
            submitted_s=self._clock(),
            recorder=self._recorder if source is self.source else None,
            answers_despite_source_error=self._answers_despite_source_error,
        )
        run = QueryRun(query, state, self._overlap_chooser)
        task = asyncio.create_task(self._run_query(run), name=f"streamrag query {query.text[:40]!r}")
        self._queries.add(task)
        task.add_done_callback(self._forget_query)
        return task

    async def _run_query(self, run: QueryRun) -> Answer:
        """Run a query; if it is cancelled because the pipeline closes, raise PipelineClosedError instead."""
        try:
            return await run.run(self._start, self._admission)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise PipelineClosedError("the query was stopped before its end: its pipeline was closed") from None

    def _forget_query(self, task: "asyncio.Task[Answer]") -> None:
        self._queries.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved; the stream raises it, unless it was dropped

    async def _start_parts(self) -> None:
        self._parts = await start_all(self._owned, self._on_progress)


def _succeeded(task: "asyncio.Task[None]") -> bool:
    return not task.cancelled() and task.exception() is None


def _check_part(part: object, name: str, method: str) -> None:
    """Raise ConfigurationError if a part is a class, or has no such method."""
    if isinstance(part, type):
        raise ConfigurationError(f"the {name} is the class {part.__name__}, and must be an object of it")
    if not callable(getattr(part, method, None)):
        raise ConfigurationError(f"the {name} is {type_name(part)}, and has no method {method!r}")
