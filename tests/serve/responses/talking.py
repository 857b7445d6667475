"""OpenAI's own client library, asking a service that a test runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel
import openai

from streamrag import Chunk
from tests.serve.serving import Serving

QUESTION = "What is the capital of France?"
NOTE = Chunk("Berlin is the capital of Germany.", "file:///notes/germany%20now.md", "Germany")

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


def client_of(served: Serving, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


class Talk:
    """One WebSocket, with OpenAI's client at its other end."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def events(self) -> list[Any]:
        """Up to the end of the response that is under way."""
        events = []
        async with asyncio.timeout(120):
            while not events or events[-1].type not in TERMINAL:
                events.append(await self.connection.recv())
        return events

    async def create(self, text: Any = None, after: str | None = None, **options: Any) -> Any:
        """What a request ends with: a response, or an `error` event."""
        given = {"input": text, "previous_response_id": after, **options}
        await self.connection.response.create(**{name: value for name, value in given.items() if value is not None})
        last = (await self.events())[-1]
        return last if last.type == "error" else last.response

    async def prepare(self, text: Any = None, after: str | None = None, **options: Any) -> str:
        """The id of a state that was prepared."""
        response = await self.create(text, after, generate=False, **options)
        assert response.status == "completed", response
        assert response.output == []
        return str(response.id)


@asynccontextmanager
async def talking(served: Serving, key: str = "none") -> AsyncIterator[Talk]:
    async with client_of(served, key) as client, client.responses.connect() as connection:
        yield Talk(connection)


async def settled(served: Serving, num_prompts: int, query: int = -1) -> None:
    """Until the engine has so many prompts of a query."""
    while not served.backend.prompts or len(served.backend.prompts[query]) < num_prompts:
        await anyio.lowlevel.checkpoint()


async def freed(served: Serving) -> None:
    while served.service.queries or served.backend.num_requests or served.source.num_streams:
        await anyio.lowlevel.checkpoint()
