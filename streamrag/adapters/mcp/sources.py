"""Sources that ask an MCP server: a tool, called with the query, and resources that are read and watched."""

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio.to_thread

from streamrag.core import Chunk, CutShort, Progress, Skipped, SourceEvent, Update
from streamrag.core.lifecycle import started_once
from streamrag.errors import ConfigurationError, MissingDependencyError, SourceError
from streamrag.sources.passage_reader import TEXTS, PassageReader
from streamrag.support.display_text import excerpt
from streamrag.support.messages import short
from streamrag.support.validation import Count, Seconds, SecondsOrZero, validated

if TYPE_CHECKING:
    from mcp import Client

    from streamrag.adapters.mcp.connection import Connection

MAX_TOOLS = 10_000
"""A server that has more of them, and not the one that is asked for, is not asked for further pages."""
MAX_PAGES = 100
"""Pages of a server's list of tools."""


class _McpSource:
    """A connection to a server, from `start` to `aclose`."""

    def __init__(
        self, server: Any, *, name: str, headers: Mapping[str, str] | None, timeout_s: float, max_bytes: int
    ) -> None:
        if isinstance(server, str) and not server.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"server={server!r} is no http or https address; a command is a list, as ['python', 'server.py']"
            )
        if headers is not None and not isinstance(server, str):
            raise ConfigurationError("headers are for a server with an address")
        self.name = name
        self._options = {"name": name, "headers": headers, "timeout_s": timeout_s, "max_bytes": max_bytes}
        self._server = server
        self._timeout_s = timeout_s
        self._opened: Connection | None = None

    @started_once
    async def start(self, progress: Progress) -> None:
        """Connect to the server, or start it.

        :raises MissingDependencyError: `mcp` is not installed.
        :raises ConfigurationError: the server has no such tool.
        :raises SourceError: it cannot be reached or started, or does not answer.
        """
        if importlib.util.find_spec("mcp") is None:
            raise MissingDependencyError("mcp", "pip install 'streamrag[mcp]'")
        progress(f"{self.name}: connecting to its MCP server")
        connection = await anyio.to_thread.run_sync(import_module, "streamrag.adapters.mcp.connection")  # slow: mcp
        self._opened = connection.Connection(self._server, **self._options)
        try:
            async with self._opened.client() as client:
                await self._opened.in_time(self._check(client))
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the connection; a server that was started here has ended then. Does nothing when not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened is not None:
            await opened.aclose()

    async def _check(self, client: "Client") -> None:
        """See whether the server has what this source asks for."""

    def _connection(self) -> "Connection":
        if self._opened is None:
            raise SourceError(f"{self.name} is not started: ask it through a Pipeline, or await its start(print)")
        return self._opened


class McpToolSource(_McpSource):
    """Calls a tool of an MCP server with the query, and yields what it returns as one `Update`, in its order.

    Structured content is read as `RetrieverSource` reads passages if it is a list of mappings with `text`, or holds one
    such list. Otherwise each text of the result, and each embedded resource that is text, is a passage. What is no
    text is skipped, and reported.

    One connection serves all queries; when it is lost, the query that notices fails, and the next one connects anew.
    The same goes for a server that hangs: a call ran out of time, and nobody was answered meanwhile. A server
    that was started here ends with the source, and is killed if the program is.

    server: the server's address for streamable HTTP; or the command that starts it, a list; or what else
        `mcp.Client` takes.
    tool: the tool's name.
    argument: the argument that takes the query.
    arguments: further arguments, the same for every query.
    passages: a function of mcp's `CallToolResult` that returns passages, for a result of another shape.
    name: for errors and schedulers, and the address of passages that have none; the tool's name unless given.
    headers: sent with each request to an address, as for authorisation.
    timeout_s: the longest time for connecting and for a call.
    max_bytes: the longest message of the server; one that sends more, or 65,536 values in one message, fails.

    :raises ConfigurationError: values that cannot work.
    """

    @validated
    def __init__(
        self,
        server: Any,
        tool: str,
        *,
        argument: str = "query",
        arguments: Mapping[str, Any] | None = None,
        passages: Callable[[Any], Iterable[Any]] | None = None,
        name: str = "",
        headers: Mapping[str, str] | None = None,
        timeout_s: Seconds = 30.0,
        max_bytes: Count = 4 << 20,
    ) -> None:
        super().__init__(server, name=name or tool, headers=headers, timeout_s=timeout_s, max_bytes=max_bytes)
        if arguments is not None and argument in arguments:
            raise ConfigurationError(f"arguments has {argument!r}, which is for the query")
        self._tool = tool
        self._argument = argument
        self._arguments = dict(arguments or {})
        self._passages = passages

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Call the tool with `query`, and yield its passages as one `Update`.

        :raises SourceError: the tool or the server failed, or did not answer in time.
        """
        connection = self._connection()
        async with connection.client() as client:
            call = client.call_tool(self._tool, {**self._arguments, self._argument: query})
            result = await connection.in_time(call)
        if result.is_error:
            texts = " ".join(getattr(content, "text", "") for content in result.content)
            raise SourceError(f"the tool {self._tool} failed: {excerpt(texts) or 'it does not say why'}")
        reader = PassageReader(self.name)
        found = self._passages(result) if self._passages else _structured(result.structured_content)
        chunks = None if found is None else tuple(map(reader.chunk, found))
        if chunks is None:
            read = [_content(content, self.name) for content in result.content]
            for skipped in read:
                if isinstance(skipped, Skipped):
                    yield skipped
            chunks = tuple(reader.chunk(passage) for passage in read if not isinstance(passage, Skipped))
        yield Update(chunks)

    async def _check(self, client: "Client") -> None:
        names: list[str] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tool = next((tool for tool in page.tools if tool.name == self._tool), None)
            if tool is not None:
                break
            names += [tool.name for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None or len(names) > MAX_TOOLS:
                break
        if tool is None:
            there = excerpt(", ".join(names)) or "none"
            raise ConfigurationError(f"the MCP server has no tool {self._tool!r}. Its tools: {there}")
        taken = tool.input_schema.get("properties", {})
        for name in (self._argument, *self._arguments):
            if taken and name not in taken:
                raise ConfigurationError(
                    f"the tool {self._tool!r} has no argument {name!r}. It takes: {excerpt(', '.join(taken))}"
                )


class McpResourceSource(_McpSource):
    """Reads resources of an MCP server, and yields all that it has of them as an `Update` whenever one has come.

    The resources stay in the order of `uris`, whichever of them changes. One that cannot be read is skipped, and
    reported; when none can be read, retrieval fails. Otherwise as `McpToolSource`.

    server: as of `McpToolSource`.
    uris: the resources, in prompt order. `{query}` in one of them stands for the query, percent-encoded.
    watch_s: for so many seconds the server is asked for changes, and each is an `Update`. 0 reads once.
    name: for errors and schedulers.
    headers: as of `McpToolSource`.
    timeout_s: the longest time for connecting, and for reading a resource.
    max_bytes: as of `McpToolSource`.

    :raises ConfigurationError: values that cannot work.
    """

    @validated
    def __init__(
        self,
        server: Any,
        uris: Sequence[str],
        *,
        watch_s: SecondsOrZero = 0.0,
        name: str = "McpResourceSource",
        headers: Mapping[str, str] | None = None,
        timeout_s: Seconds = 30.0,
        max_bytes: Count = 4 << 20,
    ) -> None:
        super().__init__(server, name=name, headers=headers, timeout_s=timeout_s, max_bytes=max_bytes)
        if isinstance(uris, str) or not uris or not all(isinstance(uri, str) for uri in uris):
            raise ConfigurationError(f"uris={short(uris)} must be a list of the resources' uris")
        self._uris = tuple(uris)
        self._watch_s = watch_s

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an `Update` for each resource that is read, and for each change.

        :raises SourceError: no resource can be read, or the connection is lost before they are.
        """
        uris = tuple(dict.fromkeys(uri.replace("{query}", quote(query, safe="")) for uri in self._uris))
        connection = self._connection()
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connection.client())
            changes = None
            if self._watch_s:  # from before they are read, so that no change is missed
                async with asyncio.timeout(self._timeout_s):
                    changes = await stack.enter_async_context(connection.changes(client, uris))
            end_s = asyncio.get_running_loop().time() + self._watch_s
            known: dict[str, tuple[Chunk, ...]] = {}
            reasons: list[str] = []
            for uri in uris:
                yield await self._event(client, uri, uris, known, reasons)
            if not known:
                raise SourceError(f"{self.name}: no resource can be read: {reasons[0]}")
            while changes is not None:
                uri_or_end = await self._next(changes, end_s)
                if isinstance(uri_or_end, CutShort):
                    connection.doubt(client)
                    yield uri_or_end
                if not isinstance(uri_or_end, str):
                    return
                for uri in uris:
                    if uri_or_end.startswith(uri):  # a server may name a part of what was asked for
                        before = known.get(uri)
                        event = await self._event(client, uri, uris, known, reasons)
                        if isinstance(event, Skipped) or known.get(uri) != before:
                            yield event

    async def _next(self, changes: AsyncIterator[str], end_s: float) -> str | CutShort | None:
        """Return the next resource that changes, or None when it is time to end or the server says no more."""
        if asyncio.get_running_loop().time() >= end_s:  # a change that is there already is no wait that could time out
            return None
        try:
            async with asyncio.timeout_at(end_s):
                return await anext(changes, None)
        except TimeoutError:
            return None
        except RuntimeError as error:  # mcp's SubscriptionLost
            return CutShort(f"{self.name}: the MCP server no longer says what changes: {excerpt(error)}")

    async def _event(
        self,
        client: "Client",
        uri: str,
        uris: Sequence[str],
        known: dict[str, tuple[Chunk, ...]],
        reasons: list[str],
    ) -> SourceEvent:
        read = await self._read(client, uri)
        if isinstance(read, Skipped):
            reasons.append(read.reason)
            return read
        known[uri] = read
        return Update(tuple(chunk for uri in uris for chunk in known.get(uri, ())))

    async def _read(self, client: "Client", uri: str) -> "tuple[Chunk, ...] | Skipped":
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._connection().in_time(client.read_resource(uri, cache_mode="bypass"))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise
            return Skipped(uri, excerpt(error))
        texts = [content for content in result.contents if hasattr(content, "text")]
        if not texts:
            return Skipped(uri, "it is no text")
        return tuple(Chunk(content.text, uri, passage=number) for number, content in enumerate(texts))


def _structured(value: Any) -> list[Any] | None:
    """Return the passages of structured content, or None where its shape is another."""
    if isinstance(value, Mapping) and len(value) == 1:
        (inner,) = value.values()
        value = inner if isinstance(inner, list) else value
    found = [value] if isinstance(value, Mapping) else value
    if not isinstance(found, list):
        return None
    is_read = all(isinstance(entry, Mapping) and isinstance(_text(entry), str) for entry in found)
    return found if is_read else None


def _text(entry: Mapping[str, Any]) -> Any:
    return next((entry[key] for key in TEXTS if key in entry), None)


def _content(content: Any, name: str) -> Any:
    """Return a passage, or the reason for which it is none."""
    match content.type:
        case "text":
            return content.text
        case "resource" if hasattr(content.resource, "text"):
            return (content.resource.text, str(content.resource.uri))
        case "resource":
            return Skipped(str(content.resource.uri), "it is no text")
        case "resource_link":
            return Skipped(str(content.uri), "the tool returned a link to it only")
    return Skipped(name, f"a part of the result is no text, but {content.type}")
