"""A real MCP server, as a process: its tools do what each test needs. `mcp_server.py` speaks over stdio,
`mcp_server.py http` over HTTP, and prints its port."""

import json
import os
import signal
import socket
import sys
import time
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

server = MCPServer("notes", log_level="CRITICAL")
notes = {"printer": "The printer jams.", "scanner": "The scanner is slow."}


@server.tool()
def search(query: str, most: int = 9) -> list[str]:
    return [text for text in notes.values() if query in text][:most]


@server.tool()
def documents(query: str) -> list[dict[str, Any]]:
    return [{"text": text, "uri": f"notes://{name}", "title": name, "score": 0.5} for name, text in notes.items()]


@server.tool()
def one(query: str) -> str:
    return f"all about {query}"


@server.tool()
def mixed(query: str) -> CallToolResult:
    content: list[ContentBlock] = [
        TextContent(type="text", text="a text"),
        ImageContent(type="image", data="AAAA", mime_type="image/png"),
        ResourceLink(type="resource_link", name="far", uri="notes://far"),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="notes://near", text="a near text")),
        EmbeddedResource(type="resource", resource=BlobResourceContents(uri="notes://blob", blob="AAAA")),
    ]
    return CallToolResult(content=content)


@server.tool()
def structured(query: str) -> CallToolResult:
    """Return the content in the query, as JSON, structured."""
    value = json.loads(query)
    return CallToolResult(content=[TextContent(type="text", text=query)] if value else [], structured_content=value)


@server.tool()
def fails(query: str) -> str:
    raise ToolError(f"no index for {query}")


@server.tool()
def floods(query: str) -> str:
    return "x" * int(query)


@server.tool()
async def slow(query: str, context: Context) -> str:
    """Report lines as they are found, and return them all."""
    for number in range(3):
        await context.report_progress(number, 3, f"line {number}")
        await context.report_progress(number + 0.5, 3)
        await anyio.sleep(0.2)  # so that the lines come one by one
    return "line 0\nline 1\nline 2\n"


@server.tool()
def pid(query: str) -> str:
    return str(os.getpid())


@server.tool()
def dies(query: str) -> str:
    os._exit(3)


@server.tool()
async def hangs(query: str) -> str:
    """Writes to the pipe `query` that it has begun, and then that it was cancelled."""
    with open(query, "w", buffering=1) as pipe:  # noqa: ASYNC230
        print("begun", file=pipe)
        try:
            await anyio.sleep_forever()
        finally:
            print("cancelled", file=pipe)
    return ""


@server.tool()
async def blocks(query: str) -> str:
    """Nothing but SIGKILL ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(query, "w") as pipe:  # noqa: ASYNC230
        print(os.getpid(), file=pipe)
    time.sleep(1000)  # noqa: ASYNC251
    return ""


@server.tool()
def crowds(query: str) -> list[int]:
    return list(range(int(query)))


@server.tool()
async def change(query: str, context: Context[Any, Any]) -> str:
    name, _, text = query.partition("=")
    notes[name] = text
    await context.notify_resource_updated(f"notes://{name}")
    return "changed"


@server.resource("notes://printer")
def printer() -> str:
    return notes["printer"]


@server.resource("notes://scanner")
def scanner() -> str:
    return notes["scanner"]


@server.resource("notes://picture", mime_type="image/png")
def picture() -> bytes:
    return b"\x89PNG"


@server.resource("notes://about/{topic}")
def about(topic: str) -> str:
    return f"about {topic}"


@server.resource("notes://restless/{topic}")
async def restless(topic: str, context: Context[Any, Any]) -> str:
    """Changes whenever it is read."""
    await context.notify_resource_updated(f"notes://restless/{topic}")
    return f"{topic} at {time.monotonic_ns()}"


def serve_http() -> None:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = server.streamable_http_app(json_response="json" in sys.argv)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)).run(sockets=[listening])


if __name__ == "__main__":
    if "http" in sys.argv:
        serve_http()
    else:
        server.run()
