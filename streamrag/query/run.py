"""Run one query, from admission to its last token."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TypeAlias

import anyio

from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams, only, part_name
from streamrag.core.retrieval import closing
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import BackendError, ConfigurationError, DeadlineExceededError
from streamrag.modes import AssembledPrompt, PromptAssembler
from streamrag.query.answer_ahead import AnswerAhead, why_not_drafted
from streamrag.query.answer_chunks import AnswerChunks
from streamrag.query.options import ContextRefresher, Query
from streamrag.query.overlap import ALWAYS, NEVER, OverlapChooser, OverlapOutcome
from streamrag.query.prompts import QueryPrompts, new_assembler
from streamrag.query.state import NewContext, QueryState
from streamrag.records import RequestRecord
from streamrag.support.messages import message_of, type_name
from streamrag.support.tasks import end_or_leave, is_cancelled
from streamrag.telemetry import Answer, Answered, ContextRefreshed, DraftUse, PrefillProgressed, RetrievalStarted

ALREADY_RUNNING = "aclose(): asynchronous generator is already running"

_Request: TypeAlias = tuple[AsyncGenerator[Prompt, None], SamplingParams]


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

    def __init__(self, query: Query, state: QueryState, overlap_chooser: OverlapChooser) -> None:
        self._query = query
        self._state = state
        self._overlap_chooser = overlap_chooser
        self._num_running = 0
        self._phase = _Phase.STARTING  # until retrieval ends, see `_phase_now`
        self._has_place = False
        state.overlap = ALWAYS if query.overlap else NEVER  # with "auto", replaced after admission

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
            culprit = f"{part_name(self._state.retrieval.source)} or {part_name(self._state.backend)}"
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
        return self._phase if self._state.retrieval_s is None else _Phase.GENERATING

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
            shares_processors = self._state.backend.model.shares_processors
            self._state.overlap = self._overlap_chooser.choose(self._num_running, shares_processors=shares_processors)
        self._phase = _Phase.RETRIEVING
        backend = part_name(self._state.backend)
        try:
            async with aclosing(self._state.retrieval):
                return await self._retrieve_and_answer()
        except RuntimeError as error:
            if message_of(error) != ALREADY_RUNNING:
                raise
            raise BackendError(f"{backend} failed: it left a task that pulls prompts running") from error
        except (asyncio.CancelledError, GeneratorExit) as error:
            if is_cancelled():
                raise
            what = f"a {type(error).__name__}, although the query was not stopped"
            raise BackendError(f"{backend} failed: {what}") from error

    async def _retrieve_and_answer(self) -> Answer:
        """Emit RetrievalStarted, answer, let `overlap_chooser` learn if "auto", emit Answered, and return the answer.
        Raise BackendError if one of the n answers is unfinished, or ended before the prompt was complete."""
        query, state, model = self._query, self._state, self._state.backend.model
        state.queued_s = state.now()
        ahead = self._answer_ahead()
        await state.emit(RetrievalStarted(state.queued_s, query.text, state.overlap))
        assembler = await in_thread(model.tokenizer, partial(new_assembler, query, model))
        prompts = QueryPrompts(query, state, assembler, ahead)
        chunks = AnswerChunks(model, state.now)
        async with ahead or nullcontext():
            generating = self._generate(prompts, assembler, chunks)
            await (ahead.run_until_known(generating) if ahead else generating)
        for chunk in state.draft_answer:
            await self._follow(chunk, chunks)
        answers = chunks.finished()
        if answers.keys() != set(range(query.params.n)):
            of_n = "" if query.params.n == 1 else f": {len(answers)} of n={query.params.n} are finished"
            raise BackendError(f"{part_name(state.backend)} ended without finishing its answer{of_n}")
        complete, retrieval_s = state.complete, state.retrieval_s
        if complete is None or retrieval_s is None:
            raise BackendError(f"{part_name(state.backend)} ended its answer before it had the complete prompt")
        answer = self._answer(chunks, prompts, complete, retrieval_s)
        if query.overlap == "auto":
            outcome = OverlapOutcome.of(
                state.overlap.way,
                answer.timings,
                has_forecast=state.has_forecast,
                num_head=prompts.num_head,
                token_ids=(state.first_complete or complete).prompt.token_ids,
            )
            self._overlap_chooser.learn(outcome, self._num_running)
        await state.emit(Answered(answer.timings.total_s, answer))
        return answer

    def _answer_ahead(self) -> AnswerAhead | None:
        """Return an AnswerAhead; None if off or `why_not_drafted`; ConfigurationError if no drafts can be verified."""
        state = self._state
        if not self._query.answer_ahead:
            return None
        if not state.backend.model.verifies_drafts:
            raise ConfigurationError(
                f"answer_ahead=True needs a backend that verifies drafts, which {part_name(state.backend)} does not: "
                "use VllmBackend(answer_ahead=True)"
            )
        return None if why_not_drafted(self._query, state) else AnswerAhead(self._query.params, state)

    async def _generate(self, prompts: QueryPrompts, assembler: PromptAssembler, chunks: AnswerChunks) -> None:
        """Emit the backend's events for the prompts, and add the chunks of all answers. With `refresh`, retrieve again
        meanwhile; whenever there is new context, end the request, and generate the rest of the answer from there."""
        query, state = self._query, self._state
        refresher = query.refresh.begin(query, state, assembler) if query.refresh else None
        request: _Request | None = prompts.stream(), query.params
        async with refresher or nullcontext():
            while request is not None:
                (stream, params), request = request, None
                async with aclosing(stream), closing(state.backend.generate(stream, params)) as events:
                    async for event in events:
                        if new := await self._follow(event, chunks, refresher):
                            request = await self._continue_from(new, chunks.token_ids)
                            break  # which closes `events`, and so aborts the old request

    async def _continue_from(self, new: NewContext, token_ids: tuple[int, ...]) -> _Request:
        """Make the new context that of the answer, emit ContextRefreshed, and return the request for what follows the
        tokens so far: with less of `max_tokens` and of vLLM's `min_tokens`."""
        query, state, old, num_tokens = self._query, self._state, self._state.complete, len(token_ids)
        assert old is not None
        prompt, included = new.step.prompt.token_ids, new.step.included
        state.num_invalidated += len(old.prompt.token_ids) - new.num_shared
        state.begin_segment(new.query, new.step, num_tokens)
        added, num_recomputed = included[len(old.included) :], new.num_recomputed(num_tokens)
        await state.emit(ContextRefreshed(state.now(), new.query, added, num_tokens, num_recomputed))
        extra = dict(query.params.extra)
        if "min_tokens" in extra:
            extra["min_tokens"] = max(extra["min_tokens"] - num_tokens, 0)
        params = replace(query.params, max_tokens=query.params.max_tokens - num_tokens, extra=extra)
        return only(Prompt((*prompt, *token_ids), is_complete=True, conversation_id=query.conversation_id)), params

    async def _follow(
        self, event: BackendEvent, chunks: AnswerChunks, refresher: ContextRefresher | None = None
    ) -> NewContext | None:
        """Emit a prefill, or answer 0's tokens; add all answers' tokens to `chunks`. Raise BackendError for any other.
        Return new context, if the refresher has some, with which the answer should go on."""
        if is_cancelled():  # the backend swallowed the CancelledError
            raise asyncio.CancelledError
        state = self._state
        if isinstance(event, AnswerChunk):
            generated = chunks.add(event if refresher is None else refresher.add(event))
            if event.index == 0:
                await state.emit(generated)
            return None if refresher is None else await refresher.new_context()
        if isinstance(event, Prefilled):
            await state.emit(PrefillProgressed(state.now(), event.num_tokens))
            return None
        raise BackendError(
            f"{part_name(state.backend)} failed: it yielded {type_name(event)}, and not an AnswerChunk or Prefilled"
        )

    def _answer(self, chunks: AnswerChunks, prompts: QueryPrompts, last: AssembledPrompt, retrieval_s: float) -> Answer:
        """Return answer 0 with its context, overlap and use of drafts."""
        state = self._state
        answer = chunks.join(
            num_prompt_tokens=len(last.prompt.token_ids),
            queued_s=state.queued_s,
            first_chunk_s=state.first_chunk_s,
            retrieval_s=retrieval_s,
            citations=prompts.citations(last.included),
            left_out=last.left_out,
            shortened=last.shortened,
            num_invalidated=state.num_invalidated,
            source_error=state.source_error,
            cut_short=state.cut_short,
            submitted_s=state.submitted_s,
            overlap=state.overlap,
            segments=state.segments if self._query.refresh else (),
        )
        return replace(answer, draft=self._draft_use(answer.record, len(answer.token_ids)))

    def _draft_use(self, record: RequestRecord | None, num_tokens: int) -> DraftUse | None:
        """Return how many drafted tokens were verified and accepted, or why none; None if drafts were not wanted.

        A record also counts what was accepted behind a token that ends the answer, so `num_tokens` is the most.
        """
        if not self._query.answer_ahead and not self._query.draft:
            return None
        if self._state.draft_answer:
            return DraftUse(num_tokens, num_tokens, num_tokens)
        num_verified, num_accepted = (record.num_verified, record.num_accepted) if record else (0, 0)
        why_none = why_not_drafted(self._query, self._state)
        return DraftUse(self._state.num_drafted, num_verified, min(num_accepted, num_tokens), why_none)
