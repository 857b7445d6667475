"""Run one query, from admission to its last token."""

import asyncio
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

from streamrag.core import (
    AnswerChunk,
    Append,
    Backend,
    Chunk,
    CutShort,
    Mode,
    Prefilled,
    Prompt,
    Skipped,
    Source,
    SourceEvent,
    Update,
    part_name,
)
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import BackendError, ConfigurationError, DeadlineExceededError, SourceError, StreamRagError
from streamrag.modes import AssembledPrompt, PromptAssembler
from streamrag.modes.context import Context
from streamrag.query.options import Query
from streamrag.query.relevance import Relevance
from streamrag.query.retrieval import Retrieval, closing
from streamrag.support.clock import Clock
from streamrag.support.messages import message_of, type_name
from streamrag.support.tasks import LET_GO_S, cancel_and_wait, is_cancelled
from streamrag.telemetry import (
    Answer,
    Answered,
    ChunkArrived,
    ChunksLeftOut,
    ChunksShortened,
    Citation,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    PrefillProgressed,
    QueryEvent,
    RetrievalCutShort,
    RetrievalStarted,
    SourceFailed,
    Timings,
    TokensGenerated,
)

if TYPE_CHECKING:
    from streamrag.trace.recorder import TraceRecorder


ALREADY_RUNNING = "aclose(): asynchronous generator is already running"

T = TypeVar("T")


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

    With `query.overlap`, every change of the context is sent to the backend while retrieval runs; without it, only the
    complete prompt is. The complete prompt, and thus the answer, is the same.
    """

    def __init__(
        self,
        query: Query,
        *,
        source: Source,
        backend: Backend,
        mode: Mode,
        answers_despite_source_error: bool,
        clock: Clock,
        emit: Callable[[QueryEvent], Awaitable[None]],
        recorder: "TraceRecorder | None" = None,
    ) -> None:
        self._query = query
        self._source = source
        self._backend = backend
        self._mode = mode
        self._answers_despite_source_error = answers_despite_source_error
        self._clock = clock
        self._emit = emit
        self._recorder = recorder
        self._retrieval = Retrieval(source, query.text)
        self._submitted_s = clock()
        self._first_chunk_s: float | None = None
        self._retrieval_s = 0.0
        self._phase = _Phase.STARTING
        self._has_place = False
        self._source_error: SourceError | None = None
        self._cut_short: str | None = None
        self._num_invalidated = 0
        self._rank_of: dict[tuple[str, int, str], int] = {}  # in the last ranking, by uri, passage and text
        self._complete: AssembledPrompt | None = None

    async def run(self, started: Callable[[], Awaitable[None]], admission: anyio.CapacityLimiter) -> Answer:
        """Wait for `started` and `admission`, run the query, and return its answer.

        The query runs in an inner task, which is cancelled when the deadline passes or the query is stopped, and left
        behind with a warning if it does not end. Raises DeadlineExceededError, SourceError, BackendError and
        PromptTooLongError.
        """
        work = asyncio.create_task(self._run(started, admission), name="streamrag query's work")
        try:
            await asyncio.wait([work], timeout=self._query.deadline_s)
        finally:
            is_late = not work.done()
            try:
                await self._end(work)
            finally:  # not in the inner task, which may be left behind
                if self._has_place:
                    admission.release_on_behalf_of(self)
        if is_late:
            raise DeadlineExceededError(
                f"the query's deadline of {self._query.deadline_s:g} s passed {self._phase.value}"
            )
        return work.result()

    async def _end(self, work: "asyncio.Task[Answer]") -> None:
        try:
            await cancel_and_wait([work], at_most_s=LET_GO_S)
        finally:
            if not work.done():
                work.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark it as retrieved
                phase = self._phase.value.partition(":")[0]
                warnings.warn(
                    f"a query that was stopped {phase} has not ended within {LET_GO_S:g} s and is left behind: "
                    f"{part_name(self._source)} or {part_name(self._backend)} swallows CancelledError, or waits, or "
                    "tokenises, where it cannot be cancelled",
                    ResourceWarning,
                    stacklevel=1,
                    source=self,
                )

    async def _run(self, started: Callable[[], Awaitable[None]], admission: anyio.CapacityLimiter) -> Answer:
        await started()
        self._phase = _Phase.WAITING
        await admission.acquire_on_behalf_of(self)
        self._has_place = True
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
        queued_s = self._now()
        await self._emit(RetrievalStarted(queued_s, self._query.text))
        chunks, first_token_s = await self._generate()
        if not chunks or chunks[-1].finish_reason is None:
            raise BackendError(f"{part_name(self._backend)} ended without finishing its answer")
        if self._complete is None:
            raise BackendError(f"{part_name(self._backend)} ended its answer before it had the complete prompt")
        total_s = self._now()
        first_token_s = total_s if first_token_s is None else first_token_s
        timings = Timings(
            queued_s=queued_s,
            first_chunk_s=self._first_chunk_s,
            retrieval_s=self._retrieval_s,
            ttft_s=first_token_s,
            ttft_after_retrieval_s=first_token_s - self._retrieval_s,
            total_s=total_s,
        )
        answer = self._answer(chunks, self._complete, timings)
        await self._emit(Answered(total_s, answer))
        return answer

    async def _generate(self) -> tuple[list[AnswerChunk], float | None]:
        """Return the backend's answer, and the time of its first token; None if it has none."""
        first_token_s: float | None = None
        chunks: list[AnswerChunk] = []
        async with (
            aclosing(self._prompts()) as prompts,
            closing(self._backend.generate(prompts, self._query.params)) as events,
        ):
            async for event in events:
                if is_cancelled():  # the backend swallowed the CancelledError
                    raise asyncio.CancelledError
                at_s = self._now()
                if isinstance(event, Prefilled):
                    await self._emit(PrefillProgressed(at_s, event.num_tokens))
                elif isinstance(event, AnswerChunk):
                    if first_token_s is None and (event.token_ids or event.text):
                        first_token_s = at_s
                    chunks.append(event)
                    await self._emit(TokensGenerated(at_s, event.text, event.token_ids, event.finish_reason))
                else:
                    raise BackendError(
                        f"{part_name(self._backend)} failed: it yielded {type_name(event)}, and not an AnswerChunk or "
                        "Prefilled"
                    )
        return chunks, first_token_s

    async def _prompts(self) -> AsyncGenerator[Prompt, None]:
        """Yield a prompt for each change of the context with `overlap`, then the complete prompt."""
        assembler = await self._in_thread(self._new_assembler)
        chunks = Context()
        is_ranked = False
        async with aclosing(self._retrieve(assembler)) as events:
            async for event in events:
                new = event.chunks if isinstance(event, Update) else (event.chunk,)
                at_s = self._now()
                for chunk in dict.fromkeys(new):
                    if chunk not in chunks:
                        await self._emit(ChunkArrived(at_s, chunk))
                chunks = chunks.with_chunks(self._fold(chunks, event))
                is_ranked = is_ranked or isinstance(event, Update)  # an Append after an Update keeps the ranking
                self._update_ranks(event)
                if self._first_chunk_s is None and chunks:
                    self._first_chunk_s = at_s
                if self._query.overlap:
                    step = await self._in_thread(
                        partial(assembler.assemble, chunks, is_complete=False, is_ranked=is_ranked)
                    )
                    await self._report(step)
                    yield replace(step.prompt, hint=event.hint, source_name=part_name(self._source))
        self._retrieval_s = self._now()
        self._phase = _Phase.GENERATING
        is_cut_short = self._cut_short is not None or self._source_error is not None
        step = await self._in_thread(
            partial(assembler.assemble, chunks, is_complete=True, is_cut_short=is_cut_short, is_ranked=is_ranked)
        )
        await self._report(step)
        for kind, affected in ((ChunksShortened, step.shortened), (ChunksLeftOut, step.left_out)):
            if affected:
                await self._emit(kind(self._now(), affected, assembler.max_context_tokens))
        num_tokens, unit = len(step.prompt.token_ids), self._backend.model.unit
        await self._emit(ContextComplete(self._now(), len(step.included), num_tokens, step.included, unit))
        self._complete = step
        yield step.prompt

    def _new_assembler(self) -> PromptAssembler:
        query, model = self._query, self._backend.model
        return PromptAssembler(
            model.tokenizer,
            query.template,
            query.text,
            max_model_len=model.max_model_len,
            max_tokens=query.params.max_tokens,
            max_context_tokens=query.max_context_tokens,
            history=query.history,
            relevance=Relevance(query.text) if query.reserve_fraction else None,
            reserve_fraction=query.reserve_fraction,
        )

    def _fold(self, chunks: Context, event: Append | Update) -> tuple[Chunk, ...]:
        folded = self._mode.fold(chunks, event)
        if not isinstance(folded, tuple | list) or not all(isinstance(chunk, Chunk) for chunk in folded):
            raise ConfigurationError(f"{part_name(self._mode)}.fold must return a tuple of chunks")
        return tuple(folded)

    async def _retrieve(self, assembler: PromptAssembler) -> AsyncGenerator[Append | Update, None]:
        """Yield the source's chunk events. Emit its other events, and raise or record its failure."""
        try:
            async with aclosing(self._source_events(assembler)) as events:
                async for event in events:
                    if isinstance(event, Skipped):
                        await self._emit(DocumentSkipped(self._now(), event.uri, event.reason))
                    elif isinstance(event, CutShort):
                        self._cut_short = event.reason
                        await self._emit(RetrievalCutShort(self._now(), event.reason))
                    else:
                        yield event
        except SourceError as error:
            await self._record_or_raise(error)
        except StreamRagError:
            raise
        except Exception as error:  # a source is foreign code: any exception means that retrieval failed
            failure = SourceError(f"{part_name(self._source)} failed: {type(error).__name__}: {message_of(error)}")
            failure.__cause__ = error
            await self._record_or_raise(failure)

    def _source_events(self, assembler: PromptAssembler) -> AsyncGenerator[SourceEvent, None]:
        events = self._retrieval.events()
        if self._recorder is None:
            return events

        async def count_tokens(chunks: Sequence[tuple[int, Chunk]]) -> list[int]:
            return await self._in_thread(partial(assembler.count_tokens, chunks))

        return self._recorder.record(self._query.text, events, count_tokens, tokenizer=self._backend.model.name)

    async def _record_or_raise(self, failure: SourceError) -> None:
        if not self._answers_despite_source_error:
            raise failure
        self._source_error = failure
        await self._emit(SourceFailed(self._now(), failure))

    async def _report(self, step: AssembledPrompt) -> None:
        self._num_invalidated += step.num_invalidated
        prompt, included = step.prompt, step.included
        lengths = len(prompt.token_ids), prompt.num_shared, step.num_invalidated
        await self._emit(ContextChanged(self._now(), len(included), *lengths, included, self._backend.model.unit))

    def _answer(self, chunks: list[AnswerChunk], last: AssembledPrompt, timings: Timings) -> Answer:
        finish_reason, model = chunks[-1].finish_reason, self._backend.model
        assert finish_reason is not None
        text = "".join(chunk.text for chunk in chunks)
        token_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
        return Answer(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            citations=tuple(
                Citation(
                    number,
                    chunk.uri,
                    chunk.title,
                    chunk.passage,
                    chunk.text,
                    chunk.score,
                    self._rank_of.get((chunk.uri, chunk.passage, chunk.text)),
                )
                for number, chunk in enumerate(last.included, start=1)
            ),
            left_out=last.left_out,
            shortened=last.shortened,
            num_prompt_tokens=len(last.prompt.token_ids),
            num_invalidated=self._num_invalidated,
            is_exact=model.is_exact,
            source_error=self._source_error,
            cut_short=self._cut_short,
            submitted_s=self._submitted_s,
            timings=timings,
            record=chunks[-1].record,
            breaks_look_alikes=model.breaks_look_alikes,
            usage=model.usage(len(last.prompt.token_ids), len(token_ids), text, chunks[-1].usage),
            unit=model.unit,
        )

    def _update_ranks(self, event: Append | Update) -> None:
        if isinstance(event, Update):
            self._rank_of = {}
        elif not self._rank_of:
            return
        for chunk in event.chunks if isinstance(event, Update) else (event.chunk,):
            self._rank_of.setdefault((chunk.uri, chunk.passage, chunk.text), len(self._rank_of) + 1)

    def _now(self) -> float:
        return self._clock() - self._submitted_s

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await in_thread(self._backend.model.tokenizer, function)
