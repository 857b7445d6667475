"""Turn what a source retrieves for one query into prompts."""

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import Any, TypeVar

from streamrag.core import Append, Chunk, CutShort, Hint, ModelInfo, Prompt, Skipped, SourceEvent, Update, part_name
from streamrag.core.relevance import Relevance
from streamrag.core.retrieval import with_timeouts
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import SourceError, StreamRagError
from streamrag.modes import AssembledPrompt, PromptAssembler
from streamrag.modes.context import Context, passage_key
from streamrag.query.answer_ahead import AnswerAhead, why_not_drafted
from streamrag.query.options import Query
from streamrag.query.state import QueryState
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
    RetrievalCutShort,
    SourceFailed,
)

T = TypeVar("T")


def new_assembler(query: Query, model: ModelInfo) -> PromptAssembler:
    """Return an assembler with the query's options, which judges relevance if a share is reserved."""
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


class QueryPrompts:
    """The prompts of one query: partial ones while its source retrieves, then the complete one.

    `state.overlap` says which partial prompts there are. The complete prompt is the same in any case.
    """

    def __init__(self, query: Query, state: QueryState, assembler: PromptAssembler, ahead: AnswerAhead | None) -> None:
        self._query = query
        self._state = state
        self._model = state.backend.model
        self._assembler = assembler
        self._ahead = ahead
        self._origin: dict[str, Any] = {
            "source_name": part_name(state.retrieval.source),
            "conversation_id": query.conversation_id,
            "query_id": uuid.uuid4().hex,
        }
        num_head, least = len(assembler.head), self._model.min_head_len
        self.num_head = num_head if least is not None and num_head >= least else 0
        """Number of tokens before the passages, if these are worth a prompt of their own; else 0."""
        self._rank_of: dict[tuple[str, int, str], int] = {}  # in the last ranking, by uri, passage and text

    async def stream(self) -> AsyncGenerator[Prompt, None]:
        """Yield and report the head at once if it may overlap, then a partial prompt whenever one is due after chunk
        events, and begin a draft; at the end, the complete prompt, unless a draft is its answer. Call it once."""
        state = self._state
        draft = () if why_not_drafted(self._query, state) else self._query.draft
        if isinstance(draft, str):
            draft = tuple(await self._in_thread(partial(self._model.tokenizer.encode, draft)))
        chunks = Context()
        is_ranked = False
        hint: Hint | None = None
        origin = {**self._origin, "source_name": ""}  # of the head, which no chunk replaces, however the source behaves
        is_head_due = state.overlap.way == "immediate" and self.num_head > 0
        due_s = state.now() if is_head_due else inf  # for a partial prompt with the newest chunks, at first with none
        async with (
            aclosing(self._retrieve()) as retrieved,
            aclosing(with_timeouts(retrieved, lambda: None if due_s == inf else due_s - state.now())) as events,
        ):
            async for event in events:
                if event is not None:
                    chunks = await self._add(event, chunks)
                    is_ranked = is_ranked or isinstance(event, Update)  # an Append after an Update keeps the ranking
                    hint, due_s, origin = event.hint, self._due_s(event.hint), self._origin
                if due_s <= state.now():
                    due_s = inf
                    assemble = partial(self._assembler.assemble, chunks, is_complete=False, is_ranked=is_ranked)
                    step = await self._in_thread(assemble)
                    await self._report(step)
                    yield replace(step.prompt, hint=hint, **origin)
                    if self._ahead is not None:
                        preview = partial(self._assembler.preview, chunks, is_ranked=is_ranked)
                        token_ids, included = await self._in_thread(preview)
                        if included:
                            whole = Prompt(token_ids, is_complete=True, draft=draft, **self._origin)
                            await self._ahead.begin(whole, included)
        state.retrieval_s = state.now()
        options = {"is_complete": True, "is_cut_short": state.is_cut_short, "is_ranked": is_ranked}
        step = await self._in_thread(partial(self._assembler.assemble, chunks, **options))
        await self._report_complete(step)
        state.begin_segment(self._query.text, step)
        if self._ahead is not None:
            draft = await self._ahead.finish(step.prompt.token_ids) or draft
        state.num_drafted = len(draft)
        yield replace(step.prompt, draft=draft, **self._origin)

    def citations(self, chunks: Sequence[Chunk]) -> tuple[Citation, ...]:
        """Return a citation of each chunk, numbered from 1, with its place in the last ranking or None."""
        rank = self._rank_of.get
        return tuple(
            Citation(number, chunk.uri, chunk.title, chunk.passage, chunk.text, chunk.score, rank(passage_key(chunk)))
            for number, chunk in enumerate(chunks, start=1)
        )

    async def _add(self, event: Append | Update, chunks: Context) -> Context:
        """Return the context after an event; emit its new chunks, update ranks, and note when the first chunk came."""
        at_s = self._state.now()
        new = event.chunks if isinstance(event, Update) else (event.chunk,)
        for chunk in dict.fromkeys(new):
            if chunk not in chunks:
                await self._state.emit(ChunkArrived(at_s, chunk))
        chunks = chunks.with_chunks(self._state.fold(chunks, event))
        self._update_ranks(event)
        if self._state.first_chunk_s is None and chunks:
            self._state.first_chunk_s = at_s
        return chunks

    def _due_s(self, hint: Hint | None) -> float:
        """Return when, on the clock of `now`, to send the context: now, if "delayed" the lead before a forecast end, or
        infinity if "none". Set `has_forecast` once there is a forecast."""
        end_s = hint.end_s if hint is not None and hint.end_s is not None and isfinite(hint.end_s) else None
        self._state.has_forecast = self._state.has_forecast or end_s is not None
        match self._state.overlap:
            case OverlapChoice("none"):
                return inf
            case OverlapChoice("delayed", lead_s=float(lead_s)) if end_s is not None:
                return self._state.now() + max(end_s - lead_s, 0.0)
        return self._state.now()

    async def _retrieve(self) -> AsyncGenerator[Append | Update, None]:
        """Yield chunk events, emit the others, set `cut_short`. Raise or keep failures, foreign ones as SourceError."""
        try:
            async with aclosing(self._source_events()) as events:
                async for event in events:
                    if isinstance(event, Skipped):
                        await self._state.emit(DocumentSkipped(self._state.now(), event.uri, event.reason))
                    elif isinstance(event, CutShort):
                        self._state.cut_short = event.reason
                        await self._state.emit(RetrievalCutShort(self._state.now(), event.reason))
                    else:
                        yield event
        except SourceError as error:
            await self._record_or_raise(error)
        except StreamRagError:
            raise
        except Exception as error:  # a source is foreign code: any exception means that retrieval failed
            what = f"{type(error).__name__}: {message_of(error)}"
            failure = SourceError(f"{part_name(self._state.retrieval.source)} failed: {what}")
            failure.__cause__ = error
            await self._record_or_raise(failure)

    def _source_events(self) -> AsyncGenerator[SourceEvent, None]:
        """Return the source's events, passed through the recorder if there is one."""
        events = self._state.retrieval.events()
        if self._state.recorder is None:
            return events

        async def count_tokens(chunks: Sequence[tuple[int, Chunk]]) -> list[int]:
            return await self._in_thread(partial(self._assembler.count_tokens, chunks))

        return self._state.recorder.record(self._query.text, events, count_tokens, tokenizer=self._model.name)

    async def _record_or_raise(self, failure: SourceError) -> None:
        """Raise the failure, or keep and emit it where the query answers despite it."""
        if not self._state.answers_despite_source_error:
            raise failure
        self._state.source_error = failure
        await self._state.emit(SourceFailed(self._state.now(), failure))

    async def _report(self, step: AssembledPrompt) -> None:
        """Add up the invalidated tokens, and emit ContextChanged for a prompt."""
        self._state.num_invalidated += step.num_invalidated
        prompt, included = step.prompt, step.included
        lengths = len(prompt.token_ids), prompt.num_shared, step.num_invalidated
        await self._state.emit(ContextChanged(self._state.now(), len(included), *lengths, included, self._model.unit))

    async def _report_complete(self, step: AssembledPrompt) -> None:
        """Report a complete prompt, and emit what was shortened or left out, and that the context is complete."""
        await self._report(step)
        for kind, affected in ((ChunksShortened, step.shortened), (ChunksLeftOut, step.left_out)):
            if affected:
                await self._state.emit(kind(self._state.now(), affected, self._assembler.max_context_tokens))
        num_tokens, unit = len(step.prompt.token_ids), self._model.unit
        await self._state.emit(ContextComplete(self._state.now(), len(step.included), num_tokens, step.included, unit))

    def _update_ranks(self, event: Append | Update) -> None:
        """Rank an update's passages from 1, in place of all ranks; later appends follow. Without one, rank nothing."""
        if isinstance(event, Update):
            self._rank_of = {}
        elif not self._rank_of:
            return
        for chunk in event.chunks if isinstance(event, Update) else (event.chunk,):
            self._rank_of.setdefault(passage_key(chunk), len(self._rank_of) + 1)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await in_thread(self._model.tokenizer, function)
