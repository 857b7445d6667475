"""The service behind all protocols: admits queries, answers them with one pipeline, and drains them when it stops."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import anyio.to_thread

from streamrag.backends.tools.parser import ToolCallParser
from streamrag.core import Backend, Mode, ModelInfo, Progress, SamplingParams, Source, SourceEvent, Turn
from streamrag.core.lifecycle import start_all
from streamrag.errors import PipelineClosedError
from streamrag.modes import PromptTemplate
from streamrag.open_questions import OpenQuestion, QueriesAhead
from streamrag.pipeline import Pipeline
from streamrag.query.answer_stream import OnEvent
from streamrag.query.options import QueryOptions
from streamrag.serve.admission import Admission
from streamrag.serve.connections.fair_share import FairShare
from streamrag.serve.engine_watch import EngineWatch, RestartBudget, ServerCheck
from streamrag.serve.failed_requests import FailedRequests
from streamrag.serve.limits import Limits
from streamrag.serve.observe.observer import Interface, Observer, Observers, ServedQuery
from streamrag.serve.open_queries import Caller, OpenQueries
from streamrag.serve.request_fields import IgnoredFields
from streamrag.support.tasks import cancel_and_wait, run_shielded
from streamrag.telemetry import QueryEvent

STOPPING = "the service is stopping"


class NoSource:
    """An empty source, for a service whose clients bring their own context."""

    name = "no source"

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        return
        yield


class PipelineOptions(TypedDict, total=False):
    """The options of a service's pipelines; for their meanings and defaults see `Pipeline`."""

    mode: Mode | None
    overlap: bool | Literal["auto"]
    answer_ahead: bool
    on_source_error: Literal["raise", "answer"]


class Service:
    """A backend and a source that answer the queries of many clients. Starts and closes both.

    source: retrieval for queries that bring no context; None if all of them do.
    template: the words around the context.
    limits: bounds on the requests of clients.
    params: default sampling parameters.
    max_context_tokens: default bound on the tokens of context.
    observers: are notified of every query.
    model_name: the model's name for clients; by default the last part of the backend's name.
    session_log_dir: folder for the text of sessions, from which a restarted service resumes them.
    restarts: how often a dead engine is restarted, with an exponential backoff. Once that is spent, or without it,
        `dead` is set.
    tool_parser: finds calls of tools in answers; without it, requests with tools are refused.
    ignores_tools: whether requests with tools are answered as if they had none.
    base_url: address of the source's documents, for citations of those that are no addresses themselves.
    pipeline_options: see `PipelineOptions`.

    :raises ConfigurationError: invalid options.
    """

    def __init__(
        self,
        backend: Backend,
        source: Source | None = None,
        *,
        template: PromptTemplate | None = None,
        limits: Limits | None = None,
        params: SamplingParams | None = None,
        max_context_tokens: int | None = None,
        observers: Sequence[Observer] = (),
        model_name: str | None = None,
        session_log_dir: Path | None = None,
        restarts: RestartBudget | None = None,
        tool_parser: ToolCallParser | None = None,
        ignores_tools: bool = False,
        base_url: str | None = None,
        **pipeline_options: Unpack[PipelineOptions],
    ) -> None:
        self.backend = backend
        self.source = source
        self.limits = limits or Limits()
        self.params = params or SamplingParams()
        self.observers = tuple(observers)
        self.session_log_dir = session_log_dir
        self.tool_parser = tool_parser
        self.ignores_tools = ignores_tools
        self.base_url = base_url
        self.ignored_fields = IgnoredFields()
        self.started_s = time.monotonic()
        self.share = FairShare()
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Callbacks that close what outlives single queries; called by `aclose`, before the engine is closed."""
        self.admission = Admission(self.limits)
        notified = Observers(self.observers)
        self.failed_requests = FailedRequests(notified)
        self._queries = OpenQueries(self.admission, notified)
        self.open = self._queries.open
        """Admits one query and holds its place for an `async with` block; see `OpenQueries.open`."""
        self.server_check = ServerCheck(backend)
        self._engine = EngineWatch(backend, restarts or RestartBudget(0), self._queries)
        self._watch_task: asyncio.Task[None] | None = None
        self._has_aborted = False
        self._model_name = model_name
        self._options: QueryOptions = {} if max_context_tokens is None else {"max_context_tokens": max_context_tokens}
        self.template = template or PromptTemplate()
        self._pipeline_options = pipeline_options
        self._pipeline = self._make_pipeline(NoSource() if source is None else source)
        self._progress: Progress = lambda line: None
        self._started = AsyncExitStack()

    @property
    def model(self) -> ModelInfo:
        """The model; available once the service has started."""
        return self.backend.model

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self._model_name or self.model.name.rstrip("/").rpartition("/")[2]

    @property
    def chat_name(self) -> str:
        """The name by which the model answers from the conversation alone, without retrieval."""
        return f"{self.model_name}-chat"

    @property
    def model_names(self) -> tuple[str, str]:
        """The names of the model: with retrieval, and without."""
        return self.model_name, self.chat_name

    def system_text(self, client_text: str) -> str:
        """Return the service's own system text, which explains citations, if it has one, followed by the client's."""
        return f"{self.template.system}\n\n{client_text}" if self.template.system else client_text

    @property
    def chat_template(self) -> str:
        """The model's chat template; empty if it is unknown here."""
        tokenizer = self.model.tokenizer
        whole = getattr(getattr(tokenizer, "tokenizer", tokenizer), "whole", None)
        return str(getattr(whole, "chat_template", None) or "")

    @property
    def is_ready(self) -> bool:
        """Whether queries are admitted, if there is room."""
        return self._watch_task is not None and self.admission.is_ready and not self.admission.is_draining

    @property
    def not_ready(self) -> str:
        """The reason why no queries are admitted; empty if they are."""
        if self.is_ready:
            return ""
        return STOPPING if self.admission.is_draining else self._engine.restarting or "the engine is not running"

    @property
    def dead(self) -> asyncio.Event:
        """An event that is set when the engine has died and will not be restarted."""
        return self._engine.given_up

    @property
    def num_restarts(self) -> int:
        """Number of restarts of a dead engine."""
        return self._engine.num_restarts

    @property
    def queries_ahead(self) -> QueriesAhead | None:
        """The counts of queries for questions that are still being asked; None before the first of these."""
        return self._pipeline.queries_ahead

    @property
    def queries(self) -> list[ServedQuery]:
        """The open queries, oldest first."""
        return [each.query for each in self._queries]

    async def start(self, progress: Progress = lambda line: None) -> None:
        """Start the engine, the source and the task that watches the engine, and load the tool parser, if there is one.

        :raises ConfigurationError, BackendError: one of them fails to start; the service is closed again.
        """
        self._progress = progress
        try:
            self._started = await start_all([self.backend], progress)
            await self._pipeline.start()
            if self.tool_parser is not None:
                await anyio.to_thread.run_sync(self.tool_parser.load, self.model.tokenizer)
        except BaseException:
            await self.aclose()
            raise
        self._watch_task = asyncio.create_task(self._engine.run(progress), name="streamrag watches its engine")

    async def aclose(self, *, drain_s: float = 0.0) -> bool:
        """Reject new queries, drain the open ones for up to `drain_s` seconds, abort the rest, and stop everything.

        Questions that are still being asked are ended at once. The drain ends early if the engine is dead. Returns
        whether no other query was aborted. A second call, without `drain_s`, aborts the open queries while the first
        one drains.
        """
        self.admission.is_draining = True
        for each in self._queries:
            if not each.is_asked:
                each.abort(PipelineClosedError(STOPPING))
        waits = [asyncio.create_task(event.wait()) for event in (self._queries.is_empty, self.dead)]
        try:
            await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await run_shielded(self._close(), "streamrag service closes")
        return not self._has_aborted

    async def _close(self) -> None:
        """Stop the watch, abort open queries, call each of `closers` once, and close the pipeline and the engine.

        First sets `dead` if the engine has died since the last health check and is not being restarted.
        """
        if self._watch_task is not None:
            if not self._engine.restarting and self._engine.death():  # may have died since the last health check
                self.dead.set()
            await cancel_and_wait([self._watch_task])
        for each in self._queries:
            self._has_aborted |= each.is_asked
            each.abort(PipelineClosedError(STOPPING))
        while self.closers:  # a second call may run concurrently
            await self.closers.pop(0)()
        await self._pipeline.aclose()
        await self._started.aclose()

    def cap_params(self, given: SamplingParams) -> SamplingParams:
        """Return `given` with `max_tokens` capped at the service's limit, and with `n=1`: one answer."""
        return replace(given, max_tokens=min(given.max_tokens, self.limits.max_tokens), n=1)

    @asynccontextmanager
    async def events(
        self,
        caller: Caller,
        interface: Interface,
        text: str,
        *,
        source: Source | None = None,
        **options: Unpack[QueryOptions],
    ) -> AsyncIterator[AsyncIterator[QueryEvent]]:
        """Answer `text` with the service's retrieval, or with `source`. Use as `async with`; gives an event iterator.

        Takes the options of `Pipeline.stream`; missing ones are the service's. The limits cap `max_tokens`, and
        `deadline_s`, with `source` at `stream_s`; `n` is 1. Invalid options raise before the query is admitted. Each
        event is reported to admission and to the observers before it is given. `source` is not started or closed here.

        :raises NotAdmittedError: the query is not admitted.
        :raises StreamRagError: as `Pipeline.stream` does.
        """
        params = self.cap_params(options.get("params", self.params))
        max_s = self.limits.deadline_s if source is None else self.limits.stream_s
        deadline_s = min(options.get("deadline_s", max_s), max_s)
        conversation_id = conversation_of(caller, options.get("history", ()), text)
        effective: Any = {**self._options, **options, "params": params, "deadline_s": deadline_s}
        effective["conversation_id"] = conversation_id
        async with AsyncExitStack() as stack:
            pipeline = self._pipeline
            if source is not None:
                pipeline = self._make_pipeline(source)
                stack.push_async_callback(pipeline.aclose)
            stream = pipeline.events(text, **effective)  # validates the options before the query takes a place
            place = self.open(caller, interface, text, max_tokens=params.max_tokens)
            opened = await stack.enter_async_context(place)
            yield await stack.enter_async_context(stream.observe(opened.note))

    @asynccontextmanager
    async def listen(
        self, caller: Caller, text: str, on_event: OnEvent, options: QueryOptions
    ) -> AsyncIterator[OpenQuestion]:
        """Admit a question that is still being asked, `text` so far, as one query while the block runs, and give it.

        Each event of its queries is charged when it occurs, and then `on_event` is called with it. The observers get
        the events of the answer's query only. `deadline_s` of the options is left to the caller.

        :raises NotAdmittedError: the question is not admitted.
        :raises StreamRagError: as `Pipeline.stream` does.
        """
        params = self.cap_params(options.get("params", self.params))
        conversation_id = conversation_of(caller, options.get("history", ()), text)
        effective: Any = {**self._options, **options, "params": params, "conversation_id": conversation_id}
        effective.pop("deadline_s", None)

        def note(event: QueryEvent) -> None:  # is called within the block below
            opened.note(event)
            on_event(event)

        most = self.limits.max_retrievals_ahead
        question = self._pipeline.listen(max_retrievals=most, on_event=note, **effective)
        place = self.open(caller, "listen", text, max_tokens=params.max_tokens, question=question)
        async with place as opened, question:
            yield question

    def _make_pipeline(self, source: Source) -> Pipeline:
        """Return a pipeline with the service's options and backend, which owns only the service's own source."""
        return Pipeline(
            source,
            self.backend,
            owns_source=source is self.source,
            owns_backend=False,
            template=self.template,
            max_concurrent_queries=self.limits.max_queries,
            on_progress=lambda line: self._progress(line),
            **self._pipeline_options,
        )


def conversation_of(caller: Caller, turns: Sequence[Turn], question: str) -> str:
    """Return an id that all turns of a client's conversation share: a hash of its first question, which reveals nothing
    of the text. Without a user's turn, `question` is the first."""
    first = next((turn.text for turn in turns if turn.role == "user"), question)
    return blake2b(f"{caller.client}\n{first}".encode(errors="replace"), digest_size=16).hexdigest()
