"""One answer with retrieval in mid-answer.

    tokens       0 ─────────── 40 ──────────── 64 ── 71             72 ──────────
    retrieval                  ░░░░░░░░░░░░░░░░          for the text up to token 40
    prefill                                    ░░░░      of the new passages, into the prefix cache
    prompts      [ 1: passages A B, question ─────────] [ 2: passages A B C, question, tokens 0 to 71 ──────

The second prompt begins like the first one, so that the KV of A and B stays valid; the question and the tokens so far
are computed again, behind C. The first request is aborted when all of its text that was received has been yielded.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from streamrag.core import (
    AnswerChunk,
    Append,
    Backend,
    BackendEvent,
    Chunk,
    Prompt,
    SamplingParams,
    Update,
    common_prefix_len,
    part_name,
)
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import ConfigurationError
from streamrag.modes import AssembledPrompt
from streamrag.modes.context import Context, passage_key
from streamrag.query.prompts import QueryPrompts
from streamrag.query.retrieval import Retrieval, closing
from streamrag.support.messages import message_of
from streamrag.support.tasks import LET_GO_S, cancel_and_wait
from streamrag.telemetry import ContextRefreshed, RefreshSkipped, Stretch

if TYPE_CHECKING:
    from streamrag.refresh.refresh import Refresh

NUM_LAST_TOKENS = 8
"""Tokens that are decoded to see whether a character is incomplete: one has at most four bytes, each a token."""


class _NewContext(NamedTuple):
    """A prompt with new passages."""

    step: AssembledPrompt
    num_shared: int
    """Leading tokens that it shares with the prompt before."""


class _Skipped(NamedTuple):
    """The end of a retrieval after which the prompt stays as it is."""

    reason: str


class RefreshedAnswer:
    """The answer to one query, generated in stretches.

    refresh: the options, and what is known of speeds.
    prompts: the query's prompts. The newest complete one, and the stretches, are kept there.
    """

    def __init__(self, refresh: "Refresh", prompts: QueryPrompts, backend: Backend) -> None:
        self._refresh = refresh
        self._prompts = prompts
        self._backend = backend
        self._token_ids: list[int] = []
        self._text = ""
        self._num_retrievals = 0
        self._due = refresh.every_tokens  # number of tokens at which a retrieval should have ended
        self._query = ""  # of the newest retrieval
        self._preparing: asyncio.Task[_NewContext | _Skipped] | None = None
        self._begun_s = 0.0  # time of the newest prompt, or at first of the beginning of retrieval
        self._first: tuple[int, float] | None = None  # tokens before, and time of, the stretch's second chunk

    async def events(self, stream: AsyncGenerator[Prompt, None]) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events of the backend for `stream`, then of a new request for each new context.

        A request is aborted, and what it has generated but not yielded is dropped, when new context is ready and the
        text so far ends with a whole character. A retrieval that fails is reported with RefreshSkipped. Closing the
        iterator, or the end of the answer, stops the retrieval that is running.

        :raises ConfigurationError: the backend does not see exactly the tokens that are sent.
        """
        if not self._prompts.model.is_exact:
            raise ConfigurationError(
                f"refresh= needs a backend that takes token ids, which {part_name(self._backend)} does not: use "
                "VllmBackend, or retrieve once, without refresh"
            )
        self._begun_s = self._prompts.now()
        try:
            requested = stream
            while True:
                params = self._rest(self._prompts.query.params)
                async with aclosing(requested), closing(self._backend.generate(requested, params)) as events:
                    async for event in events:
                        if not isinstance(event, AnswerChunk):
                            yield event
                            continue
                        yield self._noted(event)
                        if event.finish_reason is None and await self._is_refreshed():
                            break
                    else:
                        return
                requested = self._continuation()
        finally:
            if self._preparing is not None:
                await cancel_and_wait([self._preparing])

    def _rest(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters for what follows the tokens so far: less of `max_tokens` and vLLM's `min_tokens`."""
        num_tokens, extra = len(self._token_ids), dict(params.extra)
        if "min_tokens" in extra:
            extra["min_tokens"] = max(extra["min_tokens"] - num_tokens, 0)
        return replace(params, max_tokens=params.max_tokens - num_tokens, extra=extra)

    async def _continuation(self) -> AsyncGenerator[Prompt, None]:
        """Yield the newest complete prompt with the tokens so far behind it."""
        assert self._prompts.complete is not None
        yield Prompt((*self._prompts.complete.prompt.token_ids, *self._token_ids), 0, is_complete=True)

    def _noted(self, chunk: AnswerChunk) -> AnswerChunk:
        """Add a chunk to the text so far and learn from its time; return it, without a usage of only one stretch."""
        prompts, refresh, now_s = self._prompts, self._refresh, self._prompts.now()
        is_continued = len(prompts.stretches) > 1
        if self._first is None:
            if is_continued and prompts.complete is not None and prompts.assembler is not None:
                num_computed = len(prompts.assembler.tail) + len(self._token_ids)
                refresh.prefill.observe(num_computed, now_s - self._begun_s)
            self._first = len(self._token_ids) + len(chunk.token_ids), now_s
        if not prompts.stretches and prompts.complete is not None:
            if prompts.retrieval_s is not None and not refresh.retrieval.amount:
                refresh.retrieval.observe(1, prompts.retrieval_s - self._begun_s)
            prompts.stretches = (Stretch(0, prompts.query.text, len(prompts.complete.included)),)
        self._token_ids += chunk.token_ids
        self._text += chunk.text
        return replace(chunk, usage=None) if is_continued else chunk

    async def _is_refreshed(self) -> bool:
        """Begin a retrieval if one is due; if one has ended, use or report what it found. Return whether it is used."""
        task, prompts = self._preparing, self._prompts
        if task is None:
            self._begin_if_due()
            return False
        if not task.done():
            return False
        outcome = task.result()
        if isinstance(outcome, _NewContext) and await in_thread(prompts.model.tokenizer, self._is_mid_character):
            return False
        self._preparing = None
        self._due = len(self._token_ids) + self._refresh.every_tokens
        if isinstance(outcome, _Skipped):
            await prompts.emit(RefreshSkipped(prompts.now(), self._query, outcome.reason))
            return False
        await self._use(outcome)
        return True

    async def _use(self, new: _NewContext) -> None:
        """Make this the complete prompt, begin a stretch, and report it."""
        prompts, old, step = self._prompts, self._prompts.complete, new.step
        assert old is not None
        num_tokens = len(self._token_ids)
        prompts.num_invalidated += len(old.prompt.token_ids) - new.num_shared
        prompts.complete = step
        prompts.stretches += (Stretch(num_tokens, self._query, len(step.included)),)
        self._begun_s, self._first = prompts.now(), None
        added, num_recomputed = step.included[len(old.included) :], self._num_recomputed(new)
        await prompts.emit(ContextRefreshed(self._begun_s, self._query, added, num_tokens, num_recomputed))

    def _is_mid_character(self) -> bool:
        """Whether the last token leaves a character incomplete, of which its request has yielded nothing yet."""
        return self._prompts.model.tokenizer.decode(self._token_ids[-NUM_LAST_TOKENS:]).endswith(
            "\N{REPLACEMENT CHARACTER}"
        )

    def _begin_if_due(self) -> None:
        """Begin a retrieval, if it is expected to end when the next one is due and `make_query` wants one."""
        refresh, prompts, token_s = self._refresh, self._prompts, self._token_s()
        if self._num_retrievals >= refresh.max_retrievals or not self._token_ids or prompts.complete is None:
            return
        half = refresh.every_tokens // 2
        lead = min(ceil(min(refresh.retrieval.seconds(1) / token_s, half)), half) if token_s else 0
        if len(self._token_ids) < self._due - lead:
            return
        query = refresh.query_after(prompts.query.text, self._text)
        if query is None:
            self._due = len(self._token_ids) + refresh.every_tokens
            return
        self._num_retrievals += 1
        self._query = query
        self._preparing = asyncio.create_task(self._prepare(prompts.complete, query), name="streamrag refresh")

    def _token_s(self) -> float:
        """Return the mean seconds per token of this stretch; 0 while it has only one chunk."""
        num_before, first_s = self._first or (0, 0.0)
        num_tokens = len(self._token_ids) - num_before
        return (self._prompts.now() - first_s) / num_tokens if num_tokens > 0 else 0.0

    async def _prepare(self, complete: AssembledPrompt, query: str) -> _NewContext | _Skipped:
        """Retrieve for `query`; return a prompt with what is new, prefilled up to its question, if that is worth it."""
        refresh, prompts, begun_s = self._refresh, self._prompts, self._prompts.now()
        try:
            new = await self._with_new_passages(complete, await self._retrieve(query))
            outcome: _NewContext | _Skipped = (
                _Skipped("no passage was found that is new and fits") if new is None else new
            )
            if new is not None and (reason := self._why_not_worth(new)):
                outcome = _Skipped(reason)
            if isinstance(outcome, _NewContext):
                await self._prefill(outcome)
        except Exception as error:  # a source is foreign code; a backend that fails also fails the answer itself
            outcome = _Skipped(f"{type(error).__name__}: {message_of(error)}")
        refresh.retrieval.observe(1, prompts.now() - begun_s)
        return outcome

    async def _retrieve(self, query: str) -> Sequence[Chunk]:
        """Return the context that the query's source and mode give for another text."""
        chunks = Context()
        async with aclosing(Retrieval(self._prompts.source, query, let_go_s=LET_GO_S).events()) as events:
            async for event in events:
                if isinstance(event, Append | Update):
                    chunks = chunks.with_chunks(self._prompts.fold(chunks, event))
        return chunks

    async def _with_new_passages(self, complete: AssembledPrompt, chunks: Sequence[Chunk]) -> _NewContext | None:
        """Return the prompt with the first new ones of these chunks behind its passages; None if none is new or fits.

        The context's token budget is that of the query. What does not fit is left out, as at the beginning.
        """
        prompts = self._prompts
        assert prompts.assembler is not None
        known = {passage_key(chunk) for chunk in (*complete.included, *complete.shortened)}
        new = {key: chunk for chunk in reversed(chunks) if (key := passage_key(chunk)) not in known}
        added = [*reversed(new.values())][: self._refresh.max_passages]
        is_cut_short = prompts.cut_short is not None or prompts.source_error is not None
        assemble = partial(
            prompts.assembler.assemble,
            (*complete.included, *added),
            is_complete=True,
            is_cut_short=is_cut_short,
            is_ranked=True,  # so that chunks are taken as they are, the earlier ones first
        )
        step = await in_thread(prompts.model.tokenizer, assemble)
        if len(step.included) == len(complete.included):
            return None
        assert step.included[: len(complete.included)] == complete.included
        left_out = dict.fromkeys((*complete.left_out, *step.left_out)).keys() - {*step.included}
        ordered = tuple(chunk for chunk in (*complete.left_out, *step.left_out) if chunk in left_out)
        num_shared = common_prefix_len(complete.prompt.token_ids, step.prompt.token_ids)
        return _NewContext(replace(step, left_out=ordered, shortened=complete.shortened), num_shared)

    def _num_recomputed(self, new: _NewContext) -> int:
        """Return the number of tokens behind those whose KV stays valid, the answer so far included."""
        return len(new.step.prompt.token_ids) - new.num_shared + len(self._token_ids)

    def _why_not_worth(self, new: _NewContext) -> str | None:
        """Return why new context costs more than it may; None if it does not, or while the speed of prefill is unknown.

        How long an answer is nobody knows: at any place, as much again is the usual guess.
        """
        num_tokens, num_recomputed = len(self._token_ids), self._num_recomputed(new)
        num_left = min(num_tokens, self._prompts.query.params.max_tokens - num_tokens)
        cost_s, left_s = self._refresh.prefill.seconds(num_recomputed), num_left * self._token_s()
        if cost_s <= self._refresh.max_cost * left_s or not cost_s:
            return None
        return f"{num_recomputed} tokens take {cost_s:.2g} s, and the rest of the answer perhaps {left_s:.2g} s"

    async def _prefill(self, new: _NewContext) -> None:
        """Compute the KV of a prompt up to its question beside the answer, by a request whose one token is dropped.

        Its class is "stream", so that it takes no place from what callers wait for.
        """
        prompts, token_ids = self._prompts, new.step.prompt.token_ids
        assert prompts.assembler is not None
        prompt = Prompt(
            token_ids[: len(token_ids) - len(prompts.assembler.tail)], 0, is_complete=True, request_class="stream"
        )
        begun_s = prompts.now()
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        async with aclosing(_only(prompt)) as only, closing(self._backend.generate(only, params)) as events:
            async for _ in events:
                pass
        self._refresh.prefill.observe(max(len(prompt.token_ids) - new.num_shared, 1), prompts.now() - begun_s)


async def _only(prompt: Prompt) -> AsyncGenerator[Prompt, None]:
    yield prompt
