"""A client of any OpenAI-compatible server for the public benchmark: it waits for retrieval, then sends one request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from streamrag.backends.openai.http import RequestRejectedError, Server
from streamrag.errors import ServerError, StreamRagError
from streamrag.trace.values import TracedQuery
from streamrag_bench.arms import QueryTiming
from streamrag_bench.profile.step_times import NUM_IN_VOCABULARY
from streamrag_bench.workload import Arriving, Tokens

ServerApi: TypeAlias = Literal["completions", "chat"]
"""`completions` sends token ids, exactly as many; `chat` sends a word for each token, as one message of the user."""

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
"""Common words, each one token in the vocabularies of most models."""


class ServerClient:
    """A client of one server. It asks for answers of a fixed length that share no prefix cache with earlier clients."""

    def __init__(self, server: Server, model: str, api: ServerApi) -> None:
        self._server = server
        self._api = api
        self.body: dict[str, Any] = {"model": model, "temperature": 0, "stream": True}
        """Fields of all requests."""
        self.num_short: int | None = None
        """Number of answers that were shorter than asked for; None if no answer told its length."""

    async def warm_up(self) -> None:
        """Answer short requests, and keep the optional fields that the server accepts.

        :raises ServerError: the server fails, or refuses a request without these fields.
        """
        optional = {"ignore_eos": True, "return_token_ids": True, "cache_salt": uuid4().hex}
        await self._try()
        for name, value in {**optional, "stream_options": {"include_usage": True}}.items():
            self.body[name] = value
            try:
                await self._try()
            except RequestRejectedError:
                del self.body[name]

    async def _try(self) -> None:
        """Answer a short request, perhaps without any text. Raises ServerError if it fails."""
        async with aclosing(self._events(range(100, 116), 2)) as events:
            async for _ in events:
                pass

    async def read_times(self, token_ids: Sequence[int], num_output_tokens: int) -> tuple[float, float]:
        """Send a prompt, and return the times of the first event with a token, and of the end of the answer.

        :raises ServerError: the request fails, or the answer has no token.
        """
        clock = asyncio.get_running_loop().time
        first_s: float | None = None
        usage: object = None
        async with aclosing(self._events(token_ids, num_output_tokens)) as events:
            async for event in events:
                first_s = clock() if first_s is None and _has_token(event) else first_s
                usage = event.get("usage") or usage
        if first_s is None:
            raise ServerError(f"{self._server.url} answered without any text")
        if isinstance(usage, dict) and isinstance(num := usage.get("completion_tokens"), int):
            self.num_short = (self.num_short or 0) + (num < num_output_tokens)
        return first_s, clock()

    def _events(self, token_ids: Sequence[int], num_output_tokens: int) -> AsyncGenerator[dict[str, Any], None]:
        """Return the events of a greedy, streamed request."""
        body = {**self.body, "max_tokens": num_output_tokens}
        # The first event of vLLM repeats the prompt's token ids.
        limits = {"max_events": 16 * num_output_tokens + 64, "max_bytes": 1 << 26, "max_event_bytes": 1 << 22}
        if self._api == "completions":
            return self._server.stream("/completions", {**body, "prompt": list(token_ids)}, **limits)
        messages = [{"role": "user", "content": " ".join(WORDS[token % len(WORDS)] for token in token_ids)}]
        return self._server.stream("/chat/completions", {**body, "messages": messages}, **limits)


def _has_token(event: dict[str, Any]) -> bool:
    """Whether an event has token ids or text of the answer, of a completion or a chat, or of its reasoning."""
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    texts = first["delta"] if isinstance(first.get("delta"), dict) else first
    names = ("text", "content", "reasoning", "reasoning_content")
    return bool(first.get("token_ids")) or any(texts.get(name) for name in names)


async def play_on_server(
    client: ServerClient, queries: Sequence[TracedQuery], num_output_tokens: int
) -> dict[str, QueryTiming | str]:
    """Replay all queries at their times, and return by id the times from the start, or the reason of a failure."""
    clock = asyncio.get_running_loop().time
    start_s = clock()
    results: dict[str, QueryTiming | str] = {}

    async def play_one(query: TracedQuery) -> None:
        prompt: list[int] = []
        arriving = Arriving(query, Tokens(NUM_IN_VOCABULARY), start_s)
        async for piece in arriving:
            prompt = prompt + piece.token_ids if piece.is_append else piece.token_ids
        assert arriving.end_s is not None, f"{query.query_id}: its prompt is not complete"
        try:
            first_s, last_s = await client.read_times(prompt, num_output_tokens)
        except StreamRagError as error:
            results[query.query_id] = str(error)
        else:
            results[query.query_id] = QueryTiming(arriving.end_s - start_s, first_s - start_s, last_s - start_s)

    async with asyncio.TaskGroup() as tasks:
        for query in queries:
            tasks.create_task(play_one(query), name=query.query_id)
    return results
