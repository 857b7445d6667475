"""A connection to an MCP server, which concurrent queries share, and which reconnects after a loss."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ResourceUpdated
from mcp.types import (
    CONNECTION_CLOSED,
    METHOD_NOT_FOUND,
    EmptyResult,
    ResourceUpdatedNotification,
    SubscribeRequest,
    SubscribeRequestParams,
    UnsubscribeRequest,
    UnsubscribeRequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from streamrag.adapters.mcp import relay
from streamrag.adapters.mcp.bounds import BoundedTransport, Traffic
from streamrag.display_text import excerpt
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.support.tasks import wait_shielded

ROOT = Path(relay.__file__).resolve().parents[3]
MAX_PENDING = 1024  # maximum number of changed resources that wait to be read
FAREWELL_S = 1.0

T = TypeVar("T")


class McpConnection:
    """A client of one server that reconnects. A lost client stays open until the calls that use it have ended."""

    def __init__(
        self, server: Any, *, name: str, headers: Mapping[str, str] | None, timeout_s: float, max_bytes: int
    ) -> None:
        self._server = server
        self._name = name
        self._headers = headers
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._held: _Held | None = None
        self._all_held: set[_Held] = set()
        """The current client, and lost ones with open calls."""
        self._opening: asyncio.Task[_Held] | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def aclose(self) -> None:
        """Close all clients for good, and wait for their end and a server process's, which mcp kills after seconds."""
        self._is_closed = True
        opening, self._held = self._opening, None
        for held in self._all_held:
            self._end(held)
        await wait_shielded([*self._ending, *([opening] if opening else [])])
        await wait_shielded(self._ending)  # includes tasks that were added meanwhile

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client, None]:
        """Yield a connected client; connect first if necessary. Errors of the block but our own become SourceErrors.

        The next block connects anew after a lost connection, or a timeout while the server has answered no call.
        """
        held = await self._connected()
        assert held.client
        held.num_calls += 1
        began_s = asyncio.get_running_loop().time()
        try:
            yield held.client
        except StreamRagError:
            raise
        except TimeoutError as error:
            held.is_lost |= held.traffic.answered_s < began_s  # no call was answered: the server hangs
            raise self._late() from error
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message == "Session terminated":
                held.is_lost = True
                why = held.reason or excerpt(error)
                raise SourceError(f"{self._name}: the connection to the MCP server is lost: {why}") from error
            raise SourceError(f"{self._name}: the MCP server refused: {excerpt(error)}") from error
        except Exception as error:  # invalid messages cause many kinds of errors
            raise SourceError(f"{self._name} failed: {type(error).__name__}: {excerpt(error)}") from error
        finally:
            held.num_calls -= 1
            if held.is_lost and not held.num_calls:
                self._end(held)

    async def in_time(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of `call`, or raise TimeoutError after `timeout_s`, and end the call in the background."""
        task = self._begin_task(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        finally:
            task.cancel()

    def _begin_task(self, call: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task that `aclose` waits for, and return the task."""
        task = asyncio.create_task(call, name=f"{self._name} call")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def doubt(self, client: Client) -> None:
        """Mark the client as lost, so that the next call reconnects."""
        if self._held is not None and self._held.client is client:
            self._held.is_lost = True

    @asynccontextmanager
    async def changes(self, client: Client, uris: Sequence[str]) -> AsyncGenerator["AsyncIterator[str]", None]:
        """Subscribe to `uris`, and yield an iterator of those that change; raise SourceError if the server cannot."""
        try:
            async with self._changes(client, uris) as changes:
                yield changes
        except MCPError as error:
            if error.code != METHOD_NOT_FOUND:
                raise
            raise SourceError(f"{self._name}: the MCP server has no subscriptions; use watch_s=0") from error

    @asynccontextmanager
    async def _changes(self, client: Client, uris: Sequence[str]) -> AsyncGenerator["AsyncIterator[str]", None]:
        """Subscribe, and yield an iterator of changed resources; at the end, unsubscribe in the old protocol."""
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            async with client.listen(resource_subscriptions=uris) as subscription:
                yield (event.uri async for event in subscription if isinstance(event, ResourceUpdated))
            return
        held = next(held for held in self._all_held if held.client is client)
        changes = _Changes(uris)
        held.watches.add(changes)
        try:
            async with held.subscribing:
                for uri in uris:
                    request = SubscribeRequest(params=SubscribeRequestParams(uri=uri))
                    await self.in_time(client.session.send_request(request, EmptyResult))
            yield changes
        finally:
            held.watches.discard(changes)
            if self._is_used(client):
                farewell = self._begin_task(self._unsubscribe(client, held, uris))
                await wait_shielded([farewell], at_most_s=FAREWELL_S)
                farewell.cancel()

    async def _unsubscribe(self, client: Client, held: "_Held", uris: Sequence[str]) -> None:
        """Unsubscribe from those of `uris` that no other watcher of the connection has. Errors are ignored."""
        with suppress(Exception):
            async with held.subscribing:
                for uri in uris:
                    if not any(uri in changes.uris for changes in held.watches):
                        request = UnsubscribeRequest(params=UnsubscribeRequestParams(uri=uri))
                        await client.session.send_request(request, EmptyResult)

    def _is_used(self, client: Client) -> bool:
        """Whether new calls get this client."""
        return self._held is not None and self._held.client is client and not self._held.is_lost

    async def _connected(self) -> "_Held":
        """Return the current client, or connect, in one attempt for all callers. Raises as `_opened`, or if closed."""
        if self._held is not None and self._held.client is not None and not self._held.is_lost:
            return self._held
        if self._is_closed:
            raise SourceError(f"{self._name}: the source was closed")
        if self._opening is None:
            self._opening = asyncio.create_task(self._opened(), name=f"{self._name} connects")
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._opening)

    async def _opened(self) -> "_Held":
        """Replace the client by a new one, and return it once connected; after a failure, close it, and raise."""
        if self._is_closed:  # closed before this task's first step
            self._opening = None
            raise SourceError(f"{self._name}: the source was closed")
        before, self._held = self._held, None
        if before is not None and not before.num_calls:
            self._end(before)
        held = self._held = _Held(self._max_bytes)
        held.task = asyncio.create_task(self._hold(held), name=f"{self._name} connection")
        self._all_held.add(held)
        held.task.add_done_callback(lambda _: self._all_held.discard(held))
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(held.opened)
        except TimeoutError as error:
            raise self._late() from error
        finally:
            self._opening = None
            if not held.opened.done() or held.opened.exception():
                held.opened.cancel()
                self._end(held)
        return held

    def _end(self, held: "_Held") -> None:
        """Mark a client as lost, and close it in the background, for seconds perhaps; only `aclose` waits for it."""
        held.is_lost = True
        held.scope.cancel()  # not the task: mcp's clean-up is shielded from scopes only
        if held.task is not None:
            self._ending.add(held.task)
            held.task.add_done_callback(self._ending.discard)

    def _late(self) -> SourceError:
        return SourceError(f"{self._name}: the MCP server has not answered in {self._timeout_s:g} s")

    async def _hold(self, held: "_Held") -> None:
        """Open the client, and keep it open until its scope is cancelled; set `opened`, to an error if that fails."""
        opened = held.opened
        try:
            with held.scope:
                async with self._transport(held.traffic) as transport:
                    client = Client(transport, message_handler=held.hear, read_timeout_seconds=None)
                    async with client:
                        if not opened.done():
                            held.client = client
                            opened.set_result(None)
                        await anyio.sleep_forever()
        except (Exception, BaseExceptionGroup) as error:
            if not opened.done():
                opened.set_exception(self._cannot(error))
        finally:
            held.is_lost = True
            if not opened.done():
                why = f"lost: {held.reason}" if held.reason else "closed while it connected"
                opened.set_exception(SourceError(f"{self._name}: the source was {why}"))

    def _cannot(self, error: BaseException) -> StreamRagError:
        """Return the error to raise for a failed attempt to connect: our own, or a SourceError with the first cause."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, StreamRagError):
            return error
        what = f"{type(error).__name__}: {excerpt(error)}"
        return SourceError(f"{self._name} cannot connect to the MCP server: {what}. Is it running?")

    @asynccontextmanager
    async def _transport(self, traffic: Traffic) -> AsyncGenerator[Any, None]:
        """Yield a counted transport, HTTP to an address or the relay to a command; or else the user's, unchanged."""
        match self._server:
            case str(url):
                limits = httpx2.AsyncHTTPTransport(trust_env=False)
                async with httpx2.AsyncClient(
                    headers={**(self._headers or {}), "Accept-Encoding": "identity"},
                    timeout=httpx2.Timeout(self._timeout_s, read=None),  # calls and watches have their own limits
                    transport=BoundedTransport(limits, self._max_bytes),
                    trust_env=False,
                ) as http_client:
                    yield traffic.counted(
                        streamable_http_client(url, http_client=http_client, max_sse_event_size=self._max_bytes)
                    )
            case StdioServerParameters():
                yield traffic.counted(stdio_client(self._relayed(self._server), _errors()))
            case [str(command), *arguments]:
                server = StdioServerParameters(command=command, args=arguments)
                yield traffic.counted(stdio_client(self._relayed(server), _errors()))
            case server:
                yield server

    def _relayed(self, server: StdioServerParameters) -> StdioServerParameters:
        """Return the server behind the relay, or as it is without POSIX; raise ConfigurationError without a program."""
        path = (server.env or {}).get("PATH")
        if server.cwd is None and shutil.which(server.command, path=path) is None:
            raise ConfigurationError(f"{self._name}: there is no program {server.command!r} to start the MCP server")
        if os.name != "posix":
            return server
        command = ["-P", relay.__file__, str(ROOT), str(os.getpid()), str(self._max_bytes)]
        return server.model_copy(
            update={"command": sys.executable, "args": [*command, server.command, *server.args]},
        )


class _Held:
    """A client and its task: a client must be closed by the task that opened it."""

    def __init__(self, max_bytes: int) -> None:
        self.client: Client | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.scope = anyio.CancelScope()
        self.task: asyncio.Task[None] | None = None
        self.traffic = Traffic(max_bytes, self._drop)
        self.num_calls = 0
        self.watches: set[_Changes] = set()
        self.subscribing = asyncio.Lock()
        self.is_lost = False
        """Whether new calls need another client; this one is closed when its calls have ended."""
        self.reason = ""
        """Reason why the client was dropped, if it was."""

    async def hear(self, message: object) -> None:
        """Pass on a changed resource to all watches; other messages are ignored."""
        if isinstance(message, ResourceUpdatedNotification):
            for changes in self.watches:
                changes.add(str(message.params.uri))

    def _drop(self, reason: str) -> None:
        """Mark the client as lost, keep the first reason, and cancel it."""
        self.reason = self.reason or reason
        self.is_lost = True
        self.scope.cancel()


class _Changes:
    """An iterator of changed resources, without duplicates, for servers of the older protocol."""

    def __init__(self, uris: Sequence[str]) -> None:
        self.uris = frozenset(uris)
        self._pending: dict[str, None] = {}
        self._is_any = asyncio.Event()

    def add(self, uri: str) -> None:
        """Queue a changed resource, unless too many wait; wake the reader."""
        if len(self._pending) < MAX_PENDING:
            self._pending[uri] = None
        self._is_any.set()

    def __aiter__(self) -> "_Changes":
        return self

    async def __anext__(self) -> str:
        """Wait for a changed resource, and return the oldest. Never ends by itself."""
        await self._is_any.wait()
        uri = next(iter(self._pending))
        del self._pending[uri]
        if not self._pending:
            self._is_any.clear()
        return uri


def _errors() -> TextIO:
    """Return the file for a server's log: the program's original standard error."""
    return sys.__stderr__ or sys.stderr
