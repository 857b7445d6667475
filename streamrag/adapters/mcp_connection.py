"""A connection to an MCP server that many queries share, and that is made anew when it is lost."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

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

from streamrag.adapters import mcp_relay
from streamrag.adapters.mcp import said
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.tasks import wait_regardless

ROOT = Path(mcp_relay.__file__).resolve().parent.parent.parent
MAX_PENDING = 1024
"""Resources that have changed and were not read yet."""
FAREWELL_S = 1.0


class Connection:
    """One client, in a task of its own, since it must be closed by the task that opened it."""

    def __init__(
        self, server: Any, *, name: str, headers: Mapping[str, str] | None, timeout_s: float, max_bytes: int
    ) -> None:
        self._server = server
        self._name = name
        self._headers = headers
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._scope = anyio.CancelScope()
        self._opening = asyncio.Lock()
        self._num_calls = 0
        self._is_lost = False
        self._watches: set[_Changes] = set()

    async def aclose(self) -> None:
        """Close it. A server that is a process has ended when this returns: mcp gives it seconds, then kills it."""
        task, self._task, self._client = self._task, None, None
        if task is not None:
            self._scope.cancel()  # not the task: mcp's clean-up is shielded from scopes only
            await wait_regardless([task])

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client, None]:
        """The client, connected.

        :raises SourceError: whatever fails in the block.
        """
        client = await self._connected()
        self._num_calls += 1
        try:
            yield client
        except StreamRagError:
            raise
        except TimeoutError as error:
            if client is self._client:
                self.doubt()
            raise SourceError(f"{self._name}: the MCP server has not answered in {self._timeout_s:g} s") from error
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message == "Session terminated":
                self._is_lost |= client is self._client
                raise SourceError(f"{self._name}: the connection to the MCP server is lost: {said(error)}") from error
            raise SourceError(f"{self._name}: the MCP server refused: {said(error)}") from error
        except Exception as error:  # what a server sends fails in many ways
            raise SourceError(f"{self._name} failed: {type(error).__name__}: {said(error)}") from error
        finally:
            self._num_calls -= 1

    def doubt(self) -> None:
        """Something is wrong: connect anew for the next call, unless others use the connection, which may be busy."""
        self._is_lost |= self._num_calls == 1

    @asynccontextmanager
    async def changes(self, client: Client, uris: Sequence[str]) -> AsyncGenerator["AsyncIterator[str]", None]:
        """The resources of `uris` that change from now on; ends when the server says no more.

        :raises SourceError: the server does not offer it.
        """
        try:
            async with self._changes(client, uris) as changes:
                yield changes
        except MCPError as error:
            if error.code != METHOD_NOT_FOUND:
                raise
            what = f"{self._name}: the MCP server does not say what changes; watch_s=0 reads once"
            raise SourceError(what) from error

    @asynccontextmanager
    async def _changes(self, client: Client, uris: Sequence[str]) -> AsyncGenerator["AsyncIterator[str]", None]:
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            async with client.listen(resource_subscriptions=uris) as subscription:
                yield (event.uri async for event in subscription if isinstance(event, ResourceUpdated))
            return
        changes = _Changes()
        self._watches.add(changes)
        try:
            for uri in uris:
                request = SubscribeRequest(params=SubscribeRequestParams(uri=uri))
                await client.session.send_request(request, EmptyResult)
            yield changes
        finally:
            self._watches.discard(changes)
            with suppress(Exception), anyio.move_on_after(FAREWELL_S, shield=True):
                for uri in uris if client is self._client and not self._is_lost else ():
                    farewell = UnsubscribeRequest(params=UnsubscribeRequestParams(uri=uri))
                    await client.session.send_request(farewell, EmptyResult)

    async def _connected(self) -> Client:
        async with self._opening:
            if self._client is None or self._is_lost or self._task is None or self._task.done():
                await self.aclose()
                self._client = await self._opened()
                self._is_lost = False
            return self._client

    async def _opened(self) -> Client:
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._scope = anyio.CancelScope()
        self._task = asyncio.create_task(self._hold(opened), name=f"{self._name} connection")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(opened)
        except TimeoutError as error:
            await self._give_up(opened)
            raise SourceError(f"{self._name}: the MCP server has not answered in {self._timeout_s:g} s") from error
        except BaseException:
            await self._give_up(opened)
            raise

    async def _give_up(self, opened: "asyncio.Future[Client]") -> None:
        opened.cancel()
        await self.aclose()

    async def _hold(self, opened: "asyncio.Future[Client]") -> None:
        """Open the client, and hold it until the scope is cancelled."""
        try:
            with self._scope:
                async with self._transport() as transport:
                    client = Client(transport, message_handler=self._hear, read_timeout_seconds=None)
                    async with client:
                        if not opened.done():
                            opened.set_result(client)
                        await anyio.sleep_forever()
        except (Exception, BaseExceptionGroup) as error:
            self._is_lost = True
            if not opened.done():
                opened.set_exception(self._cannot(error))
        finally:
            if not opened.done():
                opened.set_exception(SourceError(f"{self._name}: the source was closed while it connected"))

    def _cannot(self, error: BaseException) -> StreamRagError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, StreamRagError):
            return error
        what = f"{type(error).__name__}: {said(error)}"
        return SourceError(f"{self._name} cannot connect to the MCP server: {what}. Is it running?")

    async def _hear(self, message: object) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            for changes in self._watches:
                changes.add(str(message.params.uri))

    @asynccontextmanager
    async def _transport(self) -> AsyncGenerator[Any, None]:
        """What the client takes: all that a server says in one piece is bounded."""
        match self._server:
            case str(url):
                limits = httpx2.AsyncHTTPTransport(trust_env=False)
                async with httpx2.AsyncClient(
                    headers={**(self._headers or {}), "Accept-Encoding": "identity"},
                    timeout=httpx2.Timeout(self._timeout_s, read=None),  # calls and watches have their own limits
                    transport=_Bounded(limits, self._max_bytes),
                    trust_env=False,
                ) as http_client:
                    yield streamable_http_client(url, http_client=http_client, max_sse_event_size=self._max_bytes)
            case StdioServerParameters():
                yield stdio_client(self._relayed(self._server), errlog=_errors())
            case [str(command), *arguments]:
                yield stdio_client(self._relayed(StdioServerParameters(command=command, args=arguments)), _errors())
            case server:
                yield server

    def _relayed(self, server: StdioServerParameters) -> StdioServerParameters:
        path = (server.env or {}).get("PATH")
        if server.cwd is None and shutil.which(server.command, path=path) is None:
            raise ConfigurationError(f"{self._name}: there is no program {server.command!r} to start the MCP server")
        if os.name != "posix":
            return server
        relay = ["-P", mcp_relay.__file__, str(ROOT), str(os.getpid()), str(self._max_bytes)]
        return server.model_copy(
            update={"command": sys.executable, "args": [*relay, server.command, *server.args]},
        )


class _Changes:
    """What a server of the older protocol says has changed, each once until it is taken."""

    def __init__(self) -> None:
        self._pending: dict[str, None] = {}
        self._is_any = asyncio.Event()

    def add(self, uri: str) -> None:
        if len(self._pending) < MAX_PENDING:
            self._pending[uri] = None
        self._is_any.set()

    def __aiter__(self) -> "_Changes":
        return self

    async def __anext__(self) -> str:
        await self._is_any.wait()
        uri = next(iter(self._pending))
        del self._pending[uri]
        if not self._pending:
            self._is_any.clear()
        return uri


class _Bounded(httpx2.AsyncBaseTransport):
    """Answers in JSON have at most `max_bytes`; events are bounded by who reads them. Nothing is decompressed."""

    def __init__(self, transport: httpx2.AsyncBaseTransport, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._transport.handle_async_request(request)
        response.headers.pop("content-encoding", None)
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _BoundedBody(response.stream, self._max_bytes)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


class _BoundedBody(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._body = body
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for piece in self._body:
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise httpx2.StreamError(f"more than {self._max_bytes:,} bytes in one answer")
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()


def _errors() -> TextIO:
    """Where a server's own log goes: the standard error of the program, as it was when it started."""
    return sys.__stderr__ or sys.stderr
