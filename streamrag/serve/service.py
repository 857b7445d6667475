"""What a service does, whatever it is spoken to in: it admits queries, has them answered, and stops in order."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import anyio

from streamrag.asked import QueryOptions
from streamrag.core import (
    Backend,
    Mode,
    ModelInfo,
    Progress,
    SamplingParams,
    Source,
    SourceEvent,
    Turn,
)
from streamrag.errors import DeadlineExceededError, EngineDeadError, PipelineClosedError, StreamRagError
from streamrag.modes import PromptTemplate
from streamrag.pipeline import Pipeline
from streamrag.propagation import conversation, conversation_of
from streamrag.serve.admission import Admission, Place
from streamrag.serve.engine_watch import EngineWatch, Restarts
from streamrag.serve.failures import RefusedError, failure_of
from streamrag.serve.fair_share import FairShare
from streamrag.serve.limits import Limits
from streamrag.serve.observing import AllOf, Interface, Observer, Outcome, ServedQuery, current_query
from streamrag.starting import start_all
from streamrag.support.tasks import cancel_regardless, run_regardless
from streamrag.telemetry import Answer, Answered, Event

STOPPING = "the service is stopping"

OnEngineDeath: TypeAlias = Literal["exit", "restart"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and in which request."""

    id: str
    client: str
    traceparent: str | None = None
    tracestate: str | None = None
    has_key: Callable[[], bool] = lambda: True
    """Whether its key still counts, for what lasts long: keys may be read anew meanwhile."""


class NoSource:
    """The retrieval of a service that has none: its clients bring their own context."""

    name = "no source"

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Nothing."""
        return
        yield


@dataclass(slots=True, eq=False)
class OpenQuery:
    """A query that was admitted; made by `Service.open`."""

    query: ServedQuery
    place: Place
    observer: Observer
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    answer: Answer | None = None
    is_answered: bool = False
    """To be set by whoever has no `Answered` to pass on."""
    aborted_by: StreamRagError | None = None
    """Why the service cancelled it."""

    def abort(self, error: StreamRagError) -> None:
        """End it; its block raises `error`, or that of an earlier call."""
        self.aborted_by = self.aborted_by or error
        self.scope.cancel()

    def note(self, event: Event) -> None:
        """Tell the observers, and the books of admission, what happened."""
        self.place.follow(event)
        if isinstance(event, Answered):
            self.answer, self.is_answered = event.answer, True
        self.observer.query_event(self.query, event)

    async def noted(self, events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
        """The same events, each noted before it is passed on."""
        async for event in events:
            self.note(event)
            yield event


class Service:
    """One backend, one source, and everybody who asks them. Starts and closes both.

    source: retrieval for queries that bring no context; None if all do.
    mode, template, overlap, on_source_error: as of `Pipeline`.
    limits: what clients may do at once.
    params: how answers are sampled where a client does not say.
    max_context_tokens: most tokens of context where a client does not say.
    observers: told of every query.
    model_name: as clients name it; by default the last part of the backend's name.
    session_log_dir: keeps the text of sessions there, so that a service that is started again resumes them.
    on_engine_death: "restart" starts the engine again, "exit" leaves it: `dead` is set then.
    max_restarts, restart_window_s: how often it is started again within so many seconds, each time after a longer wait;
        then `dead` is set too.

    :raises ConfigurationError: values that cannot work.
    """

    def __init__(
        self,
        backend: Backend,
        source: Source | None = None,
        *,
        mode: Mode | None = None,
        template: PromptTemplate | None = None,
        overlap: bool = True,
        on_source_error: Literal["raise", "answer"] = "raise",
        limits: Limits | None = None,
        params: SamplingParams | None = None,
        max_context_tokens: int | None = None,
        observers: Sequence[Observer] = (),
        model_name: str | None = None,
        session_log_dir: Path | None = None,
        on_engine_death: OnEngineDeath = "exit",
        max_restarts: int = 5,
        restart_window_s: float = 3600.0,
    ) -> None:
        self.backend = backend
        self.session_log_dir = session_log_dir
        self.source = source
        self.limits = limits or Limits()
        self.params = params or SamplingParams()
        self._options: QueryOptions = {} if max_context_tokens is None else {"max_context_tokens": max_context_tokens}
        self.observers = tuple(observers)
        self._observer = AllOf(self.observers)
        self.admission = Admission(self.limits)
        self.started_s = time.monotonic()
        self.share = FairShare()
        self._engine = EngineWatch(
            backend,
            Restarts(max_restarts if on_engine_death == "restart" else 0, restart_window_s),
            on_death=self._engine_died,
            on_life=self._engine_lives,
            is_wanted=lambda: not self.admission.is_draining,
        )
        self._template = template or PromptTemplate()
        self._model_name = model_name
        self._make_pipeline: Callable[[Source], Pipeline] = lambda source: Pipeline(
            source,
            backend,
            owns_source=source is self.source,
            owns_backend=False,
            mode=mode,
            template=self._template,
            overlap=overlap,
            on_source_error=on_source_error,
            max_concurrent_queries=self.limits.max_queries,
            on_progress=lambda line: self._progress(line),
        )
        self._pipeline = self._make_pipeline(NoSource() if source is None else source)
        self._progress: Progress = lambda line: None
        self._started = AsyncExitStack()
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Called when the service is closed, before its engine is: for what lives longer than a query."""
        self._open: dict[OpenQuery, None] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._has_aborted = False
        self._watching: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------- starting and stopping

    @property
    def model(self) -> ModelInfo:
        """The model; available once the service has started."""
        return self.backend.model

    @property
    def model_name(self) -> str:
        """As clients name it."""
        return self._model_name or self.model.name.rstrip("/").rpartition("/")[2]

    def system_text(self, given: str) -> str:
        """The service's own system text, which says how to cite, and behind it that of a client."""
        return f"{self._template.system}\n\n{given}" if self._template.system else given

    @property
    def is_ready(self) -> bool:
        """Whether queries are admitted, if there is room."""
        return self._watching is not None and self.admission.is_ready and not self.admission.is_draining

    @property
    def not_ready(self) -> str:
        """Why none are, for people; nothing if they are."""
        if self.is_ready:
            return ""
        return STOPPING if self.admission.is_draining else self._engine.restarting or "the engine does not run"

    @property
    def dead(self) -> asyncio.Event:
        """Set when the engine has died and will not be started again."""
        return self._engine.given_up

    @property
    def num_restarts(self) -> int:
        """Times that a dead engine was started again."""
        return self._engine.num_restarts

    @property
    def queries(self) -> list[ServedQuery]:
        """Those that are open, oldest first."""
        return [each.query for each in self._open]

    async def start(self, progress: Progress = lambda line: None) -> None:
        """Start engine and source.

        :raises ConfigurationError, BackendError: one of them cannot; nothing is left running.
        """
        self._progress = progress
        try:
            self._started = await start_all([self.backend], progress)
            await self._pipeline.start()
        except BaseException:
            await self.aclose()
            raise
        self._watching = asyncio.create_task(self._engine.run(progress), name="streamrag watches its engine")

    async def aclose(self, *, drain_s: float = 0.0) -> bool:
        """Refuse new queries, let the open ones go on for up to `drain_s` seconds, abort the rest, stop all.

        Whether all that were open came to their end by themselves. A second call meanwhile aborts them at once.
        """
        self.admission.is_draining = True
        waits = [asyncio.create_task(event.wait()) for event in (self._empty, self.dead)]
        try:
            await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await run_regardless(self._close(), "streamrag service closes")
        return not self._has_aborted

    async def _close(self) -> None:
        if self._watching is not None:
            if not self._engine.restarting and self._engine.death():  # its queries may have ended before anybody looked
                self.dead.set()
            await cancel_regardless([self._watching])
        self._has_aborted = self._has_aborted or bool(self._open)
        for each in list(self._open):
            each.abort(PipelineClosedError(STOPPING))
        while self.closers:  # a second call may come meanwhile
            await self.closers.pop(0)()
        await self._pipeline.aclose()
        await self._started.aclose()

    def _engine_died(self, error: EngineDeadError) -> None:
        self.admission.is_ready = False
        for each in list(self._open):  # also those that the engine has left without a word
            if each.query.interface != "retrieve":
                each.abort(EngineDeadError(str(error)))

    def _engine_lives(self) -> None:
        self.admission.is_ready = True

    # ------------------------------------------------------------------------------------------------------- answering

    def answering(self, given: SamplingParams) -> SamplingParams:
        """`given`, with as many tokens at most as the service allows."""
        return replace(given, max_tokens=min(given.max_tokens, self.limits.max_tokens))

    @asynccontextmanager
    async def open(
        self,
        caller: Caller,
        interface: Interface,
        text: str,
        *,
        max_tokens: int = 0,
        num_prompt_tokens: int | None = None,
        deadline_s: float | None = None,
        first_question: str | None = None,
    ) -> AsyncIterator[OpenQuery]:
        """A place for one query; it ends with the block, which raises what ended it.

        `max_tokens` and `num_prompt_tokens` are what it claims of the engine. With `deadline_s` the block is cancelled
        after so many seconds; a pipeline has a deadline of its own. `first_question` is the conversation's, if that is
        not `text`: by it the engine is found that has computed the turns before.

        :raises RefusedError: there is no place for it.
        :raises PipelineClosedError: the service was stopped meanwhile.
        :raises DeadlineExceededError: it took too long.
        """
        try:
            place = self.admission.enter(caller.client, max_tokens=max_tokens, num_prompt_tokens=num_prompt_tokens)
        except RefusedError as error:
            self._observer.query_refused(caller.client, interface, error.why)
            raise
        began_s = time.monotonic()
        query = ServedQuery(caller.id, interface, caller.client, began_s, text, caller.traceparent, caller.tracestate)
        opened = OpenQuery(query, place, self._observer)
        opened.scope.deadline = anyio.current_time() + deadline_s if deadline_s is not None else float("inf")
        self._open[opened] = None
        self._empty.clear()
        ended_by: BaseException | None = None
        token = current_query.set(query)
        of_conversation = conversation.set(conversation_of(caller.client, first_question or text))
        try:
            self._observer.query_started(query)
            with opened.scope:
                yield opened
            if opened.scope.cancelled_caught:
                if opened.aborted_by is not None:
                    raise opened.aborted_by
                raise DeadlineExceededError(f"the query's deadline of {deadline_s:g} s passed")
        except BaseException as raised:
            ended_by = raised
            raise
        finally:
            conversation.reset(of_conversation)
            current_query.reset(token)
            del self._open[opened]
            if not self._open:
                self._empty.set()
            self.admission.leave(place, stayed_s=time.monotonic() - began_s)
            self._observer.query_ended(query, _outcome(opened, ended_by), opened.answer, ended_by)

    @asynccontextmanager
    async def events(
        self,
        caller: Caller,
        interface: Interface,
        text: str,
        *,
        source: Source | None = None,
        **options: Unpack[QueryOptions],
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Everything that happens while `text` is answered, from the service's retrieval or from `source`.

        Options as of `Pipeline.stream`; answers and deadlines are bounded by the limits.

        :raises RefusedError: there is no place for it.
        :raises StreamRagError: as `Pipeline.stream` does.
        """
        params = self.answering(options.get("params", self.params))
        most_s = self.limits.deadline_s if source is None else self.limits.stream_s
        deadline_s = min(options.get("deadline_s", most_s), most_s)
        asked: Any = {**self._options, **options, "params": params, "deadline_s": deadline_s}
        async with AsyncExitStack() as ends:
            pipeline = self._pipeline
            if source is not None:
                pipeline = self._make_pipeline(source)
                ends.push_async_callback(pipeline.aclose)
            handle = pipeline.events(text, **asked)  # raises for what cannot work, before it takes a place
            place = self.open(
                caller,
                interface,
                text,
                max_tokens=params.max_tokens,
                first_question=first_question(options.get("history", ())),
            )
            opened = await ends.enter_async_context(place)
            events = await ends.enter_async_context(handle)
            yield await ends.enter_async_context(aclosing(opened.noted(events)))


def first_question(turns: Sequence[Turn]) -> str | None:
    """Of a conversation; None if nobody has asked in it."""
    return next((turn.text for turn in turns if turn.role == "user"), None)


def _outcome(opened: OpenQuery, error: BaseException | None) -> Outcome:
    if opened.is_answered:
        return "answered"
    if error is None or isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "left"
    return failure_of(error).outcome
