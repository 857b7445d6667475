"""Run one query, from admission to its last token."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import anyio

from streamrag.core import AnswerChunk, Backend, BackendEvent, Mode, Prefilled, Source, part_name
from streamrag.core.retrieval import Retrieval, closing
from streamrag.errors import BackendError, ConfigurationError, DeadlineExceededError
from streamrag.modes import AssembledPrompt
from streamrag.query.answer_ahead import AnswerAhead, why_not_drafted
from streamrag.query.answer_chunks import AnswerChunks
from streamrag.query.options import Query
from streamrag.query.overlap import ALWAYS, NEVER, OverlapChooser, OverlapOutcome
from streamrag.query.prompts import QueryPrompts
from streamrag.records import RequestRecord
from streamrag.support.clock import Clock
from streamrag.support.messages import message_of, type_name
from streamrag.support.tasks import end_or_leave, is_cancelled
from streamrag.telemetry import (
    Answer,
    Answered,
    DraftUse,
    PrefillProgressed,
    QueryEvent,
    RetrievalStarted,
)

if TYPE_CHECKING:
    from streamrag.trace.recorder import TraceRecorder


ALREADY_RUNNING = "aclose(): asynchronous generator is already running"


class _Phase(Enum):
    """A phase of a query, with the end of the error message if the deadline passes in it."""

    STARTING = (
        "while the engine or the source was starting: start the pipeline before the first query, or raise deadline_s"
    )
    WAITING = "while other queries had all places: raise deadline_s or max_concurrent_queries"
    RETRIEVING = "while retrieving: raise deadline_s, or give the source a shorter timeout of its own"
    GENERATING = "while generating: raise deadline_s, or lower max_tokens"


class QueryRun:
    """A single run of a query, which passes its events to `emit` in order.

    `query.overlap` says whether changes of the context are sent to the backend while retrieval runs. The complete
    prompt, and thus the answer, is the same.
    """

    def __init__(
        self,
        query: Query,
        *,
        source: Source,
        backend: Backend,
        mode: Mode,
        answers_despite_source_error: bool,
        overlap_chooser: OverlapChooser,
        clock: Clock,
        emit: Callable[[QueryEvent], Awaitable[None]],
        recorder: "TraceRecorder | None" = None,
    ) -> None:
        self._query = query
        self._source = source
        self._backend = backend
        self._mode = mode
        self._answers_despite_source_error = answers_despite_source_error
        self._overlap_chooser = overlap_chooser
        self._overlap = ALWAYS if query.overlap else NEVER  # with "auto", replaced after admission
        self._num_running = 0
        self._clock = clock
        self._emit = emit
        self._recorder = recorder
        self._retrieval = Retrieval(source, query.text)
        self._submitted_s = clock()
        self._phase = _Phase.STARTING  # until retrieval ends, see `_phase_now`
        self._prompts: QueryPrompts | None = None
        self._has_place = False

    async def run(self, started: Callable[[], Awaitable[None]], admission: anyio.CapacityLimiter) -> Answer:
        """Wait for `started` and `admission`, run the query, and return its answer.

        The query runs in an inner task, which is cancelled when the deadline passes or the query is stopped, and left
        behind with a warning if it does not end; its place is given back either way. Raises DeadlineExceededError,
        SourceError, BackendError and PromptTooLongError.
        """
        work = asyncio.create_task(self._run(started, admission), name="streamrag query's work")
        try:
            await asyncio.wait([work], timeout=self._query.deadline_s)
        finally:
            is_late = not work.done()
            phase = self._phase_now().value.partition(":")[0]
            culprit = f"{part_name(self._source)} or {part_name(self._backend)}"
            try:
                await end_or_leave(work, f"a query that was stopped {phase}", culprit)
            finally:  # not in the inner task, which may be left behind
                if self._has_place:
                    admission.release_on_behalf_of(self)
        if is_late:
            raise DeadlineExceededError(
                f"the query's deadline of {self._query.deadline_s:g} s passed {self._phase_now().value}"
            )
        return work.result()

    def _phase_now(self) -> _Phase:
        """Return the phase; the end of retrieval begins the last one."""
        is_retrieved = self._prompts is not None and self._prompts.retrieval_s is not None
        return _Phase.GENERATING if is_retrieved else self._phase

    async def _run(self, started: Callable[[], Awaitable[None]], admission: anyio.CapacityLimiter) -> Answer:
        """Wait for the start and a place, choose the overlap, answer, and close retrieval.

        Raises BackendError for a cancellation that is not the query's, or if the backend still pulls prompts.
        """
        await started()
        self._phase = _Phase.WAITING
        await admission.acquire_on_behalf_of(self)
        self._has_place = True
        if self._query.overlap == "auto":
            self._num_running = admission.borrowed_tokens
            shares_processors = self._backend.model.shares_processors
            self._overlap = self._overlap_chooser.choose(self._num_running, shares_processors=shares_processors)
        self._phase = _Phase.RETRIEVING
        try:
            async with aclosing(self._retrieval):
                return await self._retrieve_and_answer()
        except RuntimeError as error:
            if message_of(error) != ALREADY_RUNNING:
                raise
            raise BackendError(
                f"{part_name(self._backend)} failed: it left a task that pulls prompts running"
            ) from error
        except (asyncio.CancelledError, GeneratorExit) as error:
            if is_cancelled():
                raise
            raise BackendError(
                f"{part_name(self._backend)} failed: a {type(error).__name__}, although the query was not stopped"
            ) from error

    async def _retrieve_and_answer(self) -> Answer:
        """Emit RetrievalStarted, answer, let `overlap_chooser` learn if "auto", emit Answered, and return the answer.
        Raise BackendError if one of the n answers is unfinished, or ended before the prompt was complete."""
        queued_s = self._now()
        ahead = self._answer_ahead()
        await self._emit(RetrievalStarted(queued_s, self._query.text, self._overlap))
        self._prompts = prompts = QueryPrompts(
            self._query,
            self._retrieval,
            self._backend.model,
            mode=self._mode,
            overlap=self._overlap,
            answers_despite_source_error=self._answers_despite_source_error,
            now=self._now,
            emit=self._emit,
            recorder=self._recorder,
            ahead=ahead,
        )
        async with ahead or nullcontext():
            chunks = await self._generate(prompts)
        answers = chunks.finished()
        if answers.keys() != set(range(self._query.params.n)):
            of_n = "" if self._query.params.n == 1 else f": {len(answers)} of n={self._query.params.n} are finished"
            raise BackendError(f"{part_name(self._backend)} ended without finishing its answer{of_n}")
        if prompts.complete is None or prompts.retrieval_s is None:
            raise BackendError(f"{part_name(self._backend)} ended its answer before it had the complete prompt")
        answer = self._answer(chunks, prompts, prompts.complete, queued_s, prompts.retrieval_s)
        if self._query.overlap == "auto":
            token_ids = prompts.complete.prompt.token_ids
            outcome = OverlapOutcome.of(
                self._overlap.way, answer.timings, has_forecast=prompts.has_forecast, token_ids=token_ids
            )
            self._overlap_chooser.learn(outcome, self._num_running)
        await self._emit(Answered(answer.timings.total_s, answer))
        return answer

    def _answer_ahead(self) -> AnswerAhead | None:
        """Return an AnswerAhead; None if off or `_why_not_drafted`; ConfigurationError if no drafts can be verified."""
        if not self._query.answer_ahead:
            return None
        if not self._backend.model.verifies_drafts:
            raise ConfigurationError(
                f"answer_ahead=True needs a backend that verifies drafts, which {part_name(self._backend)} does not: "
                "use VllmBackend(answer_ahead=True)"
            )
        if self._why_not_drafted():
            return None
        return AnswerAhead(self._backend, self._query.params, now=self._now, emit=self._emit)

    def _why_not_drafted(self) -> str | None:
        return why_not_drafted(self._query, self._backend.model, self._overlap)

    async def _generate(self, prompts: QueryPrompts) -> AnswerChunks:
        """Emit the backend's events for the prompts; return the chunks of all answers. If a draft is the answer, ignore
        errors of the backend, and emit that."""
        chunks = AnswerChunks(self._backend.model, self._now)
        try:
            refresh = self._query.refresh
            backend = refresh.backend_for(prompts, self._backend) if refresh else self._backend
            async with (
                aclosing(prompts.stream()) as stream,
                closing(backend.generate(stream, self._query.params)) as events,
            ):
                async for event in events:
                    await self._follow(event, chunks)
        except Exception:  # AnswerIsKnownError, or whatever a backend, which is foreign code, makes of it
            if not prompts.answer:
                raise
        for chunk in prompts.answer:
            await self._follow(chunk, chunks)
        return chunks

    async def _follow(self, event: BackendEvent, chunks: AnswerChunks) -> None:
        """Emit a prefill, or answer 0's tokens; add all answers' tokens to `chunks`. Raise BackendError for others."""
        if is_cancelled():  # the backend swallowed the CancelledError
            raise asyncio.CancelledError
        if isinstance(event, AnswerChunk):
            generated = chunks.add(event)
            if event.index == 0:
                await self._emit(generated)
        elif isinstance(event, Prefilled):
            await self._emit(PrefillProgressed(self._now(), event.num_tokens))
        else:
            raise BackendError(
                f"{part_name(self._backend)} failed: it yielded {type_name(event)}, and not an AnswerChunk or Prefilled"
            )

    def _answer(
        self,
        chunks: AnswerChunks,
        prompts: QueryPrompts,
        last: AssembledPrompt,
        queued_s: float,
        retrieval_s: float,
    ) -> Answer:
        """Return answer 0 with its context, overlap and use of drafts."""
        answer = chunks.join(
            num_prompt_tokens=len(last.prompt.token_ids),
            queued_s=queued_s,
            first_chunk_s=prompts.first_chunk_s,
            retrieval_s=retrieval_s,
            citations=prompts.citations(last.included),
            left_out=last.left_out,
            shortened=last.shortened,
            num_invalidated=prompts.num_invalidated,
            source_error=prompts.source_error,
            cut_short=prompts.cut_short,
            submitted_s=self._submitted_s,
            overlap=self._overlap,
            stretches=prompts.stretches,
        )
        return replace(answer, draft=self._draft_use(prompts, answer.record, len(answer.token_ids)))

    def _draft_use(self, prompts: QueryPrompts, record: RequestRecord | None, num_tokens: int) -> DraftUse | None:
        """Return how many drafted tokens were verified and accepted, or why none; None if drafts were not wanted.

        A record also counts what was accepted behind a token that ends the answer, so `num_tokens` is the most.
        """
        if not self._query.answer_ahead and not self._query.draft:
            return None
        num_drafted = prompts.num_drafted
        if prompts.answer:
            return DraftUse(num_drafted, num_drafted, num_drafted)
        num_verified, num_accepted = (record.num_verified, record.num_accepted) if record else (0, 0)
        return DraftUse(num_drafted, num_verified, min(num_accepted, num_tokens), self._why_not_drafted())

    def _now(self) -> float:
        return self._clock() - self._submitted_s
