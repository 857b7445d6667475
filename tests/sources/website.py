"""A small web server on 127.0.0.1 and 127.0.0.2, with pages and faults as a test asks for them."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Reply:
    """What the server sends for a path, and how it ends."""

    body: bytes | str = ""
    status: int = 200
    content_type: str | None = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    fault: Literal["", "silent", "never ends", "breaks off", "breaks off at once", "breaks TLS"] = ""


@dataclass(frozen=True)
class Request:
    path: str
    headers: Mapping[str, str]


class Website:
    """Serves `pages`; a path that has a gate is answered once the gate is set."""

    def __init__(self) -> None:
        self.pages: dict[str, Reply] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.requests: list[Request] = []
        """But for those of robots.txt."""
        self.robots_requests: list[Request] = []
        self.num_open = 0
        self.num_connections = 0
        self.is_browsed = False
        """A browser keeps connections open as it likes."""
        self.port = 0
        self.server_names: list[str | None] = []
        """As asked for in each TLS handshake."""
        self._changed = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def add(self, path: str, body: bytes | str = "", **reply: object) -> str:
        self.pages[path] = Reply(body, **reply)  # type: ignore[arg-type]
        return self.url(path)

    def add_redirect(self, path: str, location: str, status: int = 302) -> str:
        return self.add(path, status=status, headers={"Location": location})

    def add_gate(self, path: str) -> asyncio.Event:
        return self.gates.setdefault(path, asyncio.Event())

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    async def until_asked(self, path: str) -> None:
        await self._until(lambda: path in self.paths)

    async def until_num_asked(self, num_requests: int) -> None:
        await self._until(lambda: len(self.requests) >= num_requests)

    async def until_all_closed(self) -> None:
        """Until no client has a connection open."""
        await self._until(lambda: self.num_open == 0)

    async def _until(self, condition) -> None:  # type: ignore[no-untyped-def]
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator["Website"]:
        if tls:
            tls.sni_callback = lambda _socket, name, _context: self.server_names.append(name)
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        second = await asyncio.start_server(self._connected, "127.0.0.2", self.port, ssl=tls)
        try:
            yield self
        finally:
            server.close()
            second.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await server.wait_closed()
            await second.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        self.num_open += 1
        self.num_connections += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._answer(reader, writer):
                    pass
                writer.close()
                await writer.wait_closed()
        finally:
            writer.transport.abort()
            self._connections.discard(task)
            self.num_open -= 1
            await self._notify()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may carry another request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-1])}
        path = head[0].split()[1]
        (self.robots_requests if path == "/robots.txt" else self.requests).append(Request(path, headers))
        await self._notify()
        if path in self.gates and not await self._passes(self.gates[path], reader):
            return False
        reply = self.pages.get(path, Reply("<p>There is no such page.</p>", status=404))
        body = reply.body.encode() if isinstance(reply.body, str) else reply.body
        if reply.fault == "breaks off at once":
            writer.transport.abort()
            return False
        if reply.fault != "silent":
            length = {} if reply.fault == "never ends" else {"Content-Length": str(len(body))}
            kind = {"Content-Type": reply.content_type} if reply.content_type else {}
            fields = "".join(f"{name}: {value}\r\n" for name, value in {**kind, **length, **reply.headers}.items())
            if reply.fault in ("breaks off", "breaks TLS"):
                body = body[: len(body) // 2]
            writer.write(f"HTTP/1.1 {reply.status} X\r\n{fields}\r\n".encode() + body)
            await writer.drain()
            if reply.fault == "breaks TLS":
                socket = os.dup(writer.get_extra_info("socket").fileno())
                os.write(socket, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that nobody has encrypted
                os.close(socket)
        if reply.fault in ("silent", "never ends"):
            await reader.read()  # until the client gives up
        return not reply.fault

    async def _passes(self, gate: asyncio.Event, reader: asyncio.StreamReader) -> bool:
        """Waits for the gate, or for the client to give up."""
        opened, gone = asyncio.create_task(gate.wait()), asyncio.create_task(reader.read())
        try:
            await asyncio.wait([opened, gone], return_when=asyncio.FIRST_COMPLETED)
            return not gone.done()
        finally:
            for task in (opened, gone):
                task.cancel()
            await asyncio.gather(opened, gone, return_exceptions=True)
