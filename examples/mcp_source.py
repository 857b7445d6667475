"""A tool of an MCP server as a source. The server is this file too, as a process; on the test backend, offline.

python examples/mcp_source.py
"""

import asyncio
import sys
from typing import Any

from streamrag import Pipeline
from streamrag.adapters.mcp import McpToolSource
from streamrag.testing import ScriptedBackend


def serve() -> None:
    from mcp.server import MCPServer

    server = MCPServer("tickets", log_level="ERROR")

    @server.tool()
    def search(query: str) -> list[dict[str, Any]]:
        """Tickets about the words of the query."""
        tickets = {"T-101": "The printer on floor 2 jams.", "T-102": "Travel requests need the approval of the lead."}
        return [{"text": text, "uri": uri} for uri, text in tickets.items() if {*text.split()} & {*query.split()}]

    server.run()


async def main() -> None:
    source = McpToolSource([sys.executable, __file__, "serve"], "search")  # or its address, "http://host:8000/mcp"
    async with Pipeline(source, ScriptedBackend("It jams [1].")) as pipeline:
        async with pipeline.stream("Why does printer 2 jam?") as answer:
            print("".join([chunk.text async for chunk in answer]))
    for citation in answer.result.citations:
        print(f"[{citation.number}] {citation.uri}: {citation.text}")


if __name__ == "__main__":
    serve() if "serve" in sys.argv else asyncio.run(main())
