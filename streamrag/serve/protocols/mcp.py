"""`/mcp`: one tool, `ask`, for agents that speak the Model Context Protocol over streamable HTTP.

Requests are stateless, so a client that leaves has no session to clean up. Progress notifications count the passages
found so far; a tool's result comes in one piece, as the protocol requires.
"""

import asyncio
import importlib.util
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from streamrag.serve.citation_marks import find_marks
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import checked_body
from streamrag.serve.connections.sse import unless_disconnected
from streamrag.serve.service import Service
from streamrag.telemetry import Answer, Answered, ChunkArrived, ContextComplete, QueryEvent, TokensGenerated

if TYPE_CHECKING:
    from mcp.server import MCPServer

NAME = "ask"

MAX_VALUES = 1_024
"""JSON values per message. A call has a dozen; the package parses each message on the event loop."""

DESCRIPTION = (
    "Answers a question from documents that are retrieved for it, with citations of their passages. "
    "Each question is independent: include everything that it refers to."
)


class CitedPassage(BaseModel):
    """A passage of the answer's prompt."""

    number: int = Field(description="the number that stands for it in the answer, in brackets")
    title: str
    uri: str
    is_cited: bool = Field(description="whether the answer cites it")


class AskResult(BaseModel):
    """An answer and its passages."""

    answer: str
    sources: list[CitedPassage]


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes of this protocol; none if the package `mcp` is not installed."""
    if importlib.util.find_spec("mcp") is None:
        return []
    return [Route("/mcp", _Endpoint(service), methods=["POST"])]


class _Endpoint:
    """An ASGI application that speaks MCP."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = make_server(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one MCP request, whose size is checked first. If the client leaves, its query is cancelled."""
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        body = await checked_body(Request(scope, receive), MAX_VALUES)
        is_read = False

        async def receive_body() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # forever: `unless_disconnected` detects a disconnect
            raise AssertionError

        async def work() -> None:
            manager = StreamableHTTPSessionManager(
                self._server._lowlevel_server,
                stateless=True,
                max_request_body_size=self._service.limits.max_body_bytes,
            )
            async with manager.run():
                await manager.handle_request(scope, receive_body, send)

        with suppress(ClientDisconnect):
            await unless_disconnected(work(), receive)


def make_server(service: Service) -> "MCPServer[Any]":
    """Return an MCP server with the `ask` tool, which reports progress and returns text and structured content.

    The tool raises ToolError with an error's public message; internal errors are logged.
    """
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import CallToolResult, TextContent, ToolAnnotations

    server: MCPServer[Any] = MCPServer("streamrag", log_level="WARNING")

    async def ask(question: str, context: Context[Any, Any]) -> Annotated[CallToolResult, AskResult]:
        request = context.request_context.request
        assert isinstance(request, Request)
        progress = _Progress()
        try:
            async with service.events(request.scope[CALLER], "mcp", question) as events:
                async for event in events:
                    if isinstance(event, Answered):
                        text, values = _encode(event.answer)
                        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=values)
                    if (message := progress.message(event)) is not None:
                        await context.report_progress(progress.num_steps, message=message)
        except Exception as error:  # reported as in other protocols
            failure = service.failed_requests.note(request.scope, error)
            retry = "" if failure.retry_after_s is None else f" (try again in {failure.retry_after_s:.0f} s)"
            raise ToolError(failure.message + retry) from None
        raise RuntimeError("a query ended without an answer and without an error")

    server.add_tool(
        ask, name=NAME, description=DESCRIPTION, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=True)
    )
    return server


class _Progress:
    """A counter of progress messages: the number of passages found so far, and the start of the answer."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_chunks = 0
        self._is_answering = False

    def message(self, event: QueryEvent) -> str | None:
        """Return the message about a chunk, the end of retrieval or the first token, and count it; None for others."""
        message = None
        match event:
            case ChunkArrived():
                self._num_chunks += 1
                message = f"{self._num_chunks} passage{'s' * (self._num_chunks != 1)} found"
            case ContextComplete():
                message = f"retrieval is complete: {event.num_chunks} passages"
            case TokensGenerated() if not self._is_answering:
                self._is_answering = True
                message = "answering"
        self.num_steps += message is not None
        return message


def _encode(answer: Answer) -> tuple[str, dict[str, Any]]:
    """Return the answer as text for a model, with the sources that it cites, and as values for a program, with all."""
    cited = {mark.number for mark in find_marks(answer.text, len(answer.citations))}
    sources = [
        CitedPassage(number=each.number, title=each.title, uri=each.uri, is_cited=each.number in cited)
        for each in answer.citations
    ]
    lines = [f"[{each.number}] {each.title} {each.uri}".rstrip() for each in sources if each.is_cited]
    text = answer.text + ("\n\nSources:\n" + "\n".join(lines) if lines else "")
    return text, AskResult(answer=answer.text, sources=sources).model_dump()
