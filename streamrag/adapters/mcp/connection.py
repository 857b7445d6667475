"""A connection to an MCP server, which concurrent queries share, and which reconnects after a loss."""

import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, ResourceUpdated
from mcp.types import CONNECTION_CLOSED, METHOD_NOT_FOUND

from streamrag.adapters.mcp.bounds import BoundedTransport, Traffic
from streamrag.display_text import excerpt
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.support.tasks import wait_shielded

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
        """Return the result of `call`, or raise TimeoutError after `timeout_s`.

        Then, or if the caller is cancelled, `call` is cancelled too, but only `aclose` waits for its end.
        """
        task = asyncio.create_task(call, name=f"{self._name} call")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        finally:
            task.cancel()

    def doubt(self, client: Client) -> None:
        """Mark the client as lost, so that the next call reconnects."""
        if self._held is not None and self._held.client is client:
            self._held.is_lost = True

    @asynccontextmanager
    async def changes(self, client: Client, uris: Sequence[str]) -> AsyncGenerator["AsyncIterator[str]", None]:
        """Subscribe to `uris`, and yield an iterator of changed ones; raise SourceError if the server cannot do it."""
        try:
            async with client.listen(resource_subscriptions=uris) as subscription:
                yield (event.uri async for event in subscription if isinstance(event, ResourceUpdated))
        except (MCPError, ListenNotSupportedError) as error:
            if isinstance(error, MCPError) and error.code != METHOD_NOT_FOUND:
                raise
            version = client.protocol_version
            raise SourceError(
                f"{self._name}: the MCP server, of protocol {version}, has no subscriptions/listen; use watch_s=0"
            ) from error

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
        """Replace the client by a new one, and return the new one once connected; if that fails, close it, and raise.

        A client before it is closed too, if no calls use it.

        :raises StreamRagError: as `_cannot` returns; SourceError if the time limit has passed or the source was closed.
        """
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
        """Open the client, set `opened`, and keep the client until its scope is cancelled or the connection fails.

        A failure before `opened` is set becomes its error, and a later one is ignored. At the end, `is_lost` is set.
        """
        opened = held.opened
        try:
            with held.scope:
                async with self._transport(held.traffic) as transport:
                    client = Client(transport, read_timeout_seconds=None)
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
        """Yield a counted transport, to an address or a command; or else the user's, unchanged."""
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
            case StdioServerParameters() | [str(), *_] as server:
                if not isinstance(server, StdioServerParameters):
                    server = StdioServerParameters(command=server[0], args=server[1:])
                self._check_program(server)
                yield traffic.counted(stdio_client(server, sys.__stderr__ or sys.stderr))  # not a replaced stderr
            case server:
                yield server

    def _check_program(self, server: StdioServerParameters) -> None:
        """Raise ConfigurationError if the server's command is not found; not checked for a server with a `cwd`."""
        path = (server.env or {}).get("PATH")
        if server.cwd is None and shutil.which(server.command, path=path) is None:
            raise ConfigurationError(f"{self._name}: there is no program {server.command!r} to start the MCP server")


class _Held:
    """A client and its task: a client must be closed by the task that opened it."""

    def __init__(self, max_bytes: int) -> None:
        self.client: Client | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.scope = anyio.CancelScope()
        self.task: asyncio.Task[None] | None = None
        self.traffic = Traffic(max_bytes, self._drop)
        self.num_calls = 0
        self.is_lost = False
        """Whether new calls need another client; this one is closed when its calls have ended."""
        self.reason = ""
        """Reason why the client was dropped, if it was."""

    def _drop(self, reason: str) -> None:
        """Mark the client as lost, keep the first reason, and cancel it."""
        self.reason = self.reason or reason
        self.is_lost = True
        self.scope.cancel()
