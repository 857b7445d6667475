"""A client of any OpenAI-compatible server for the public benchmark: it waits for retrieval, then sends one request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypeAlias

from streamrag.backends.openai.http import RequestRejectedError, Server
from streamrag.bench.arms import QueryTiming
from streamrag.bench.profile.step_times import NUM_IN_VOCABULARY
from streamrag.bench.workload import Arriving, Tokens
from streamrag.errors import ServerError, StreamRagError
from streamrag.trace.values import TracedQuery

ServerApi: TypeAlias = Literal["completions", "chat"]
"""`completions` sends token ids, exactly as many; `chat` sends a word for each token, as one message of the user."""

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
"""Common words, each one token in the vocabularies of most models."""


class ServerClient:
    """A client of one server, which asks for answers of a fixed length by vLLM's extension `ignore_eos`."""

    def __init__(self, server: Server, model: str, api: ServerApi) -> None:
        self._server = server
        self._api = api
        self.body = {"model": model, "temperature": 0, "stream": True, "ignore_eos": True}
        """Fields of all requests."""

    async def warm_up(self) -> None:
        """Answer one short request; without `ignore_eos` if the server refuses it. Raises ServerError if it fails."""
        try:
            await self.read_times(range(100, 116), 2)
        except RequestRejectedError:
            del self.body["ignore_eos"]
            await self.read_times(range(100, 116), 2)

    async def read_times(self, token_ids: Sequence[int], num_output_tokens: int) -> tuple[float, float]:
        """Send a prompt, and return the times of the first event with text, and of the end of the answer.

        :raises ServerError: the request fails, or the answer has no text.
        """
        clock = asyncio.get_running_loop().time
        first_s: float | None = None
        async with aclosing(self._events(token_ids, num_output_tokens)) as events:
            async for event in events:
                first_s = clock() if first_s is None and _has_text(event) else first_s
        if first_s is None:
            raise ServerError(f"{self._server.url} answered without any text")
        return first_s, clock()

    def _events(self, token_ids: Sequence[int], num_output_tokens: int) -> AsyncGenerator[dict[str, Any], None]:
        """Return the events of a greedy, streamed request."""
        body = {**self.body, "max_tokens": num_output_tokens}
        limits = {"max_events": 16 * num_output_tokens + 64, "max_bytes": 1 << 26, "max_event_bytes": 1 << 20}
        if self._api == "completions":
            return self._server.stream("/completions", {**body, "prompt": list(token_ids)}, **limits)
        messages = [{"role": "user", "content": " ".join(WORDS[token % len(WORDS)] for token in token_ids)}]
        return self._server.stream("/chat/completions", {**body, "messages": messages}, **limits)


def _has_text(event: dict[str, Any]) -> bool:
    """Whether an event has text of the answer, of a completion or a chat, or of its reasoning."""
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    texts = first["delta"] if isinstance(first.get("delta"), dict) else first
    return any(texts.get(name) for name in ("text", "content", "reasoning", "reasoning_content"))


async def play_on_server(
    client: ServerClient, queries: Sequence[TracedQuery], num_output_tokens: int
) -> dict[str, QueryTiming | str]:
    """Replay all queries at their times, and return by id the times from the start, or the reason of a failure."""
    clock = asyncio.get_running_loop().time
    start_s = clock()
    results: dict[str, QueryTiming | str] = {}

    async def play_one(query: TracedQuery) -> None:
        prompt: list[int] = []
        async for piece in Arriving(query, Tokens(NUM_IN_VOCABULARY), start_s):
            prompt = prompt + piece.token_ids if piece.is_append else piece.token_ids
        end_s = clock() - start_s
        try:
            first_s, last_s = await client.read_times(prompt, num_output_tokens)
        except StreamRagError as error:
            results[query.query_id] = str(error)
        else:
            results[query.query_id] = QueryTiming(end_s, first_s - start_s, last_s - start_s)

    async with asyncio.TaskGroup() as tasks:
        for query in queries:
            tasks.create_task(play_one(query), name=query.query_id)
    return results
