"""Sources on an MCP server: a tool that is called with the query, and resources that are read and watched."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio.to_thread

from streamrag.core import Chunk, CutShort, Progress, Skipped, SourceEvent, Update
from streamrag.core.lifecycle import started_once
from streamrag.core.retrieval import BlankChunks
from streamrag.core.text import is_blank
from streamrag.display_text import excerpt
from streamrag.errors import ConfigurationError, SourceError, require_modules
from streamrag.sources.passage_reader import URIS, PassageReader, text_of
from streamrag.support.messages import short_repr
from streamrag.support.tasks import cancel_and_wait
from streamrag.support.validation import Count, Flag, Seconds, SecondsOrZero, validated

if TYPE_CHECKING:
    from mcp import Client

    from streamrag.adapters.mcp.connection import McpConnection

MAX_TOOLS = 10_000  # number of tools after which the search for a tool stops
MAX_PAGES = 100  # maximum number of pages of a server's list of tools


class _McpSource:
    """A base class of sources with a connection to a server."""

    def __init__(
        self, server: Any, *, name: str, headers: Mapping[str, str] | None, timeout_s: float, max_bytes: int
    ) -> None:
        if isinstance(server, str) and not server.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"server={server!r} is not an http or https address; a command is a list, as ['python', 'server.py']"
            )
        if headers is not None and not isinstance(server, str):
            raise ConfigurationError("headers need a server with an http or https address")
        self.name = name
        self._options = {"name": name, "headers": headers, "timeout_s": timeout_s, "max_bytes": max_bytes}
        self._server = server
        self._timeout_s = timeout_s
        self._opened: McpConnection | None = None

    @started_once
    async def start(self, progress: Progress) -> None:
        """Start the server if it is a command, connect to it, and run `_check`; after an error, close all again.

        :raises AlreadyStartedError: the source is started.
        :raises MissingDependencyError: `mcp` is not installed.
        :raises ConfigurationError: the server has no such tool, or its command is no program.
        :raises SourceError: the server cannot be started or reached, or does not answer.
        """
        require_modules("mcp", "mcp")
        progress(f"{self.name}: connecting to its MCP server")
        connection = await anyio.to_thread.run_sync(import_module, "streamrag.adapters.mcp.connection")  # slow
        self._opened = connection.McpConnection(self._server, **self._options)
        try:
            async with self._opened.client() as client:
                await self._opened.in_time(self._check(client))
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the connection, and wait for the end of a server process. Does nothing if not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened is not None:
            await opened.aclose()

    async def _check(self, client: "Client") -> None:
        """Raise ConfigurationError if the server lacks what this source needs."""

    def _connection(self) -> "McpConnection":
        """Return the connection; raise SourceError if the source is not started."""
        if self._opened is None:
            raise SourceError(f"{self.name} is not started: use it in a Pipeline, or await its start(print)")
        return self._opened


class McpToolSource(_McpSource):
    """A source that calls a tool of an MCP server with the query, and yields the results as one `Update`.

    If the structured content is, or has among its fields, one list of mappings with `text`, these are passages as for
    `RetrieverSource`. Otherwise each text and each embedded text resource of the result is a passage. Other content is
    skipped, and reported.

    All queries share one connection. If it is lost, or the server answers no call within a timeout, the current queries
    fail, and the next one reconnects. A server process ends with the source.

    server: the server's address for streamable HTTP; or the command that starts it, as a list; or anything else that
        `mcp.Client` accepts.
    tool: the tool's name.
    argument: the tool's argument for the query.
    arguments: other arguments, the same for every query.
    passages: a function that returns the passages of mcp's `CallToolResult`, for results of another shape.
    reads_progress: whether the messages of the tool's progress are a passage until the result replaces it.
    name: name of the source, and the address of passages without one; by default the tool's name.
    headers: HTTP headers for each request to an address, such as for authorization.
    timeout_s: time limit for connecting, and for a call.
    max_bytes: maximum bytes of a server's answer; over HTTP, an answer may also have at most 65,536 values.

    :raises ConfigurationError: a value is invalid.
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
        reads_progress: Flag = False,
        name: str = "",
        headers: Mapping[str, str] | None = None,
        timeout_s: Seconds = 30.0,
        max_bytes: Count = 4 << 20,
    ) -> None:
        super().__init__(server, name=name or tool, headers=headers, timeout_s=timeout_s, max_bytes=max_bytes)
        if arguments is not None and argument in arguments:
            raise ConfigurationError(f"arguments must not have {argument!r}, which is the query's")
        self._tool = tool
        self._argument = argument
        self._arguments = dict(arguments or {})
        self._passages = passages
        self._reads_progress = reads_progress
        self._max_chars = max_bytes

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Call the tool, and yield its passages as one `Update`, which may be empty; before it, with `reads_progress`,
        an update as messages come.

        The passages come from the user's function `passages`, if there is one, or else from structured content. If that
        gives None, each part is a passage. What has no text is a `Skipped` before the update; an empty result is one
        instead of it.

        :raises SourceError: the tool or server failed or did not answer in time, or the source is not started.
        """
        connection = self._connection()
        messages = asyncio.Queue[str | None]()

        async def report(progress: float, total: float | None, message: str | None) -> None:
            messages.put_nowait(message or "")

        async with connection.client() as client:
            arguments = {**self._arguments, self._argument: query}
            on_progress = report if self._reads_progress else None
            call = client.call_tool(self._tool, arguments, progress_callback=on_progress)
            calling = asyncio.create_task(connection.in_time(call), name=f"{self.name} query")
            calling.add_done_callback(lambda _: messages.put_nowait(None))
            try:
                text = ""
                while (message := await messages.get()) is not None:
                    text += f"{message}\n" if message and len(text) < self._max_chars else ""
                    if messages.empty() and text:
                        yield Update((Chunk(text, self.name),))
                result = calling.result()
            finally:
                await cancel_and_wait([calling])
        if result.is_error:
            texts = " ".join(getattr(content, "text", "") for content in result.content)
            raise SourceError(f"the tool {self._tool} failed: {excerpt(texts) or 'without a reason'}")
        reader = PassageReader(self.name)
        found = self._passages(result) if self._passages else _structured(result.structured_content, self.name)
        if found is None:
            found = [_content(content, self.name) for content in result.content]
            if not found:
                yield Skipped(self.name, "the tool returned nothing")
                return
        passages = list(found)
        for skipped in passages:
            if isinstance(skipped, Skipped):
                yield skipped
        chunks = tuple(reader.chunk(passage) for passage in passages if not isinstance(passage, Skipped))
        for event in reader.skip_blank(Update(chunks)):
            yield event

    async def _check(self, client: "Client") -> None:
        """Raise ConfigurationError if the server lists no such tool, or the tool's arguments, if listed, lack ours."""
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
            tools = excerpt(", ".join(names)) or "none"
            raise ConfigurationError(f"the MCP server has no tool {self._tool!r}. Its tools: {tools}")
        properties = tool.input_schema.get("properties", {})
        for name in (self._argument, *self._arguments):
            if properties and name not in properties:
                raise ConfigurationError(
                    f"the tool {self._tool!r} has no argument {name!r}. It takes: {excerpt(', '.join(properties))}"
                )


class McpResourceSource(_McpSource):
    """A source of an MCP server's resources, which yields an `Update` with all of them whenever one is read or changes.

    The context keeps the order of `uris`. A resource that cannot be read is skipped, and reported; if none can be read,
    retrieval fails. Connections work as for `McpToolSource`.

    server: as for `McpToolSource`.
    uris: the resources, in prompt order. `{query}` in them is replaced by the percent-encoded query.
    watch_s: seconds to watch the resources; each change is an `Update`. 0 reads them once. Needs a server of MCP's
        protocol of 2026-07-28 or later.
    name: name of the source.
    headers: as for `McpToolSource`.
    timeout_s: time limit for connecting, and for reading a resource.
    max_bytes: as for `McpToolSource`.

    :raises ConfigurationError: a value is invalid.
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
            raise ConfigurationError(f"uris={short_repr(uris)} must be a non-empty list of uris")
        self._uris = tuple(uris)
        self._watch_s = watch_s

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Read the resources, whose URIs have the query in place of `{query}`; yield an `Update` or `Skipped` for each.

        After that, until `watch_s` seconds after subscribing, yield one for each change of a resource's texts. A
        resource that can no longer be read is a `Skipped`, and keeps its texts. If the subscription is lost, yield a
        `CutShort`; if the server closes it in order, just end.

        :raises SourceError: no resource can be read, the connection is lost meanwhile, the server does not answer in
            time or has no subscriptions, or the source is not started.
        """
        uris = tuple(dict.fromkeys(uri.replace("{query}", quote(query, safe="")) for uri in self._uris))
        connection = self._connection()
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connection.client())
            changes = None
            if self._watch_s:  # subscribe before reading, so that no change is missed
                async with asyncio.timeout(self._timeout_s):
                    changes = await stack.enter_async_context(connection.changes(client, uris))
            end_s = asyncio.get_running_loop().time() + self._watch_s
            known: dict[str, tuple[Chunk, ...]] = {}
            reasons: list[str] = []
            blank_chunks = BlankChunks()
            for uri in uris:
                for event in blank_chunks.skip(await self._event(client, uri, uris, known, reasons)):
                    yield event
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
                    if uri_or_end.startswith(uri):  # a server may report a part of the resource
                        before = known.get(uri)
                        event = await self._event(client, uri, uris, known, reasons)
                        if isinstance(event, Skipped) or known.get(uri) != before:
                            for each in blank_chunks.skip(event):
                                yield each

    async def _next(self, changes: AsyncIterator[str], end_s: float) -> str | CutShort | None:
        """Return the next changed resource; None at the end of the watch, or if the server closes it in order.

        If the subscription is lost, return a `CutShort`.
        """
        if asyncio.get_running_loop().time() >= end_s:  # `timeout_at` does not interrupt if a change is pending
            return None
        try:
            async with asyncio.timeout_at(end_s):
                return await anext(changes, None)
        except TimeoutError:
            return None
        except RuntimeError as error:  # mcp's SubscriptionLost
            return CutShort(f"{self.name}: the MCP server has ended the subscription: {excerpt(error)}")

    async def _event(
        self,
        client: "Client",
        uri: str,
        uris: Sequence[str],
        known: dict[str, tuple[Chunk, ...]],
        reasons: list[str],
    ) -> SourceEvent:
        """Read a resource into `known` and return an update of all, or a Skipped whose reason is added to `reasons`."""
        read = await self._read(client, uri)
        if isinstance(read, Skipped):
            reasons.append(read.reason)
            return read
        known[uri] = read
        return Update(tuple(chunk for uri in uris for chunk in known.get(uri, ())))

    async def _read(self, client: "Client", uri: str) -> "tuple[Chunk, ...] | Skipped":
        """Return each text of a resource as a chunk of `uri`, or a `Skipped` for an error of the server or no text.

        A lost connection raises MCPError, and a timeout TimeoutError.
        """
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
            return Skipped(uri, "it is not text")
        return tuple(Chunk(content.text, uri, passage=number) for number, content in enumerate(texts))


def _structured(value: Any, name: str) -> list[Any] | None:
    """Return the one list of mappings with text that `value` is or has among its fields, with a `Skipped` for each
    entry without text; or else a mapping with text; None for any other value.

    The only list of a value without text may also be empty.
    """
    if isinstance(value, Mapping):
        lists = [field for field in value.values() if isinstance(field, list)]
        found = [field for field in lists if any(map(_has_text, field))]
        if len(found) != 1 and _has_text(value):
            return [value]
        found = found or lists
        value = found[0] if len(found) == 1 else None
    if not isinstance(value, list) or (value and not any(map(_has_text, value))):
        return None
    return [entry if _has_text(entry) else Skipped(_uri(entry) or name, "it has no text") for entry in value]


def _has_text(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(text := text_of(entry), str) and not is_blank(text)


def _uri(entry: Any) -> str:
    """Return an entry's address, or "" if it has none."""
    fields = entry if isinstance(entry, Mapping) else {}
    return next((str(fields[key]) for key in URIS if fields.get(key)), "")


def _content(content: Any, name: str) -> Any:
    """Return a text, or a pair of a resource's text and uri; for a part that is no text, `Skipped` with the reason."""
    match content.type:
        case "text":
            return content.text
        case "resource" if hasattr(content.resource, "text"):
            return (content.resource.text, str(content.resource.uri))
        case "resource":
            return Skipped(str(content.resource.uri), "it is not text")
        case "resource_link":
            return Skipped(str(content.uri), "the tool returned a link to it only")
    return Skipped(name, f"a part of the result is not text, but {content.type}")
