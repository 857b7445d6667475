"""One answer with retrieval in mid-answer.

    tokens       0 ─────────── 40 ──────────── 64 ── 71             72 ──────────
    retrieval                  ░░░░░░░░░░░░░░░░          for the text up to token 40
    prefill                                    ░░░░      of the new passage C, into the prefix cache
    requests     [ 1: passages A B, question ────────]  [ 2: passages A B C, question, tokens 0 to 71 ──────

The second prompt begins like the first one, so that the KV of A and B stays valid. The question and the tokens so far
are computed again, behind C.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
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
    only,
    part_name,
)
from streamrag.core.retrieval import Retrieval, closing
from streamrag.core.tokenizer_threads import in_thread
from streamrag.core.values import common_prefix_len
from streamrag.errors import ConfigurationError
from streamrag.modes import AssembledPrompt
from streamrag.modes.context import Context, passage_key
from streamrag.query.prompts import QueryPrompts
from streamrag.support.messages import message_of
from streamrag.support.tasks import LET_GO_S, cancel_and_wait
from streamrag.telemetry import ContextRefreshed, RefreshSkipped, Stretch

if TYPE_CHECKING:
    from streamrag.refresh.refresh import Refresh


class _NewContext(NamedTuple):
    """A complete prompt with new passages, and the number of leading tokens that it shares with the prompt before."""

    step: AssembledPrompt
    num_shared: int


class RefreshedBackend:
    """A backend for one query, which generates the answer in stretches by another backend.

    refresh: the options, and what is known of speeds.
    prompts: the query's prompts, whose newest complete one and stretches are kept there.
    """

    def __init__(self, refresh: "Refresh", prompts: QueryPrompts, backend: Backend) -> None:
        self._refresh = refresh
        self._prompts = prompts
        self._backend = backend
        self.model = backend.model
        self._conversation_id = prompts.query.conversation_id
        self._token_ids: tuple[int, ...] = ()
        self._text = ""
        self._num_retrievals = 0
        self._due = refresh.every_tokens  # number of tokens at which the next retrieval should have ended
        self._query = ""  # of the newest retrieval
        self._preparing: asyncio.Task[_NewContext | str] | None = None
        self._begun_s = prompts.now()  # time of the newest request
        self._first: tuple[int, float] | None = None  # number of tokens at the stretch's first chunk, and its time

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events of the backend for `prompts`, then of a new request for each new context.

        When new context is ready, and the text so far ends with a whole character, the request is aborted; tokens that
        it has generated but not yielded are dropped, and chunks have no `usage` from then on. Closing the iterator, or
        the end of the answer, stops the retrieval that is running.

        :raises ConfigurationError: the model does not see exactly the tokens that are sent.
        """
        if not self.model.is_exact:
            raise ConfigurationError(
                f"refresh= needs a backend that takes token ids, which {part_name(self._backend)} does not: use "
                "VllmBackend, or retrieve once, without refresh"
            )
        try:
            while True:
                async with closing(prompts), closing(self._backend.generate(prompts, self._rest(params))) as events:
                    async for event in events:
                        yield self._noted(event) if isinstance(event, AnswerChunk) else event
                        is_open = isinstance(event, AnswerChunk) and event.finish_reason is None
                        if is_open and len(self._token_ids) < params.max_tokens and await self._is_refreshed():
                            break
                    else:
                        return
                assert self._prompts.complete is not None
                token_ids = (*self._prompts.complete.prompt.token_ids, *self._token_ids)
                prompts = only(Prompt(token_ids, is_complete=True, conversation_id=self._conversation_id))
        finally:
            if self._preparing is not None:
                await cancel_and_wait([self._preparing])

    def _rest(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters for what follows the tokens so far: less of `max_tokens` and of vLLM's `min_tokens`."""
        num_tokens, extra = len(self._token_ids), dict(params.extra)
        if num_tokens and "min_tokens" in extra:
            extra["min_tokens"] = max(extra["min_tokens"] - num_tokens, 0)
        return replace(params, max_tokens=params.max_tokens - num_tokens, extra=extra)

    def _noted(self, chunk: AnswerChunk) -> AnswerChunk:
        """Add a chunk to the answer so far, and learn from its time; return it, without a usage of one stretch only."""
        prompts, refresh, now_s = self._prompts, self._refresh, self._prompts.now()
        if self._first is None:
            if self._token_ids:
                num_computed = len(prompts.assembler.tail) + len(self._token_ids)
                refresh.prefill.observe(num_computed, now_s - self._begun_s)
            self._first = len(self._token_ids) + len(chunk.token_ids), now_s
        if not prompts.stretches and prompts.complete is not None:
            prompts.stretches = (Stretch(0, prompts.query.text, len(prompts.complete.included)),)
        self._token_ids += chunk.token_ids
        self._text += chunk.text
        return replace(chunk, usage=None) if len(prompts.stretches) > 1 else chunk

    async def _is_refreshed(self) -> bool:
        """Begin a retrieval if one is due; use or report one that has ended. Return whether there is a new prompt."""
        task, prompts = self._preparing, self._prompts
        if task is None:
            self._begin_if_due()
        if task is None or not task.done():
            return False
        new = task.result()
        if not isinstance(new, str) and await in_thread(self.model.tokenizer, self._is_mid_character):
            return False
        self._preparing = None
        num_tokens, old = len(self._token_ids), prompts.complete
        self._due = num_tokens + self._refresh.every_tokens
        if isinstance(new, str) or old is None:
            await prompts.emit(RefreshSkipped(prompts.now(), self._query, str(new)))
            return False
        prompts.num_invalidated += len(old.prompt.token_ids) - new.num_shared
        prompts.complete = new.step
        prompts.stretches += (Stretch(num_tokens, self._query, len(new.step.included)),)
        self._begun_s, self._first = prompts.now(), None
        added, num_recomputed = new.step.included[len(old.included) :], self._num_recomputed(new)
        await prompts.emit(ContextRefreshed(self._begun_s, self._query, added, num_tokens, num_recomputed))
        return True

    def _is_mid_character(self) -> bool:
        """Whether the last character is incomplete, and so not in the text: it has at most four bytes, or tokens."""
        return self.model.tokenizer.decode(self._token_ids[-8:]).endswith("\N{REPLACEMENT CHARACTER}")

    def _begin_if_due(self) -> None:
        """Begin a retrieval if it is expected to end when one is due, and if `make_query` wants one."""
        refresh, prompts, num_tokens = self._refresh, self._prompts, len(self._token_ids)
        if self._num_retrievals >= refresh.max_retrievals or prompts.complete is None or not num_tokens:
            return
        token_s, most = self._token_s(), refresh.every_tokens // 2
        lead = ceil(min(refresh.retrieval.seconds(1) / token_s, most)) if token_s else 0
        if num_tokens < self._due - lead:
            return
        query = refresh.query_after(prompts.query.text, self._text)
        if query is None:
            self._due = num_tokens + refresh.every_tokens
            return
        self._num_retrievals += 1
        self._query = query
        self._preparing = asyncio.create_task(self._prepare(prompts.complete, query), name="streamrag refresh")

    def _token_s(self) -> float:
        """Return the mean seconds per token of this stretch; 0 while it has only one chunk."""
        num_before, first_s = self._first or (0, 0.0)
        num_tokens = len(self._token_ids) - num_before
        return (self._prompts.now() - first_s) / num_tokens if num_tokens > 0 else 0.0

    async def _prepare(self, complete: AssembledPrompt, query: str) -> _NewContext | str:
        """Retrieve for `query`, and prefill a prompt with what is new, up to its question. Return it, or why not."""
        begun_s = self._prompts.now()
        try:
            new = await self._with_new_passages(complete, await self._retrieve(query))
            result = new if isinstance(new, str) else self._why_not_worth(new) or new
            if not isinstance(result, str):
                await self._prefill(result)
        except Exception as error:  # a source is foreign code; a backend that fails also fails the answer itself
            result = f"{type(error).__name__}: {message_of(error)}"
        self._refresh.retrieval.observe(1, self._prompts.now() - begun_s)
        return result

    async def _retrieve(self, query: str) -> Sequence[Chunk]:
        """Return the context that the query's source and mode give for another text."""
        chunks = Context()
        async with aclosing(Retrieval(self._prompts.source, query, let_go_s=LET_GO_S).events()) as events:
            async for event in events:
                if isinstance(event, Append | Update):
                    chunks = chunks.with_chunks(self._prompts.fold(chunks, event))
        return chunks

    async def _with_new_passages(self, complete: AssembledPrompt, chunks: Sequence[Chunk]) -> _NewContext | str:
        """Return the prompt with the first new ones of these chunks behind its passages, or why there is none.

        The token budget of the query holds for all passages together; what does not fit is left out.
        """
        prompts = self._prompts
        known = {passage_key(chunk) for chunk in (*complete.included, *complete.shortened)}
        new = {key: chunk for chunk in reversed(chunks) if (key := passage_key(chunk)) not in known}
        if not new:
            return "nothing new was found"
        added = [*reversed(new.values())][: self._refresh.max_passages]
        options = {"is_complete": True, "is_cut_short": prompts.is_cut_short, "is_ranked": True}  # earlier chunks first
        assemble = partial(prompts.assembler.assemble, (*complete.included, *added), **options)
        step = await in_thread(self.model.tokenizer, assemble)
        if len(step.included) == len(complete.included):
            return f"the new passages do not fit into max_context_tokens={prompts.assembler.max_context_tokens}"
        assert step.included[: len(complete.included)] == complete.included
        left_out = dict.fromkeys(each for each in (*complete.left_out, *step.left_out) if each not in step.included)
        num_shared = common_prefix_len(complete.prompt.token_ids, step.prompt.token_ids)
        return _NewContext(replace(step, left_out=tuple(left_out), shortened=complete.shortened), num_shared)

    def _num_recomputed(self, new: _NewContext) -> int:
        """Return the number of tokens behind those whose KV stays valid, the answer so far included."""
        return len(new.step.prompt.token_ids) - new.num_shared + len(self._token_ids)

    def _why_not_worth(self, new: _NewContext) -> str | None:
        """Return why new context costs more than it may; None if it does not, or while the speed of prefill is unknown.

        An answer of unknown length is expected to become twice as long as it is, up to `max_tokens`.
        """
        num_tokens, num_recomputed = len(self._token_ids), self._num_recomputed(new)
        num_left = min(num_tokens, self._prompts.query.params.max_tokens - num_tokens)
        cost_s, left_s = self._refresh.prefill.seconds(num_recomputed), num_left * self._token_s()
        if cost_s <= self._refresh.max_cost * left_s or not cost_s:
            return None
        return f"{num_recomputed} tokens take {cost_s:.2g} s, and the rest of the answer perhaps {left_s:.2g} s"

    async def _prefill(self, new: _NewContext) -> None:
        """Compute the KV of a prompt up to its question, by a request of low priority whose one token is dropped."""
        token_ids, begun_s = new.step.prompt.token_ids, self._prompts.now()
        num_tokens = len(token_ids) - len(self._prompts.assembler.tail)
        begin, id = token_ids[:num_tokens], self._conversation_id
        prompt = Prompt(begin, is_complete=True, request_class="stream", conversation_id=id)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        async with aclosing(only(prompt)) as prompts, closing(self._backend.generate(prompts, params)) as events:
            async for _ in events:
                pass
        self._refresh.prefill.observe(max(num_tokens - new.num_shared, 1), self._prompts.now() - begun_s)
