"""The open queries of a service: admitted, reported to observers, and aborted when the service or its engine ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from streamrag.errors import DeadlineExceededError, EngineDeadError, StreamRagError
from streamrag.open_questions import OpenQuestion
from streamrag.serve.admission import Admission, Reservation
from streamrag.serve.connections.fair_share import Account, FairShare
from streamrag.serve.failures import NotAdmittedError, failure_of
from streamrag.serve.observe.observer import Interface, Observer, QueryOutcome, ServedQuery, current_query
from streamrag.telemetry import Answer, Answered, QueryEvent, RetrievalStarted


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that sent a request, and the request's identity."""

    id: str
    client: str
    traceparent: str | None = None
    tracestate: str | None = None
    has_key: Callable[[], bool] = lambda: True
    """Whether the client's key is still valid: keys may be reloaded during a long request."""
    account: Account = field(default_factory=lambda: Account(FairShare()), repr=False, compare=False)
    """The client's account of the time to parse its large bodies and frames. Without keys, all clients share one."""
    turns: Account = field(default_factory=lambda: Account(FairShare()), repr=False, compare=False)
    """The same of the time that each of its requests and frames takes, however small."""


@dataclass(slots=True, eq=False)
class OpenQuery:
    """An admitted query; made by `Service.open`."""

    query: ServedQuery
    place: Reservation
    observer: Observer
    question: OpenQuestion | None = None  # None if it was whole from the start
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    answer: Answer | None = None
    is_answered: bool = False
    """Whether it ended well. `note` sets it for `Answered`; code without such an event must set it."""
    aborted_by: StreamRagError | None = None  # the reason why the service cancelled it
    _unreported: list[QueryEvent] = field(default_factory=list)  # of the newest query of a question not yet committed

    @property
    def is_asked(self) -> bool:
        """Whether its question is whole, and not still being asked."""
        return self.question is None or self.question.is_committed

    def abort(self, error: StreamRagError) -> None:
        """Cancel the query. The block of `open` raises the error of the first `abort`."""
        self.aborted_by = self.aborted_by or error
        self.scope.cancel()

    def note(self, event: QueryEvent) -> None:
        """Report an event to admission and to the observers. `Answered` also sets `answer` and `is_answered`.

        Of the queries for a question that is still being asked, the observers get the events of the last one only, from
        when the question is committed.
        """
        self.place.follow(event)
        if self.question is None:
            self._report(event)
            return
        if isinstance(event, RetrievalStarted):
            self.query.text, self.query.started_s = event.query, time.monotonic() - event.at_s
            self._unreported.clear()
        self._unreported.append(event)
        if self.is_asked:
            for each in self._unreported:
                self._report(each)
            self._unreported.clear()

    def _report(self, event: QueryEvent) -> None:
        """Report an event to the observers only. `Answered` also sets `answer` and `is_answered`."""
        if isinstance(event, Answered):
            self.answer, self.is_answered = event.answer, True
        self.observer.query_event(self.query, event)

    def outcome(self, error: BaseException | None) -> QueryOutcome:
        """Return how the query ended, given the error that its block raised.

        "answered", even with an error; else "left" without an error or if cancelled; else what `failure_of` says.
        """
        if self.is_answered:
            return "answered"
        if error is None or isinstance(error, asyncio.CancelledError | GeneratorExit):
            return "left"
        return failure_of(error).outcome


class OpenQueries:
    """All open queries of a service, oldest first."""

    def __init__(self, admission: Admission, observer: Observer) -> None:
        self._admission = admission
        self._observer = observer
        self._open: dict[OpenQuery, None] = {}
        self.is_empty = asyncio.Event()  # set while no query is open
        self.is_empty.set()

    def __iter__(self) -> Iterator[OpenQuery]:
        return iter(list(self._open))

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
        question: OpenQuestion | None = None,
    ) -> AsyncIterator[OpenQuery]:
        """Admit one query for the length of the block, and report its end with the error that the block raised.

        Gives the open query, whose `query` is `current_query` in the block.

        max_tokens: bound on the answer's tokens.
        num_prompt_tokens: tokens of the prompt, if known.
        deadline_s: seconds until the block is cancelled; None for queries of a pipeline, which has its own deadline.
        question: the question, if it is still being asked.

        :raises NotAdmittedError: the query is not admitted.
        :raises PipelineClosedError: the service stops during the query.
        :raises EngineDeadError: the engine dies during the query.
        :raises DeadlineExceededError: the deadline has passed.
        """
        opened = self._admit(caller, interface, text, max_tokens, num_prompt_tokens)
        opened.question = question
        if deadline_s is not None:
            opened.scope.deadline = anyio.current_time() + deadline_s
        error: BaseException | None = None
        query_token = current_query.set(opened.query)
        try:
            self._observer.query_started(opened.query)
            with opened.scope:
                yield opened
            if opened.scope.cancelled_caught:
                raise opened.aborted_by or DeadlineExceededError(f"the query's deadline of {deadline_s:g} s passed")
        except BaseException as raised:
            error = raised
            raise
        finally:
            current_query.reset(query_token)
            self._end(opened, error)

    @property
    def wants_engine(self) -> bool:
        """Whether a dead engine is worth restarting."""
        return not self._admission.is_draining

    def engine_died(self, error: EngineDeadError) -> None:
        """Stop admitting queries, and abort all open ones with `error`, because the engine may have left some without
        one. Queries of the interface "retrieve" go on: they do not need the engine."""
        self._admission.is_ready = False
        for each in self:
            if each.query.interface != "retrieve":
                each.abort(EngineDeadError(str(error)))

    def engine_restarted(self) -> None:
        """Admit queries again. Queries that were aborted when the engine died stay aborted."""
        self._admission.is_ready = True

    def _admit(
        self, caller: Caller, interface: Interface, text: str, max_tokens: int, num_prompt_tokens: int | None
    ) -> OpenQuery:
        """Admit a query and return it as open. Report a refusal to the observers, and raise NotAdmittedError for it."""
        client = caller.client
        try:
            place = self._admission.enter(client, max_tokens=max_tokens, num_prompt_tokens=num_prompt_tokens)
        except NotAdmittedError as error:
            self._observer.query_refused(client, interface, error.why)
            raise
        query = ServedQuery(caller.id, interface, client, time.monotonic(), text, caller.traceparent, caller.tracestate)
        opened = OpenQuery(query, place, self._observer)
        self._open[opened] = None
        self.is_empty.clear()
        return opened

    def _end(self, opened: OpenQuery, error: BaseException | None) -> None:
        """Remove the query from the open ones, release its place, and report its outcome to the observers."""
        del self._open[opened]
        if not self._open:
            self.is_empty.set()
        self._admission.leave(opened.place, stayed_s=opened.query.age_s)
        self._observer.query_ended(opened.query, opened.outcome(error), opened.answer, error)
