"""A question that is still being asked.

question so far   how do   how do I cancel a task   how do I cancel a task group     How do I cancel a task group?
query ahead                ░░░░░░░░░░░░░░░░░░░░░░   ░░░░░░░░░░░░░░░░░░░░░░░░░░░      a new one, from warm caches
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

from pydantic import TypeAdapter

from streamrag.core import Chunk, Source
from streamrag.errors import ConfigurationError, StreamRagError
from streamrag.open_questions.held_source import HeldSource, WithFound
from streamrag.open_questions.rules import QuestionRule, WaitForWords
from streamrag.query.answer_stream import AnswerStream, OnEvent
from streamrag.query.options import QueryOptions
from streamrag.support.tasks import wait_shielded
from streamrag.support.validation import CountOrZero, Flag, Seconds, SecondsOrZero, Text, check, validated
from streamrag.telemetry import PrefillProgressed, QueryEvent


@dataclass(slots=True)
class QueriesAhead:
    """The counts of a pipeline's queries ahead, of which at most half as many run as the pipeline has places."""

    max_running: int
    """Most of them that run at the same time."""
    num_running: int = 0
    """Number that run, of questions that are not committed yet."""
    num_begun: int = 0
    num_used: int = 0
    """Number that have become the query of a committed question."""
    num_unused_tokens: int = 0
    """Number of prompt tokens that were computed for the others."""

    def may_begin(self) -> bool:
        """Whether one more may run."""
        return self.num_running < self.max_running

    def begin(self) -> None:
        """Count one that has begun."""
        self.num_running += 1
        self.num_begun += 1

    def use(self) -> None:
        """Count one whose question was committed."""
        self.num_running -= 1
        self.num_used += 1

    def drop(self, num_tokens: int) -> None:
        """Count one that was stopped after `num_tokens` prompt tokens were computed for it."""
        self.num_running -= 1
        self.num_unused_tokens += num_tokens


Ask: TypeAlias = Callable[[Source, str], AnswerStream]
"""A function that returns the answer to a question from a source, unstarted."""


class ListenOptions(QueryOptions, total=False):
    """The options of a question that is still being asked, and those of its query without `deadline_s`."""

    rule: QuestionRule
    """Says how long the question must not change before its retrieval begins; `WaitForWords()` by default."""
    max_retrievals: int
    """Most queries ahead; 5 by default, 0 for none."""
    passages: Literal["own", "all"]
    """The passages that may stand in the context: those of the committed question's own retrieval, by default, or
    "all", with those that the queries ahead have found."""
    idle_s: float
    """Seconds after which a query ahead is stopped if the question is neither changed nor committed; 30 by default."""
    on_event: OnEvent | None
    """Called with each event of the queries ahead and of the answer's query when it occurs; none by default."""


WAIT_S: TypeAdapter[float | None] = TypeAdapter(SecondsOrZero | None)
OWN_OPTIONS = ListenOptions.__annotations__.keys() - QueryOptions.__annotations__.keys()


def open_question(
    stream_from: Callable[[Source, str, QueryOptions], AnswerStream],
    source: Source,
    queries_ahead: QueriesAhead,
    options: ListenOptions,
) -> "OpenQuestion":
    """Return a question for `source`, of which nothing is started. If `overlap` is "auto", its queries ahead overlap.

    :raises ConfigurationError: an option is unknown, cannot work, or is `deadline_s`.
    """
    options = cast(ListenOptions, {name: value for name, value in options.items() if value is not None})
    if "deadline_s" in options:  # it would begin before the question is known
        raise ConfigurationError(
            f"deadline_s={options['deadline_s']!r} is no option of listen(): use asyncio.timeout around the answer"
        )
    own: dict[str, Any] = {name: value for name, value in options.items() if name in OWN_OPTIONS}
    of_query = cast(QueryOptions, {name: value for name, value in options.items() if name not in OWN_OPTIONS})
    if isinstance(history := of_query.get("history"), Iterator):  # each query reads it
        of_query["history"] = tuple(history)
    stream_from(source, "?", of_query)  # raises for options that cannot work

    def ask(held: Source, text: str) -> AnswerStream:
        is_auto = held is not source and of_query.get("overlap") == "auto"
        return stream_from(held, text, {**of_query, "overlap": True} if is_auto else of_query)

    return OpenQuestion(ask, source, queries_ahead, **own)


class _QueryAhead(NamedTuple):
    """A query whose question is not committed yet."""

    text: str
    source: HeldSource
    answer: AnswerStream


class OpenQuestion:
    """A question that is still being asked. An async context manager: leaving it stops all that it has begun.

    A query ahead retrieves, prefills and, with `answer_ahead`, drafts, but its retrieval does not end before `commit`.
    It takes one of the pipeline's places, as any query does. There is one at a time.

    ask: returns the answer to a question from a source.
    source: the pipeline's source.
    queries_ahead: admits and counts the queries ahead of the pipeline's questions.
    rule: says how long the question must not change before its retrieval begins.
    max_retrievals: most queries ahead; 0 for none.
    passages: whether only passages of the committed question's "own" retrieval may stand in the context, or "all".
    idle_s: seconds after which a query ahead is stopped if the question is neither changed nor committed.
    on_event: called with each event of the queries ahead and of the answer's query when it occurs.
    """

    @validated
    def __init__(
        self,
        ask: Ask,
        source: Source,
        queries_ahead: QueriesAhead,
        *,
        rule: QuestionRule = WaitForWords(),  # noqa: B008
        max_retrievals: CountOrZero = 5,
        passages: Literal["own", "all"] = "own",
        idle_s: Seconds = 30.0,
        on_event: OnEvent | None = None,
    ) -> None:
        self._ask = ask
        self._source = source
        self._queries_ahead = queries_ahead
        self._rule = rule
        self._max_retrievals = max_retrievals
        self._uses_all = passages == "all"
        self._idle_s = idle_s
        self._on_event = on_event or (lambda event: None)
        self.num_retrievals = 0
        """Number of queries ahead so far."""
        self.num_unused_tokens = 0
        """Number of prompt tokens that the backend reported as computed for queries ahead that were stopped."""
        self.is_committed = False
        self._text = ""
        self._ahead: _QueryAhead | None = None
        self._found: list[Chunk] = []  # by queries ahead, if they may stand in the context
        self._timer: asyncio.Task[None] | None = None
        self._answer: AnswerStream | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def text_ahead(self) -> str:
        """The partial question that a query ahead runs for; empty if none does."""
        return self._ahead.text if self._ahead else ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @validated
    async def partial(self, text: Text, *, is_final: Flag = False) -> None:
        """Set the question so far, a transcript that may change or what has been typed, and return without waiting.

        After the rule's seconds without another text, a query ahead for `text` replaces the current one; but not if the
        rule gives None, `text` is blank or the current one's, or there have been `max_retrievals` queries ahead.

        is_final: whether `text` is probably the whole question, such as the final transcript of what has been said: its
            query ahead begins at once.

        :raises StreamRagError: the question is committed or closed, or the rule gives no valid number.
        """
        self._check_open()
        is_running = self._timer is not None and not self._timer.done()
        if is_running and text == self._text and not is_final:
            return
        retrieved = self.text_ahead
        wait_s: float | None = 0.0 if is_final else check("the rule's result", self._rule(text, retrieved), WAIT_S)
        if self._timer is not None:
            self._timer.cancel()
        self._text = text
        is_new = bool(text.strip()) and text != retrieved
        self._timer = asyncio.create_task(
            self._follow(text, wait_s if is_new else None), name="streamrag open question"
        )

    @validated
    def commit(self, text: Text) -> AnswerStream:
        """Return the answer to the whole question, as `Pipeline.stream` does.

        If the query ahead is for exactly this text, its answer is returned, and goes on; any other is stopped.

        :raises StreamRagError: the question is committed or closed already.
        """
        self._check_open()
        self.is_committed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ahead is not None and text == self._ahead.text:
            self._ahead.source.committed.set()
            self._queries_ahead.use()
            self._answer, self._ahead = self._ahead.answer, None
        else:
            self._drop()
            self._answer = self._ask(self._source_with_found(), text).observe(self._on_event)
        return self._answer

    async def aclose(self) -> None:
        """Stop the query ahead and the answer, if they still run, and wait until they have ended. Idempotent."""
        self._is_closed = True
        self._drop()
        if self._answer is not None:
            self._end(self._answer)
        if self._timer is not None:
            self._timer.cancel()
            self._ending.add(self._timer)
        if self._ending:
            await wait_shielded(list(self._ending))

    def _check_open(self) -> None:
        if self.is_committed or self._is_closed:
            state = "committed" if self.is_committed else "closed"
            raise StreamRagError(f"this question is {state}: begin another one with pipeline.listen()")

    def _source_with_found(self) -> Source:
        """Return the source, with the passages that were found by queries ahead if these may be used."""
        return WithFound(self._source, self._found) if self._found else self._source

    async def _follow(self, text: str, wait_s: float | None) -> None:
        """After `wait_s`, unless None or `max_retrievals` is reached, replace the query ahead by one for this text.

        Then stop any query ahead after `idle_s`.
        """
        if wait_s is not None:
            await asyncio.sleep(wait_s)
            if self.num_retrievals < self._max_retrievals:
                self._drop()
                if self._ending:
                    await asyncio.wait(self._ending)  # the one before gives its place back first
                await self._begin(text)
        await asyncio.sleep(self._idle_s)
        self._drop()

    async def _begin(self, text: str) -> None:
        """Start and count a query ahead; none if too many run, or if that fails: then the answer's error says why."""
        if not self._queries_ahead.may_begin():
            return
        held = HeldSource(self._source_with_found())

        def on_event(event: QueryEvent) -> None:
            if not held.is_dropped:
                self._on_event(event)

        with suppress(StreamRagError):
            answer = self._ask(held, text).observe(on_event)
            await answer.__aenter__()
            self._queries_ahead.begin()
            self.num_retrievals += 1
            self._ahead = _QueryAhead(text, held, answer)

    def _drop(self) -> None:
        """Begin to stop any query ahead; count its tokens, and keep its passages if `passages` is "all"."""
        if self._ahead is not None:
            num_tokens = num_computed(self._ahead.answer.take_events())
            self.num_unused_tokens += num_tokens
            if self._uses_all:
                self._found = list(dict.fromkeys([*self._found, *self._ahead.source.chunks]))
            self._ahead.source.is_dropped = True
            ended = self._end(self._ahead.answer)
            ended.add_done_callback(lambda _: self._queries_ahead.drop(num_tokens))
            self._ahead = None

    def _end(self, stream: AnswerStream) -> "asyncio.Task[None]":
        """Stop a stream, and return the task that waits for its end, as `aclose` does too."""
        stream.stop()
        task = asyncio.create_task(stream.aclose(), name="streamrag open question ends")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


def num_computed(events: Iterable[QueryEvent]) -> int:
    """Return the number of prompt tokens that were computed until the last of these events of a query."""
    return max((event.num_tokens for event in events if isinstance(event, PrefillProgressed)), default=0)
