"""The four client strategies (arms) for context that arrives in chunks, over any engine that implements `Client`.

    no-streaming      ····wait for all chunks···· generate
    warming           prefill, prefill, prefill,  generate       one-token requests that fill the prefix cache
    stock-sessions    chunk, chunk, chunk ······  answer         vLLM's own sessions, which can only append
    streaming         chunk, update, chunk ·····  answer         streamrag's scheduler

The same code runs on a real engine in wall time and on a simulated engine in virtual time.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from streamrag.backends.warming import warm_then_generate
from streamrag.core import AnswerChunk, Hint, Prompt, common_prefix_len
from streamrag_bench.cell import Arm
from streamrag_bench.workload import Arriving, PromptChange


class PromptStream(Protocol):
    """A prompt that grows. Iterating over it yields the tokens of the answer."""

    async def append(self, token_ids: Sequence[int], *, is_complete: bool = False, hint: Hint | None = None) -> None:
        """Append tokens to the prompt; `is_complete` starts sampling."""

    async def update(self, token_ids: Sequence[int], *, is_complete: bool = False, hint: Hint | None = None) -> None:
        """Replace the prompt; `is_complete` starts sampling."""

    def __aiter__(self) -> AsyncIterator[tuple[int, ...]]: ...


class Client(Protocol):
    """An engine's interface to its clients. Several requests may have the same `query_id`."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    def generate(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Yield the answer's tokens as they are generated. Closing the generator aborts the request."""

    def stream(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int, *, is_complete: bool = False
    ) -> AbstractAsyncContextManager[PromptStream]:
        """Open a prompt that grows or changes. Leaving the context aborts the request."""

    def session(
        self, query_id: str, chunks: AsyncIterator[tuple[Sequence[int], int]]
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Yield the answers' tokens. Each chunk comes with the number of tokens to answer it with; closing aborts."""


@dataclass(frozen=True, slots=True)
class QueryTiming:
    """The times of one query, on the clock of the client's event loop."""

    retrieval_end_s: float
    first_token_s: float
    finished_s: float


_Answer: TypeAlias = AsyncGenerator[tuple[int, ...], None]


async def run_query(arm: Arm, client: Client, arriving: Arriving, num_output_tokens: int) -> QueryTiming:
    """Replay one query through an arm, read its whole answer without keeping it, and return the query's times.

    An answer without tokens, or one before the prompt is complete, fails an assertion.
    """
    clock = asyncio.get_running_loop().time
    first_s: float | None = None
    async with aclosing(_ARMS[arm](client, arriving, num_output_tokens)) as answer:
        async for _ in answer:
            first_s = clock() if first_s is None else first_s
    assert first_s is not None, f"{arriving.query.query_id}: the answer has no tokens"
    assert arriving.end_s is not None, f"{arriving.query.query_id}: answered before its prompt was complete"
    return QueryTiming(arriving.end_s, first_s, clock())


async def _no_streaming(client: Client, arriving: Arriving, num_output_tokens: int) -> _Answer:
    """Wait for all pieces, each of which extends or replaces the prompt, then yield the tokens of its answer."""
    prompt: list[int] = []
    async for piece in arriving:
        prompt = prompt + piece.token_ids if piece.is_append else piece.token_ids
    async for token_ids in client.generate(arriving.query.query_id, prompt, num_output_tokens):
        yield token_ids


async def _warming(client: Client, arriving: Arriving, num_output_tokens: int) -> _Answer:
    """Prefill partial prompts by one-token requests, as `warm_then_generate` decides; yield the answer's tokens."""

    async def generate(
        token_ids: tuple[int, ...], num_tokens: int = num_output_tokens
    ) -> AsyncGenerator[AnswerChunk, None]:
        async with aclosing(client.generate(arriving.query.query_id, token_ids, num_tokens)) as answer:
            async for new in answer:
                yield AnswerChunk("", new)

    async def prefill(token_ids: tuple[int, ...]) -> None:
        async for _ in generate(token_ids, 1):
            pass

    events = warm_then_generate(_prompts(arriving), prefill=prefill, generate=generate, block_size=client.block_size)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AnswerChunk):
                yield event.token_ids


async def _prompts(pieces: AsyncIterator[PromptChange] | Arriving) -> AsyncIterator[Prompt]:
    """Yield the whole prompt after each piece, with the number of tokens that it shares with the one before."""
    prompt: tuple[int, ...] = ()
    async for piece in pieces:
        before, new = prompt, tuple(piece.token_ids)
        prompt = before + new if piece.is_append else new
        num_shared = len(before) if piece.is_append else common_prefix_len(before, prompt)
        yield Prompt(prompt, num_shared, piece.is_complete)


async def _stock_sessions(client: Client, arriving: Arriving, num_output_tokens: int) -> _Answer:
    """Send each piece to vLLM's own session, which answers all but the last by one token; yield the last answer."""
    num_discarded = 0  # each chunk before the last is answered with one token, which is not part of the answer

    async def chunks() -> AsyncIterator[tuple[Sequence[int], int]]:
        nonlocal num_discarded
        async for piece in arriving:
            num_discarded += not piece.is_complete
            yield piece.token_ids, num_output_tokens if piece.is_complete else 1

    num_received = 0
    async with aclosing(client.session(arriving.query.query_id, chunks())) as answer:
        async for token_ids in answer:
            answer_ids = token_ids[max(num_discarded - num_received, 0) :]
            num_received += len(token_ids)
            if answer_ids:
                yield answer_ids


async def _streaming(client: Client, arriving: Arriving, num_output_tokens: int) -> _Answer:
    """Open a stream with the first piece but its hint, append or update with the others; yield the answer's tokens."""
    pieces = aiter(arriving)
    first = await anext(pieces)
    opened = client.stream(arriving.query.query_id, first.token_ids, num_output_tokens, is_complete=first.is_complete)
    async with opened as stream:
        async for piece in pieces:
            send = stream.append if piece.is_append else stream.update
            await send(piece.token_ids, is_complete=piece.is_complete, hint=piece.hint)
        async for token_ids in stream:
            yield token_ids


_ARMS: dict[Arm, Callable[[Client, Arriving, int], _Answer]] = {
    "no-streaming": _no_streaming,
    "warming": _warming,
    "stock-sessions": _stock_sessions,
    "streaming": _streaming,
}
