"""Answer a session's questions: from the cache, or by the engine."""

import asyncio
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TypedDict

from streamrag.core import AnswerChunk, Backend, SamplingParams, part_name
from streamrag.errors import ConfigurationError
from streamrag.query.answer_stream import Emit, StartQuery
from streamrag.sessions.answer import compute_answer
from streamrag.sessions.data import SessionData
from streamrag.sessions.ingestion import Snapshot
from streamrag.sessions.question_options import DECISIVE_MARGIN, Question
from streamrag.sessions.tasks import SessionTasks
from streamrag.support.messages import short_repr
from streamrag.support.validation import Seconds, Whole, validated
from streamrag.telemetry import Answer, Answered, Timings, TokensGenerated

MAX_ANSWERS = 1024
MAX_ANSWER_BYTES = 4_000_000
"""Limits of the answer cache."""


class AskOptions(TypedDict, total=False):
    """Options of a question."""

    answers: tuple[str, ...]
    """The answers to choose from, none of which is a prefix of another. Only as many tokens are computed as tell them
    apart, mostly one."""
    at_least: int | None
    """Wait until this version of the data, as returned by `append`, is computed."""
    params: SamplingParams | None
    deadline_s: float | None
    """Most seconds until the last token."""
    with_margin: bool
    """Whether to report the lead over the next best answer. The engine must support log-probabilities."""
    decisive_margin: float
    """With `answers`: the lead in log-probability with which an answer is chosen before all its tokens are computed."""


class Questions:
    """Answers the questions of one session, each from the newest version that is computed.

    find_ahead: returns the answer to a watched question and version; None if there is none.
    """

    def __init__(
        self,
        backend: Backend,
        data: SessionData,
        tasks: SessionTasks,
        *,
        clock: Callable[[], float],
        find_ahead: Callable[[Question, int], Answer | None],
    ) -> None:
        self._backend = backend
        self._data = data
        self._tasks = tasks
        self._clock = clock
        self._find_ahead = find_ahead
        self.cache = AnswerCache(MAX_ANSWERS, MAX_ANSWER_BYTES)
        """Repeatable answers to the current version."""

    @validated
    def ask(
        self,
        text: str,
        *,
        answers: tuple[str, ...] = (),
        at_least: Whole | None = None,
        params: SamplingParams | None = None,
        deadline_s: Seconds | None = None,
        with_margin: bool = False,
        decisive_margin: float = DECISIVE_MARGIN,
    ) -> StartQuery:
        """Validate a question, and return a function that starts it as a task; nothing runs before.

        :raises ConfigurationError: an option cannot work, or `at_least` is higher than the newest version.
        """
        params = SamplingParams() if params is None else params
        question = Question(text, answers, params, with_margin, decisive_margin)
        if at_least is not None and at_least > self._data.buffer.num_appended:
            raise ConfigurationError(
                f"at_least={short_repr(at_least)} must be a version that append returned: "
                f"{self._data.buffer.num_appended} is the newest"
            )
        return self.prepare(question, at_least or 0, deadline_s)

    def prepare(self, question: Question, at_least: int = 0, deadline_s: float | None = None) -> StartQuery:
        """Return a function that starts and returns the answer's task, or raises as `SessionData.check_open` does."""

        def start(emit: Emit) -> "asyncio.Task[Answer]":
            self._data.check_open()
            return self._tasks.start(partial(self._answer, question, at_least, emit), "question", deadline_s)

        return start

    def check_logprobs(self) -> None:
        """Warn if the backend has no log-probabilities; raise ConfigurationError if it also sends text, not tokens."""
        model = self._backend.model
        if model.has_logprobs:
            return
        lack = f"{part_name(self._backend)} has no log-probabilities from its server"
        remedy = "use VllmBackend, or watch without answers, and name them in the question"
        if not model.is_exact:
            raise ConfigurationError(
                f"{lack}, and sends it text: `answers` and `with_margin` cannot work. To have them, {remedy}"
            )
        warnings.warn(
            f"{lack}: `answers` follow the tokens that it samples, and `gap` is None. For a comparison, {remedy}",
            UserWarning,
            stacklevel=3,
        )

    async def _answer(self, question: Question, at_least: int, emit: Emit) -> Answer:
        """Wait for version `at_least`, and answer from the newest: by a watch, the cache, or anew. Emit the pieces (a
        single one for a watch or the cache), then Answered, and return the answer. The times are always this call's."""
        submitted_s = self._clock()
        snapshot = await self._data.at_least(at_least)
        ahead = self._find_ahead(question, snapshot.version) or self.cache.get((question.key, question.with_margin))
        if ahead is not None:
            after_s = self._clock() - submitted_s
            timings = Timings(0.0, None, 0.0, after_s, after_s, after_s)
            answer = replace(ahead, submitted_s=submitted_s, timings=timings, record=None)
            await emit(TokensGenerated(after_s, AnswerChunk(answer.text, answer.token_ids, answer.finish_reason)))
        else:
            answer = await self._compute_and_cache(snapshot, question, submitted_s, emit)
        await emit(Answered(answer.timings.total_s, answer))
        return answer

    async def _compute_and_cache(
        self, snapshot: Snapshot, question: Question, submitted_s: float, emit: Emit
    ) -> Answer:
        """Return the engine's answer; cache it if the question is repeatable and no newer version is ready by then."""
        answer = await compute_answer(self._backend, snapshot, question, submitted_s, self._clock, emit)
        if question.is_repeatable and answer.version == self._data.ingestion.ready.version:
            parts = (question.text, *question.answers, answer.text, answer.token_ids, *answer.token_ids)
            self.cache.put((question.key, question.with_margin), answer, sum(map(sys.getsizeof, parts)))
        return answer


class AnswerCache:
    """An LRU cache of answers, bounded in number and bytes."""

    def __init__(self, max_answers: int, max_bytes: int) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[Hashable, tuple[Answer, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: Hashable) -> Answer | None:
        """Return the answer, which is then the most recently used; None if there is none."""
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key][0]

    def put(self, key: Hashable, answer: Answer, num_bytes: int) -> None:
        """Add or replace an answer, now the newest; evict the least recently used, at worst itself, over a limit."""
        _, num_replaced = self._answers.pop(key, (answer, 0))
        self._answers[key] = answer, num_bytes
        self._num_bytes += num_bytes - num_replaced
        while len(self._answers) > self._max_answers or self._num_bytes > self._max_bytes:
            _, (_, num_evicted) = self._answers.popitem(last=False)
            self._num_bytes -= num_evicted

    def clear(self) -> None:
        self._answers.clear()
        self._num_bytes = 0
