"""Retrieval in mid-answer: its options, what is learned from answer to answer, and the work beside one answer.

    tokens       0 ─────────── 40 ──────────── 64 ── 71             72 ──────────
    retrieval                  ░░░░░░░░░░░░░░░░          for the text up to token 40
    prefill                                    ░░░░      of the new passage C, into the prefix cache
    requests     [ 1: passages A B, question ────────]  [ 2: passages A B C, question, tokens 0 to 71 ──────

The second prompt begins like the first one, so that the KV of A and B stays valid. The question and the tokens so far
are computed again, behind C.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Annotated, Self, TypeAlias

from pydantic import Field, TypeAdapter

from streamrag.core import AnswerChunk, Append, Chunk, Prompt, SamplingParams, Update, only, part_name
from streamrag.core.retrieval import Retrieval, closing
from streamrag.core.tokenizer_threads import in_thread
from streamrag.core.values import common_prefix_len
from streamrag.errors import ConfigurationError
from streamrag.modes import AssembledPrompt, PromptAssembler
from streamrag.modes.context import AppendMode, Context
from streamrag.query.options import Query
from streamrag.query.state import NewContext, QueryState
from streamrag.support.messages import message_of
from streamrag.support.tasks import LET_GO_S, cancel_and_wait
from streamrag.support.validation import Count, Positive, Text, check, validated
from streamrag.telemetry import RefreshSkipped

MakeQuery: TypeAlias = Callable[[str, str], str | None]
"""A function of the question and of the answer's text so far. It returns the text to retrieve for, or None for no
retrieval now."""

MAX_QUERY_CHARS = 300
"""Most characters of `latest_text`: some 64 tokens, the stride of PipeRAG."""

DECAY = 0.8
"""Weight of all earlier observations of a speed at the next one."""

QUERY: TypeAdapter[str | None] = TypeAdapter(Text | None)


def latest_text(question: str, text: str) -> str | None:
    """Return the last words of the answer's text, at most 300 characters; None if it is blank. Ignores the question.

    >>> latest_text("Where was he born?", "He was born in Ulm.")
    'He was born in Ulm.'
    """
    latest = text.strip()
    if len(latest) > MAX_QUERY_CHARS:
        latest = latest[-MAX_QUERY_CHARS:].partition(" ")[2] or latest[-MAX_QUERY_CHARS:]
    return latest or None


@dataclass(slots=True)
class MeanSeconds:
    """The mean seconds per unit of work, in which the newest observations count most."""

    amount: float = 0.0
    """Units of work that were observed, decayed; 0 before the first observation."""
    total_s: float = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Record that `amount` units took `seconds`."""
        self.amount = DECAY * self.amount + amount
        self.total_s = DECAY * self.total_s + seconds

    def seconds(self, amount: float) -> float:
        """Return the seconds that `amount` units are expected to take; 0 before the first observation."""
        return amount * self.total_s / self.amount if self.amount else 0.0


class Refresh:
    """Retrieval in mid-answer, for `pipeline.stream(query, refresh=...)`.

    Use one for all queries of a pipeline: it learns how long retrieval and prefill take.

    every_tokens: tokens of the answer from its beginning, or from the end of the last retrieval, to the next use of a
        retrieval. The retrieval begins as many tokens earlier as earlier ones in mid-answer took, at most half of
        them. The first one with these options measures that, and begins no earlier.
    max_retrievals: most retrievals in one answer.
    max_passages: most passages that one retrieval adds to the prompt: the first ones that are not in it.
    max_cost: most seconds of recomputation for each second that the rest of the answer is expected to take, which is as
        long as the answer so far, up to `max_tokens`.
    make_query: makes the text to retrieve for.

    :raises ConfigurationError: an option has an invalid value.
    """

    @validated
    def __init__(
        self,
        *,
        every_tokens: Count = 64,
        max_retrievals: Count = 4,
        max_passages: Count = 2,
        max_cost: Positive = 1.0,
        make_query: Annotated[MakeQuery, Field()] = latest_text,
    ) -> None:
        self.every_tokens = every_tokens
        self.max_retrievals = max_retrievals
        self.max_passages = max_passages
        self.max_cost = max_cost
        self._make_query = make_query
        self.retrieval = MeanSeconds()
        """Seconds per retrieval in mid-answer, with the prefill of what it found."""
        self.prefill = MeanSeconds()
        """Seconds per token of prefill, beside whatever else the engine computes."""

    def query_after(self, question: str, text: str) -> str | None:
        """Return what to retrieve for after this text of the answer; None for nothing, also if it would be blank.

        :raises ConfigurationError: `make_query` returned something else than a text or None.
        """
        query = check("the result of make_query", self._make_query(question, text), QUERY)
        return query if query and query.strip() else None

    def check_query(self, query: Query) -> None:
        """Raise ConfigurationError for options that concern the whole answer, or its only prompt, in the engine."""
        params = query.params
        given = {
            "answer_ahead": query.answer_ahead,
            "draft": bool(query.draft),
            "n above 1": params.n > 1,
            "stop": bool(params.stop),
            "json_schema": params.json_schema is not None,
            "structured_outputs": "structured_outputs" in params.extra,
            "log-probabilities of the prompt": any(name.startswith("prompt_logprob") for name in params.extra),
        }
        if refused := [name for name, is_given in given.items() if is_given]:
            raise ConfigurationError(
                f"refresh= does not work with {', '.join(refused)}: switch that off, or retrieve once, without refresh"
            )

    def begin(self, query: Query, state: QueryState, assembler: PromptAssembler) -> "StrideRefresher":
        """Return the refresher of one answer.

        :raises ConfigurationError: the model does not see exactly the tokens that are sent.
        """
        if not state.backend.model.is_exact:
            raise ConfigurationError(
                f"refresh= needs a backend that takes token ids, which {part_name(state.backend)} does not: use "
                "VllmBackend, or retrieve once, without refresh"
            )
        return StrideRefresher(self, query, state, assembler)


class StrideRefresher:
    """Retrieval beside one answer, once in a stride. An async context manager: leaving it stops what is running.

    refresh: the options, and what is known of speeds.
    state: what has happened to the query. Only the query itself writes it.
    assembler: the assembler of the query's prompts.
    """

    def __init__(self, refresh: Refresh, query: Query, state: QueryState, assembler: PromptAssembler) -> None:
        self._refresh = refresh
        self._query = query
        self._state = state
        self._assembler = assembler
        self._tokenizer = state.backend.model.tokenizer
        self._token_ids: tuple[int, ...] = ()
        self._text = ""
        self._is_open = True  # until the end of the answer is certain
        self._num_retrievals = 0
        self._due = refresh.every_tokens  # number of tokens at which the next retrieval should have ended
        self._text_to_find = ""  # of the newest retrieval
        self._preparing: asyncio.Task[NewContext | str] | None = None
        self._begun_s = state.now()  # time of the newest request
        self._first: tuple[int, float] | None = None  # number of tokens at the segment's first chunk, and its time

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._preparing is not None:
            await cancel_and_wait([self._preparing])

    def add(self, chunk: AnswerChunk) -> AnswerChunk:
        """Add a chunk to the answer so far, and learn from its time; return it, without a usage of one segment only."""
        now_s = self._state.now()
        if self._first is None:
            if self._token_ids:
                num_computed = len(self._assembler.tail) + len(self._token_ids)
                self._refresh.prefill.observe(num_computed, now_s - self._begun_s)
            self._first = len(self._token_ids) + len(chunk.token_ids), now_s
        self._token_ids += chunk.token_ids
        self._text += chunk.text
        self._is_open = chunk.finish_reason is None and len(self._token_ids) < self._query.params.max_tokens
        return replace(chunk, usage=None) if len(self._state.segments) > 1 else chunk

    async def new_context(self) -> NewContext | None:
        """Begin a retrieval if one is due. Report one that found nothing, or return the new context if the text so far
        ends with a whole character: tokens that the request has generated but not yielded are dropped then."""
        if not self._is_open:
            return None
        if self._preparing is None:
            self._begin_if_due()
        if self._preparing is None or not self._preparing.done():
            return None
        new = self._preparing.result()
        if isinstance(new, NewContext) and await in_thread(self._tokenizer, self._is_mid_character):
            return None
        self._preparing = None
        self._due = len(self._token_ids) + self._refresh.every_tokens
        if isinstance(new, str):
            await self._state.emit(RefreshSkipped(self._state.now(), self._text_to_find, new))
            return None
        self._begun_s, self._first = self._state.now(), None
        return new

    def _is_mid_character(self) -> bool:
        """Whether the last character is incomplete, and so not in the text: it has at most four bytes, or tokens."""
        return self._tokenizer.decode(self._token_ids[-8:]).endswith("\N{REPLACEMENT CHARACTER}")

    def _begin_if_due(self) -> None:
        """Begin a retrieval if it is expected to end when one is due, and if `make_query` wants one."""
        refresh, complete, num_tokens = self._refresh, self._state.complete, len(self._token_ids)
        if self._num_retrievals >= refresh.max_retrievals or complete is None or not num_tokens:
            return
        token_s, most = self._token_s(), refresh.every_tokens // 2
        lead = ceil(min(refresh.retrieval.seconds(1) / token_s, most)) if token_s else 0
        if num_tokens < self._due - lead:
            return
        text = refresh.query_after(self._query.text, self._text)
        if text is None:
            self._due = num_tokens + refresh.every_tokens
            return
        self._num_retrievals += 1
        self._text_to_find = text
        self._preparing = asyncio.create_task(self._prepare(complete, text), name="streamrag refresh")

    def _token_s(self) -> float:
        """Return the mean seconds per token of this segment; 0 while it has only one chunk."""
        num_before, first_s = self._first or (0, 0.0)
        num_tokens = len(self._token_ids) - num_before
        return (self._state.now() - first_s) / num_tokens if num_tokens > 0 else 0.0

    async def _prepare(self, complete: AssembledPrompt, text: str) -> NewContext | str:
        """Retrieve for `text`, and prefill a prompt with what is new, up to its question. Return it, or why not."""
        begun_s, retrieval = self._state.now(), self._refresh.retrieval
        try:
            new = await self._with_new_passages(complete, text, await self._retrieve(text))
            result = new if isinstance(new, str) else self._why_not_worth(new) or new
            if not isinstance(result, str):
                await self._warm_cache(result)
        except asyncio.CancelledError:  # the answer has ended: the next retrieval begins earlier
            if (at_least_s := self._state.now() - begun_s) > retrieval.seconds(1):
                retrieval.observe(1, at_least_s)
            raise
        except Exception as error:  # a source is foreign code; a backend that fails also fails the answer itself
            return f"{type(error).__name__}: {message_of(error)}"
        retrieval.observe(1, self._state.now() - begun_s)
        return result

    async def _retrieve(self, text: str) -> Sequence[Chunk]:
        """Return the context that the query's source and mode give for another text."""
        chunks = Context()
        async with aclosing(Retrieval(self._state.retrieval.source, text, let_go_s=LET_GO_S).events()) as events:
            async for event in events:
                if isinstance(event, Append | Update):
                    chunks = chunks.with_chunks(self._state.fold(chunks, event))
        return chunks

    async def _with_new_passages(
        self, complete: AssembledPrompt, text: str, found: Sequence[Chunk]
    ) -> NewContext | str:
        """Return the prompt with the first new ones of the `found` chunks behind its passages, or why there is none.

        The token budget of the query holds for all passages together; what does not fit is left out.
        """
        new = _new_passages((*complete.wholes, *complete.included), found)
        if not new:
            return "nothing new was found"
        chunks = (*complete.included, *new[: self._refresh.max_passages])  # earlier chunks come first
        is_cut_short = self._state.is_cut_short
        assemble = partial(self._assembler.assemble, chunks, is_complete=True, is_cut_short=is_cut_short)
        step = await in_thread(self._tokenizer, assemble)
        if len(step.included) == len(complete.included):
            return f"the new passages do not fit into max_context_tokens={self._assembler.max_context_tokens}"
        assert step.included[: len(complete.included)] == complete.included
        wholes = (*complete.wholes, *step.wholes[len(complete.wholes) :])
        left_out = _new_passages(wholes, (*complete.left_out, *step.left_out))
        num_shared = common_prefix_len(complete.prompt.token_ids, step.prompt.token_ids)
        step = replace(step, wholes=wholes, left_out=left_out, shortened=complete.shortened)
        return NewContext(text, step, num_shared)

    def _why_not_worth(self, new: NewContext) -> str | None:
        """Return why new context costs more than it may; None if it does not, or while speeds are unknown.

        An answer of unknown length is expected to become twice as long as it is, up to `max_tokens`.
        """
        num_tokens = len(self._token_ids)
        num_recomputed = new.num_recomputed(num_tokens)
        num_left = min(num_tokens, self._query.params.max_tokens - num_tokens)
        cost_s, token_s = self._refresh.prefill.seconds(num_recomputed), self._token_s()
        left_s = num_left * token_s
        if cost_s <= self._refresh.max_cost * left_s or not cost_s or not token_s:
            return None
        return f"{num_recomputed} tokens take {cost_s:.2g} s, and the rest of the answer perhaps {left_s:.2g} s"

    async def _warm_cache(self, new: NewContext) -> None:
        """Compute the KV of a prompt up to its question, by a request of low priority whose one token is dropped."""
        token_ids, begun_s = new.step.prompt.token_ids, self._state.now()
        num_tokens = len(token_ids) - len(self._assembler.tail)
        begin, id = token_ids[:num_tokens], self._query.conversation_id
        prompt = Prompt(begin, is_complete=True, request_class="stream", conversation_id=id)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        async with aclosing(only(prompt)) as prompts, closing(self._state.backend.generate(prompts, params)) as events:
            async for _ in events:
                pass
        self._refresh.prefill.observe(max(num_tokens - new.num_shared, 1), self._state.now() - begun_s)


def _new_passages(known: tuple[Chunk, ...], chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Return the first chunk of each passage that `known` has not."""
    return AppendMode().fold(known, Update(tuple(chunks)))[len(known) :]
