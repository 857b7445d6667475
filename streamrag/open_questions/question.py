"""A question that is still being asked.

question so far   how do   how do I cancel   how do I cancel a task     How do I cancel a task?
query ahead                ░░░░░░░           ░░░░░░░░░░░░░░░░░░░░░      a new one, from warm caches
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Self, TypeAlias, cast

from streamrag.core import Source
from streamrag.errors import ConfigurationError, StreamRagError
from streamrag.open_questions.held_source import HeldSource
from streamrag.open_questions.rules import QuestionRule, has_new_words
from streamrag.query.answer_stream import AnswerStream
from streamrag.query.options import QueryOptions
from streamrag.support.tasks import cancel_and_wait, wait_shielded
from streamrag.support.validation import CountOrZero, Seconds, SecondsOrZero, Text, validated

Ask: TypeAlias = Callable[[Source, str], AnswerStream]
"""A function that returns the answer to a question from a source, unstarted."""


class ListenOptions(QueryOptions, total=False):
    """The options of a question that is still being asked, and those of its query without `deadline_s`."""

    is_worth: QuestionRule
    """Whether the question so far is worth a retrieval; by default, if its content words are new."""
    stable_s: float
    """Seconds for which a question must not change before its retrieval begins; 0.3 by default."""
    max_retrievals: int
    """Most queries ahead; 4 by default, 0 for none."""
    idle_s: float
    """Seconds after which a query ahead is stopped if the question is neither changed nor committed; 30 by default."""


OWN_OPTIONS = ListenOptions.__annotations__.keys() - QueryOptions.__annotations__.keys()


def open_question(
    stream_from: Callable[[Source, str, QueryOptions], AnswerStream], source: Source, options: ListenOptions
) -> "OpenQuestion":
    """Return a question for `source`.

    :raises ConfigurationError: options that are unknown or cannot work.
    """
    if "deadline_s" in options:  # it would begin before the question is known
        raise ConfigurationError(
            f"deadline_s={options['deadline_s']!r} is no option of listen(): use asyncio.timeout around the answer"
        )
    own: dict[str, Any] = {name: value for name, value in options.items() if name in OWN_OPTIONS}
    of_query = cast(QueryOptions, {name: value for name, value in options.items() if name not in OWN_OPTIONS})
    stream_from(source, "?", of_query)  # raises for options that cannot work

    def ask(held: Source, text: str) -> AnswerStream:
        is_auto = held is not source and of_query.get("overlap") == "auto"
        return stream_from(held, text, {**of_query, "overlap": True} if is_auto else of_query)

    return OpenQuestion(ask, source, **own)


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
    is_worth: says whether the question so far is worth a retrieval; by default, whether its content words are new.
    stable_s: seconds for which a question must not change before its retrieval begins.
    max_retrievals: most queries ahead; 0 for none.
    idle_s: seconds after which a query ahead is stopped if the question is neither changed nor committed.
    """

    @validated
    def __init__(
        self,
        ask: Ask,
        source: Source,
        *,
        is_worth: QuestionRule = has_new_words,
        stable_s: SecondsOrZero = 0.3,
        max_retrievals: CountOrZero = 4,
        idle_s: Seconds = 30.0,
    ) -> None:
        self._ask = ask
        self._source = source
        self._is_worth = is_worth
        self._stable_s = stable_s
        self._max_retrievals = max_retrievals
        self._idle_s = idle_s
        self.num_retrievals = 0
        """Number of queries ahead so far."""
        self.is_committed = False
        self._ahead: _QueryAhead | None = None
        self._timer: asyncio.Task[None] | None = None
        self._answer: AnswerStream | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @validated
    async def partial(self, text: Text) -> None:
        """Say what the question is so far: a transcript that may change, or what has been typed.

        :raises StreamRagError: the question is committed or closed.
        """
        self._check_open()
        if self._timer is not None:
            self._timer.cancel()
        is_worth = bool(text.strip()) and self._is_worth(text, self._ahead.text if self._ahead else "")
        self._timer = asyncio.create_task(self._follow(text, is_worth), name="streamrag open question")

    @validated
    def commit(self, text: Text) -> AnswerStream:
        """Return the answer to the whole question, as `Pipeline.stream` does. What was begun for this text goes on.

        :raises StreamRagError: the question is committed or closed already.
        """
        self._check_open()
        self.is_committed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ahead is not None and text == self._ahead.text:
            self._ahead.source.committed.set()
            self._answer, self._ahead = self._ahead.answer, None
        else:
            self._drop()
            self._answer = self._ask(self._source, text)
        return self._answer

    async def aclose(self) -> None:
        """Stop what was begun and the answer, if they still run, and wait until they have ended."""
        self._is_closed = True
        if self._timer is not None:
            await cancel_and_wait([self._timer])
        self._drop()
        if self._answer is not None:
            self._end(self._answer)
        if self._ending:
            await wait_shielded(list(self._ending))

    def _check_open(self) -> None:
        if self.is_committed or self._is_closed:
            state = "committed" if self.is_committed else "closed"
            raise StreamRagError(f"this question is {state}: begin another one with pipeline.listen()")

    async def _follow(self, text: str, is_worth: bool) -> None:
        """Begin a query ahead for this text if it lasts and is worth it; after a while, stop the query ahead."""
        if is_worth:
            await asyncio.sleep(self._stable_s)
            if self.num_retrievals < self._max_retrievals:
                self._drop()
                await self._begin(text)
        await asyncio.sleep(self._idle_s)
        self._drop()

    async def _begin(self, text: str) -> None:
        """Start a query ahead, or none if that fails: the committed question then says why."""
        held = HeldSource(self._source)
        with suppress(StreamRagError):
            answer = self._ask(held, text)
            await answer.__aenter__()
            self.num_retrievals += 1
            self._ahead = _QueryAhead(text, held, answer)

    def _drop(self) -> None:
        """Stop the query ahead, if there is one."""
        if self._ahead is not None:
            self._end(self._ahead.answer)
            self._ahead = None

    def _end(self, stream: AnswerStream) -> None:
        task = asyncio.create_task(stream.aclose(), name="streamrag open question ends")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
