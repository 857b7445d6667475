"""The service behind all protocols: it admits queries, answers them with one pipeline, and stops in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

from streamrag.core import Backend, Mode, ModelInfo, Progress, SamplingParams, Source, SourceEvent, Turn
from streamrag.core.lifecycle import start_all
from streamrag.errors import PipelineClosedError
from streamrag.modes import PromptTemplate
from streamrag.pipeline import Pipeline
from streamrag.query.options import QueryOptions
from streamrag.serve.admission import Admission
from streamrag.serve.connections.fair_share import FairShare
from streamrag.serve.engine_watch import EngineWatch, Restarts
from streamrag.serve.limits import Limits
from streamrag.serve.observe.observer import Interface, Observer, Observers, ServedQuery
from streamrag.serve.open_queries import Caller, Claim, OpenQueries, OpenQuery
from streamrag.support.tasks import cancel_regardless, run_regardless
from streamrag.telemetry import Event

STOPPING = "the service is stopping"

OnEngineDeath: TypeAlias = Literal["exit", "restart"]


class NoSource:
    """The retrieval of a service that has none: its clients bring their own context."""

    name = "no source"

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Yield no events at all."""
        return
        yield


class Service:
    """A backend and a source that answer the queries of many clients. Starts and closes both.

    source: retrieval for queries that bring no context; None if all do.
    mode, template, overlap, on_source_error: as of `Pipeline`.
    limits: what clients may do at once.
    params: how answers are sampled where a client does not say.
    max_context_tokens: most tokens of context where a client does not say.
    observers: are notified of every query.
    model_name: as clients name it; by default the last part of the backend's name.
    session_log_dir: keeps the text of sessions there, so that a service that is started again resumes them.
    on_engine_death: "restart" starts the engine again, "exit" leaves it: `dead` is set then.
    max_restarts, restart_window_s: how often it is started again within so many seconds, each time after a longer wait;
        then `dead` is set too.

    :raises ConfigurationError: values that cannot work.
    """

    _has_aborted = False
    _watching: "asyncio.Task[None] | None" = None

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
        self.source = source
        self.limits = limits or Limits()
        self.params = params or SamplingParams()
        self.observers = tuple(observers)
        self.session_log_dir = session_log_dir
        self.started_s = time.monotonic()
        self.share = FairShare()
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Called when the service is closed, before its engine is: for what lives longer than a query."""
        self.admission = Admission(self.limits)
        self._open = OpenQueries(self.admission, Observers(self.observers))
        restarts = Restarts(max_restarts if on_engine_death == "restart" else 0, restart_window_s)
        self._engine = EngineWatch(backend, restarts, self._open)
        self._model_name = model_name
        self._options: QueryOptions = {} if max_context_tokens is None else {"max_context_tokens": max_context_tokens}
        self._template = template or PromptTemplate()
        self._pipeline_options: dict[str, Any] = {"mode": mode, "overlap": overlap, "on_source_error": on_source_error}
        self._pipeline = self._make_pipeline(NoSource() if source is None else source)
        self._progress: Progress = lambda line: None
        self._started = AsyncExitStack()

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def model(self) -> ModelInfo:
        """The model; available once the service has started."""
        return self.backend.model

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self._model_name or self.model.name.rstrip("/").rpartition("/")[2]

    def system_text(self, given: str) -> str:
        """Return the service's own system text, which says how to cite, followed by that of a client."""
        return f"{self._template.system}\n\n{given}" if self._template.system else given

    @property
    def is_ready(self) -> bool:
        """Whether queries are admitted, if there is room."""
        return self._watching is not None and self.admission.is_ready and not self.admission.is_draining

    @property
    def not_ready(self) -> str:
        """The reason why no queries are admitted, for people; empty if they are."""
        if self.is_ready:
            return ""
        return STOPPING if self.admission.is_draining else self._engine.restarting or "the engine does not run"

    @property
    def dead(self) -> asyncio.Event:
        """An event that is set when the engine has died and will not be started again."""
        return self._engine.given_up

    @property
    def num_restarts(self) -> int:
        """Number of times that a dead engine was started again."""
        return self._engine.num_restarts

    @property
    def queries(self) -> list[ServedQuery]:
        """The open queries, oldest first."""
        return [each.query for each in self._open]

    # ------------------------------------------------------------------------------------------- starting and stopping

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

        Return whether all that were open ended by themselves. A second call meanwhile aborts them at once.
        """
        self.admission.is_draining = True
        waits = [asyncio.create_task(event.wait()) for event in (self._open.is_empty, self.dead)]
        try:
            await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await run_regardless(self._close(), "streamrag service closes")
        return not self._has_aborted

    async def _close(self) -> None:
        if self._watching is not None:
            if not self._engine.restarting and self._engine.death():  # its queries may have ended before it was seen
                self.dead.set()
            await cancel_regardless([self._watching])
        for each in self._open:
            self._has_aborted = True
            each.abort(PipelineClosedError(STOPPING))
        while self.closers:  # a second call may come meanwhile
            await self.closers.pop(0)()
        await self._pipeline.aclose()
        await self._started.aclose()

    # ------------------------------------------------------------------------------------------------------- answering

    def answering(self, given: SamplingParams) -> SamplingParams:
        """Return `given` with as many tokens at most as the service allows."""
        return replace(given, max_tokens=min(given.max_tokens, self.limits.max_tokens))

    def open(
        self, caller: Caller, interface: Interface, text: str, **claim: Unpack[Claim]
    ) -> AbstractAsyncContextManager[OpenQuery]:
        """Claim a place for one query; see `OpenQueries.open`."""
        return self._open.open(caller, interface, text, **claim)

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
        """Answer `text` from the service's retrieval, or from `source`; the block has an iterator of all events.

        Options as of `Pipeline.stream`; answers and deadlines are bounded by the limits.

        :raises RefusedError: there is no place for it.
        :raises StreamRagError: as `Pipeline.stream` does.
        """
        params = self.answering(options.get("params", self.params))
        most_s = self.limits.deadline_s if source is None else self.limits.stream_s
        deadline_s = min(options.get("deadline_s", most_s), most_s)
        effective: Any = {**self._options, **options, "params": params, "deadline_s": deadline_s}
        async with AsyncExitStack() as ends:
            pipeline = self._pipeline
            if source is not None:
                pipeline = self._make_pipeline(source)
                ends.push_async_callback(pipeline.aclose)
            handle = pipeline.events(text, **effective)  # raises for what cannot work, before it takes a place
            first = first_question(options.get("history", ()))
            place = self.open(caller, interface, text, max_tokens=params.max_tokens, first_question=first)
            opened = await ends.enter_async_context(place)
            events = await ends.enter_async_context(handle)
            yield await ends.enter_async_context(aclosing(opened.noted(events)))

    def _make_pipeline(self, source: Source) -> Pipeline:
        return Pipeline(
            source,
            self.backend,
            owns_source=source is self.source,
            owns_backend=False,
            template=self._template,
            max_concurrent_queries=self.limits.max_queries,
            on_progress=lambda line: self._progress(line),
            **self._pipeline_options,
        )


def first_question(turns: Sequence[Turn]) -> str | None:
    """Return the first question of a conversation; None if it has none."""
    return next((turn.text for turn in turns if turn.role == "user"), None)
