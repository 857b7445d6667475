"""MCP servers as sources: the results of a tool, or resources with an update for each change.

    from streamrag.adapters.mcp import McpToolSource

    source = McpToolSource(["python", "server.py"], "search")

The package `mcp` is imported when a source starts.
"""

from streamrag.adapters.mcp.sources import McpResourceSource as McpResourceSource
from streamrag.adapters.mcp.sources import McpToolSource as McpToolSource

__all__ = ["McpResourceSource", "McpToolSource"]
