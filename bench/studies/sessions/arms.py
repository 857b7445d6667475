"""Ways to ask about a context that grows, on any engine that speaks `streamrag_bench.arms.Client`.

    session               data go into a session of ours, each question is a request of its own
    vLLM session, inside  data and questions go into one of vLLM's own streaming sessions, one after the other
    vLLM session, beside  data go into it, each question is a plain request whose blocks the prefix cache shares
    plain                 each question is a request with the whole text, with the prefix cache or without

What vLLM's own sessions can do (0.32): text can be appended, and every chunk is answered, with one token at least. All
tokens of an answer but the last stay in the context, so whoever asks inside asks about the data and all questions and
answers before. One chunk is worked on at a time: data wait while a question is answered. Nothing can be taken back, so
there are no forks and no window that slides; "beside" is what the prefix cache makes of that.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

from streamrag.core import Chunk, ModelInfo, SamplingParams
from streamrag.errors import BackendError
from streamrag.records import RequestRecord
from streamrag.sessions import Session
from streamrag.sessions.prompts import SESSION_TEMPLATE, SessionPrompts
from streamrag.sessions.window import Numbered
from streamrag.support.tasks import cancel_and_wait
from streamrag_bench.arms import Client

SESSION, INSIDE, BESIDE = "session", "vLLM session, inside", "vLLM session, beside"
CACHED, UNCACHED = "plain, prefix cache", "plain, nothing cached"
ARMS = (SESSION, INSIDE, BESIDE, CACHED, UNCACHED)


@dataclass(frozen=True)
class Asked:
    """One question: seconds to its first token and to its last, and what it was of."""

    first_s: float
    last_s: float
    num_tokens: int
    num_cached: int | None
    """Leading tokens that were not computed for it; None where nobody says."""
    token_ids: tuple[int, ...] = field(repr=False)


async def ask(session: Session, question: str, params: SamplingParams, **options: Any) -> Asked:
    """A session of ours."""
    stream = session.ask(question, params=params, **options)
    async for _ in stream:
        pass
    answer = stream.result
    cached = answer.record.num_from_cache if answer.record else answer.num_prompt_tokens
    return Asked(answer.timings.ttft_s, answer.timings.total_s, answer.num_prompt_tokens, cached, answer.token_ids)


async def ask_plain(client: Client, name: str, prompt: Sequence[int], num_output_tokens: int) -> Asked:
    """A request with the whole text."""
    clock = asyncio.get_running_loop().time
    began_s, first_s = clock(), 0.0
    token_ids: tuple[int, ...] = ()
    async with aclosing(client.generate(name, prompt, num_output_tokens)) as answer:
        async for new in answer:
            first_s = first_s or clock() - began_s
            token_ids += new
    last_s = clock() - began_s
    records: dict[str, list[RequestRecord]] = getattr(client, "records", {})
    num_cached = records[name][-1].num_from_cache if name in records else None
    return Asked(first_s, last_s, len(prompt), num_cached, token_ids)


class StockSession:
    """One of vLLM's own streaming sessions, chunk by chunk; an async context manager."""

    def __init__(self, client: Client) -> None:
        self._chunks: asyncio.Queue[tuple[Sequence[int], int]] = asyncio.Queue()
        self._answers = client.session("session", self._pushed())
        self._came: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self._reading: asyncio.Task[None]
        self._num_due = self._num_seen = 0
        """Tokens that answer all chunks so far, and those that have come."""
        self.num_tokens = 0
        """Of the context, as vLLM keeps it."""

    def put(self, token_ids: Sequence[int], num_output_tokens: int = 1) -> None:
        """Append to the context; so many tokens answer it, of which the last is dropped when more comes."""
        self._chunks.put_nowait((token_ids, num_output_tokens))
        self._num_due += num_output_tokens
        self.num_tokens += len(token_ids) + num_output_tokens - 1

    async def settled(self) -> tuple[int, ...]:
        """Wait for all answers; returns what is new of them."""
        token_ids: tuple[int, ...] = ()
        while self._num_seen < self._num_due:
            token_ids += await self._next()
        return token_ids

    async def ask(self, token_ids: Sequence[int], num_output_tokens: int) -> Asked:
        """A question, which stays in the context with its answer."""
        clock = asyncio.get_running_loop().time
        began_s, first_s, num_before = clock(), 0.0, self._num_due
        self.put(token_ids, num_output_tokens)
        answer: tuple[int, ...] = ()
        while self._num_seen < self._num_due:
            answer += await self._next()
            if self._num_seen > num_before:
                first_s = first_s or clock() - began_s
        num_tokens = self.num_tokens - num_output_tokens + 1
        return Asked(first_s, clock() - began_s, num_tokens, num_tokens - len(token_ids), answer[-num_output_tokens:])

    async def _next(self) -> tuple[int, ...]:
        new = await self._came.get()
        if not new:
            await self._reading  # raises what ended it
            raise BackendError("vLLM ended the session")
        self._num_seen += len(new)
        return new

    async def _read(self) -> None:
        try:
            async with aclosing(self._answers) as answers:
                async for new in answers:
                    self._came.put_nowait(new)
        finally:
            self._came.put_nowait(())

    async def _pushed(self) -> AsyncGenerator[tuple[Sequence[int], int], None]:
        while True:
            yield await self._chunks.get()

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read(), name="vLLM session")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel_and_wait([self._reading])


class Text:
    """The very prompts that a session has."""

    def __init__(self, model: ModelInfo) -> None:
        self._prompts = SessionPrompts(model, SESSION_TEMPLATE)
        self._num_pieces = 0
        self.token_ids = self._prompts.head

    def add(self, lines: Sequence[str]) -> tuple[int, ...]:
        """What is new of the prompt; the first time with its head."""
        before = len(self.token_ids) if self._num_pieces else 0
        numbered = [Numbered(self._num_pieces + i + 1, Chunk(line, "")) for i, line in enumerate(lines)]
        self._num_pieces += len(lines)
        for piece in self._prompts.pieces(numbered):
            self.token_ids += piece.token_ids
        return self.token_ids[before:]

    def complete(self, question: str) -> tuple[int, ...]:
        """The prompt for a question."""
        return self._prompts.complete(self.token_ids, question)

    def tail(self, question: str) -> tuple[int, ...]:
        """What a question adds to the data."""
        return self.complete(question)[len(self.token_ids) :]
