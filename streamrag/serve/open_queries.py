"""The open queries of a service: admitted, shown to observers, and aborted when the service or its engine ends."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import anyio

from streamrag.core.trace_context import conversation, conversation_of
from streamrag.errors import DeadlineExceededError, EngineDeadError, StreamRagError
from streamrag.serve.admission import Admission, Place
from streamrag.serve.connections.fair_share import Account, FairShare
from streamrag.serve.failures import RefusedError, failure_of
from streamrag.serve.observe.observer import Interface, Observer, Outcome, ServedQuery, current_query
from streamrag.telemetry import Answer, Answered, Event


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that sent a request, and the request's identity."""

    id: str
    client: str
    traceparent: str | None = None
    tracestate: str | None = None
    has_key: Callable[[], bool] = lambda: True
    """Whether the client's key is still valid, for requests that last: keys may be read again meanwhile."""
    account: Account = field(default_factory=lambda: Account(FairShare()), repr=False, compare=False)
    """The account of all open requests of the client. Without keys there is one for everybody."""


@dataclass(slots=True, eq=False)
class OpenQuery:
    """A query that was admitted; made by `Service.open`."""

    query: ServedQuery
    place: Place
    observer: Observer
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    answer: Answer | None = None
    is_answered: bool = False
    """To be set by code that has no `Answered` to pass on."""
    aborted_by: StreamRagError | None = None
    """The reason why the service cancelled it."""

    def abort(self, error: StreamRagError) -> None:
        """Cancel the query; its block raises `error`, or that of an earlier call."""
        self.aborted_by = self.aborted_by or error
        self.scope.cancel()

    def note(self, event: Event) -> None:
        """Pass an event on to the observers and to admission."""
        self.place.follow(event)
        if isinstance(event, Answered):
            self.answer, self.is_answered = event.answer, True
        self.observer.query_event(self.query, event)

    async def noted(self, events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
        """Yield `events`, each noted before it is passed on."""
        async for event in events:
            self.note(event)
            yield event

    def outcome(self, error: BaseException | None) -> Outcome:
        """Return how the query ended, given the error that its block raised."""
        if self.is_answered:
            return "answered"
        if error is None or isinstance(error, asyncio.CancelledError | GeneratorExit):
            return "left"
        return failure_of(error).outcome


class Claim(TypedDict, total=False):
    """A claim of a query on a service."""

    max_tokens: int
    """Most tokens of its answer; 0 by default."""
    num_prompt_tokens: int | None
    """Tokens of its prompt, if they are known."""
    deadline_s: float | None
    """Seconds after which its block is cancelled; a pipeline has a deadline of its own."""
    first_question: str | None
    """The first question of its conversation, if that is another: it leads to the engine that has earlier turns."""


class OpenQueries:
    """All open queries of a service, oldest first."""

    def __init__(self, admission: Admission, observer: Observer) -> None:
        self._admission = admission
        self._observer = observer
        self._open: dict[OpenQuery, None] = {}
        self.is_empty = asyncio.Event()
        """Set while no query is open."""
        self.is_empty.set()

    def __iter__(self) -> Iterator[OpenQuery]:
        return iter(list(self._open))

    @asynccontextmanager
    async def open(
        self, caller: Caller, interface: Interface, text: str, **claim: Unpack[Claim]
    ) -> AsyncIterator[OpenQuery]:
        """Claim a place for one query; it ends with the block, which raises what ended it.

        :raises RefusedError: there is no place for it.
        :raises PipelineClosedError: the service was stopped meanwhile.
        :raises DeadlineExceededError: it took too long.
        """
        deadline_s = claim.get("deadline_s")
        place = self._enter(caller.client, interface, claim)
        query = ServedQuery(
            caller.id, interface, caller.client, time.monotonic(), text, caller.traceparent, caller.tracestate
        )
        opened = OpenQuery(query, place, self._observer)
        if deadline_s is not None:
            opened.scope.deadline = anyio.current_time() + deadline_s
        self._open[opened] = None
        self.is_empty.clear()
        error: BaseException | None = None
        try:
            with _current(query, conversation_of(caller.client, claim.get("first_question") or text)):
                self._observer.query_started(query)
                with opened.scope:
                    yield opened
                if opened.scope.cancelled_caught:
                    if opened.aborted_by is not None:
                        raise opened.aborted_by
                    raise DeadlineExceededError(f"the query's deadline of {deadline_s:g} s passed")
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(opened, error)

    # How the watch over the engine uses them; see `engine_watch.Guarded`.

    @property
    def wants_engine(self) -> bool:
        """Whether a dead engine is worth starting again."""
        return not self._admission.is_draining

    def engine_died(self, error: EngineDeadError) -> None:
        """Admit no queries, and abort those that need the engine, also those that it has left without an error."""
        self._admission.is_ready = False
        for each in self:
            if each.query.interface != "retrieve":
                each.abort(EngineDeadError(str(error)))

    def engine_restarted(self) -> None:
        """Admit queries again, which the new engine answers."""
        self._admission.is_ready = True

    def _enter(self, client: str, interface: Interface, claim: Claim) -> Place:
        try:
            return self._admission.enter(
                client, max_tokens=claim.get("max_tokens", 0), num_prompt_tokens=claim.get("num_prompt_tokens")
            )
        except RefusedError as error:
            self._observer.query_refused(client, interface, error.why)
            raise

    def _end(self, opened: OpenQuery, error: BaseException | None) -> None:
        del self._open[opened]
        if not self._open:
            self.is_empty.set()
        self._admission.leave(opened.place, stayed_s=opened.query.age_s)
        self._observer.query_ended(opened.query, opened.outcome(error), opened.answer, error)


@contextmanager
def _current(query: ServedQuery, name: str) -> Iterator[None]:
    """Set the query and its conversation's name for the tasks that work for it."""
    tokens = current_query.set(query), conversation.set(name)
    try:
        yield
    finally:
        conversation.reset(tokens[1])
        current_query.reset(tokens[0])
