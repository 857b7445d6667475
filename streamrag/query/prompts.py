"""Turn what a source retrieves for one query into prompts."""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from streamrag.core import (
    AnswerChunk,
    Append,
    Chunk,
    CutShort,
    Hint,
    Mode,
    ModelInfo,
    Prompt,
    Skipped,
    SourceEvent,
    Update,
    part_name,
)
from streamrag.core.retrieval import Retrieval, with_timeouts
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.modes import AssembledPrompt, PromptAssembler
from streamrag.modes.context import Context, passage_key
from streamrag.query.answer_ahead import AnswerAhead, why_not_drafted
from streamrag.query.options import Query
from streamrag.query.relevance import Relevance
from streamrag.support.messages import message_of
from streamrag.telemetry import (
    ChunkArrived,
    ChunksLeftOut,
    ChunksShortened,
    Citation,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    OverlapChoice,
    QueryEvent,
    RetrievalCutShort,
    SourceFailed,
    Stretch,
)

if TYPE_CHECKING:
    from streamrag.trace.recorder import TraceRecorder

T = TypeVar("T")


class AnswerIsKnownError(Exception):
    """The complete prompt was answered before retrieval ended. Aborts the request to the backend."""


class QueryPrompts:
    """The prompts of one query: partial ones while its source retrieves, then the complete one.

    overlap: says which partial prompts there are. The complete prompt is the same in any case.
    now: returns the seconds since the query was submitted.
    """

    def __init__(
        self,
        query: Query,
        retrieval: Retrieval,
        model: ModelInfo,
        *,
        mode: Mode,
        overlap: OverlapChoice,
        answers_despite_source_error: bool,
        now: Callable[[], float],
        emit: Callable[[QueryEvent], Awaitable[None]],
        recorder: "TraceRecorder | None",
        ahead: AnswerAhead | None = None,
    ) -> None:
        self.query = query
        self._retrieval = retrieval
        self.source = retrieval.source
        """The source of the query."""
        self._origin: dict[str, Any] = {
            "source_name": part_name(retrieval.source),
            "conversation_id": query.conversation_id,
            "query_id": uuid.uuid4().hex,
        }
        self.model = model
        self._mode = mode
        self._overlap = overlap
        self._answers_despite_source_error = answers_despite_source_error
        self.now = now
        self.emit = emit
        self._recorder = recorder
        self._ahead = ahead
        self._draft = () if why_not_drafted(query, model, overlap) else query.draft
        self._rank_of: dict[tuple[str, int, str], int] = {}  # in the last ranking, by uri, passage and text
        self.first_chunk_s: float | None = None
        self.retrieval_s: float | None = None
        """Time at which retrieval ended; None before."""
        self.assembler: PromptAssembler
        """The assembler of the prompts, assigned when the first one is requested."""
        self.complete: AssembledPrompt | None = None
        """The complete prompt, once it was sent; with retrieval in mid-answer, the newest one."""
        self.stretches: tuple[Stretch, ...] = ()
        """The stretches of the answer so far, with retrieval in mid-answer."""
        self.num_drafted = 0
        """Length of the draft that the complete prompt was sent with."""
        self.answer: tuple[AnswerChunk, ...] = ()
        """The answer, if it was generated before retrieval ended."""
        self.num_invalidated = 0
        self.has_forecast = False
        """Whether the source said when it would end."""
        self.source_error: SourceError | None = None
        self.cut_short: str | None = None

    async def stream(self) -> AsyncGenerator[Prompt, None]:
        """Yield and report a partial prompt whenever one is due after chunk events, then begin a draft; at the end, the
        complete prompt. Before the first event, yield nothing. Call it once.

        :raises AnswerIsKnownError: there is an `answer` to the complete prompt, which is not yielded.
        """
        self.assembler = assembler = await self._in_thread(self._new_assembler)
        draft = self._draft
        if isinstance(draft, str):
            draft = tuple(await self._in_thread(partial(self.model.tokenizer.encode, draft)))
        chunks = Context()
        is_ranked = False
        hint: Hint | None = None
        due_s = inf  # for a partial prompt with the newest chunks
        async with (
            aclosing(self._retrieve(assembler)) as retrieved,
            aclosing(with_timeouts(retrieved, lambda: None if due_s == inf else due_s - self.now())) as events,
        ):
            async for event in events:
                if event is not None:
                    chunks = await self._add(event, chunks)
                    is_ranked = is_ranked or isinstance(event, Update)  # an Append after an Update keeps the ranking
                    hint, due_s = event.hint, self._due_s(event.hint)
                if due_s <= self.now():
                    due_s = inf
                    assemble = partial(assembler.assemble, chunks, is_complete=False, is_ranked=is_ranked)
                    step = await self._in_thread(assemble)
                    await self._report(step)
                    yield replace(step.prompt, hint=hint, **self._origin)
                    if self._ahead is not None:
                        preview = partial(assembler.preview, chunks, is_ranked=is_ranked)
                        token_ids, included = await self._in_thread(preview)
                        if included:
                            whole = Prompt(token_ids, is_complete=True, draft=draft, **self._origin)
                            await self._ahead.begin(whole, included)
        yield await self._complete_prompt(assembler, chunks, is_ranked=is_ranked, draft=draft)

    async def _complete_prompt(
        self, assembler: PromptAssembler, chunks: Context, *, is_ranked: bool, draft: tuple[int, ...]
    ) -> Prompt:
        """Report and return the complete prompt with its draft, or raise AnswerIsKnownError if a draft is its answer.
        Set `retrieval_s`, `complete`, `num_drafted` and `answer`."""
        self.retrieval_s = self.now()
        self.is_cut_short = self.cut_short is not None or self.source_error is not None
        options = {"is_complete": True, "is_cut_short": self.is_cut_short, "is_ranked": is_ranked}
        step = await self._in_thread(partial(assembler.assemble, chunks, **options))
        await self._report_complete(step, assembler.max_context_tokens)
        self.complete = step
        if self._ahead is not None:
            draft = await self._ahead.withdraw() or draft
            self.answer = self._ahead.answer_to(step.prompt.token_ids)
        self.num_drafted = len(draft)
        if self.answer:
            raise AnswerIsKnownError
        return replace(step.prompt, draft=draft, **self._origin)

    def citations(self, chunks: Sequence[Chunk]) -> tuple[Citation, ...]:
        """Return a citation of each chunk, numbered from 1, with its place in the last ranking or None."""
        rank = self._rank_of.get
        return tuple(
            Citation(number, chunk.uri, chunk.title, chunk.passage, chunk.text, chunk.score, rank(passage_key(chunk)))
            for number, chunk in enumerate(chunks, start=1)
        )

    async def _add(self, event: Append | Update, chunks: Context) -> Context:
        """Return the context after an event; emit its new chunks, update ranks, and note when the first chunk came."""
        at_s = self.now()
        new = event.chunks if isinstance(event, Update) else (event.chunk,)
        for chunk in dict.fromkeys(new):
            if chunk not in chunks:
                await self.emit(ChunkArrived(at_s, chunk))
        chunks = chunks.with_chunks(self.fold(chunks, event))
        self._update_ranks(event)
        if self.first_chunk_s is None and chunks:
            self.first_chunk_s = at_s
        return chunks

    def _due_s(self, hint: Hint | None) -> float:
        """Return when, on the clock of `now`, to send the context: now, if "delayed" the lead before a forecast end, or
        infinity if "none". Set `has_forecast` once there is a forecast."""
        end_s = hint.end_s if hint is not None and hint.end_s is not None and isfinite(hint.end_s) else None
        self.has_forecast = self.has_forecast or end_s is not None
        match self._overlap:
            case OverlapChoice("none"):
                return inf
            case OverlapChoice("delayed", lead_s=float(lead_s)) if end_s is not None:
                return self.now() + max(end_s - lead_s, 0.0)
        return self.now()

    def _new_assembler(self) -> PromptAssembler:
        """Return an assembler with the query's options, which judges relevance if a share is reserved."""
        query, model = self.query, self.model
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

    def fold(self, chunks: Context, event: Append | Update) -> tuple[Chunk, ...]:
        """Return the mode's new context; raise ConfigurationError if it is no tuple or list of chunks."""
        folded = self._mode.fold(chunks, event)
        if not isinstance(folded, tuple | list) or not all(isinstance(chunk, Chunk) for chunk in folded):
            raise ConfigurationError(f"{part_name(self._mode)}.fold must return a tuple of chunks")
        return tuple(folded)

    async def _retrieve(self, assembler: PromptAssembler) -> AsyncGenerator[Append | Update, None]:
        """Yield chunk events, emit the others, set `cut_short`. Raise or keep failures, foreign ones as SourceError."""
        try:
            async with aclosing(self._source_events(assembler)) as events:
                async for event in events:
                    if isinstance(event, Skipped):
                        await self.emit(DocumentSkipped(self.now(), event.uri, event.reason))
                    elif isinstance(event, CutShort):
                        self.cut_short = event.reason
                        await self.emit(RetrievalCutShort(self.now(), event.reason))
                    else:
                        yield event
        except SourceError as error:
            await self._record_or_raise(error)
        except StreamRagError:
            raise
        except Exception as error:  # a source is foreign code: any exception means that retrieval failed
            failure = SourceError(f"{part_name(self.source)} failed: {type(error).__name__}: {message_of(error)}")
            failure.__cause__ = error
            await self._record_or_raise(failure)

    def _source_events(self, assembler: PromptAssembler) -> AsyncGenerator[SourceEvent, None]:
        """Return the source's events, passed through the recorder if there is one."""
        events = self._retrieval.events()
        if self._recorder is None:
            return events

        async def count_tokens(chunks: Sequence[tuple[int, Chunk]]) -> list[int]:
            return await self._in_thread(partial(assembler.count_tokens, chunks))

        return self._recorder.record(self.query.text, events, count_tokens, tokenizer=self.model.name)

    async def _record_or_raise(self, failure: SourceError) -> None:
        """Raise the failure, or keep and emit it where the query answers despite it."""
        if not self._answers_despite_source_error:
            raise failure
        self.source_error = failure
        await self.emit(SourceFailed(self.now(), failure))

    async def _report(self, step: AssembledPrompt) -> None:
        """Add up the invalidated tokens, and emit ContextChanged for a prompt."""
        self.num_invalidated += step.num_invalidated
        prompt, included = step.prompt, step.included
        lengths = len(prompt.token_ids), prompt.num_shared, step.num_invalidated
        await self.emit(ContextChanged(self.now(), len(included), *lengths, included, self.model.unit))

    async def _report_complete(self, step: AssembledPrompt, max_context_tokens: int) -> None:
        """Report a complete prompt, and emit what was shortened or left out, and that the context is complete."""
        await self._report(step)
        for kind, affected in ((ChunksShortened, step.shortened), (ChunksLeftOut, step.left_out)):
            if affected:
                await self.emit(kind(self.now(), affected, max_context_tokens))
        num_tokens, unit = len(step.prompt.token_ids), self.model.unit
        await self.emit(ContextComplete(self.now(), len(step.included), num_tokens, step.included, unit))

    def _update_ranks(self, event: Append | Update) -> None:
        """Rank an update's passages from 1, in place of all ranks; later appends follow. Without one, rank nothing."""
        if isinstance(event, Update):
            self._rank_of = {}
        elif not self._rank_of:
            return
        for chunk in event.chunks if isinstance(event, Update) else (event.chunk,):
            self._rank_of.setdefault(passage_key(chunk), len(self._rank_of) + 1)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await in_thread(self.model.tokenizer, function)
