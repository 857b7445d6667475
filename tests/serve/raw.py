"""A client that writes and reads bytes of HTTP, both at once, as no polite one does.

It waits for as long as the test may run: what takes long on a busy machine is no failure.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

OPEN = {"type": "open", "query": "What is the capital of France?"}
FINISH = {"type": "finish"}


def append(text: str, uri: str = "https://geo.example/") -> dict[str, Any]:
    """A line."""
    return {"type": "append", "chunk": {"text": text, "uri": uri}}


@dataclass
class Raw:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_chunked = False
    num_left = 0

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> None:
        """A whole request, or, without a body, the head of one whose body comes in pieces."""
        content = b"" if body is None else json.dumps(body).encode()
        sized = {"transfer-encoding": "chunked"} if body is None else {"content-length": str(len(content))}
        lines = [f"{name}: {value}" for name, value in {"host": "localhost", **sized, **(headers or {})}.items()]
        await self.send("\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + content)

    async def piece(self, data: bytes) -> None:
        """A piece of a body."""
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def line(self, *lines: Any) -> None:
        """Lines of a stream, in one piece."""
        await self.piece(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    async def end(self) -> None:
        """Of the body."""
        await self.send(b"0\r\n\r\n")

    async def status(self) -> int:
        """Reads the head of the answer."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.is_chunked = headers.get("transfer-encoding") == "chunked"
        self.num_left = int(headers.get("content-length", 0))
        return int(first.split()[1])

    async def text(self) -> str:
        """Reads the rest of the answer."""
        if not self.is_chunked:
            return (await self.reader.readexactly(self.num_left)).decode()
        return "".join([piece async for piece in self._pieces()])

    async def _pieces(self) -> AsyncIterator[str]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2].decode()
        await self.reader.readexactly(2)

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The events of an answer that is SSE, as they come: each is one piece."""
        async for piece in self._pieces():
            fields = dict(line.split(": ", 1) for line in piece.splitlines() if line and not line.startswith(":"))
            if fields:
                yield fields.get("event", "message"), json.loads(fields["data"])

    async def until(self, name: str) -> dict[str, Any]:
        """The next event of that name; those before it are read."""
        async for each, values in self.events():
            if each == name:
                return values
        raise AssertionError(f"the answer ended without {name}")

    async def is_closed(self) -> bool:
        """Whether the other side closes, whatever it still says."""
        with suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass
        return True


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[Raw]:
    """A connection to a service."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 22)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()
