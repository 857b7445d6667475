"""An MCP server of the protocol of 2025, without the package: it knows two methods."""

import json
import sys
from typing import Any

URI = "notes://printer"


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


for line in sys.stdin:
    request = json.loads(line)
    number = request.get("id")
    match request["method"]:
        case "initialize":
            send(
                id=number,
                result={
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"resources": {}},
                    "serverInfo": {"name": "old", "version": "1"},
                },
            )
        case "notifications/initialized":
            pass
        case "resources/read":
            send(id=number, result={"contents": [{"uri": URI, "text": "The printer jams."}]})
        case _ if number is not None:
            send(id=number, error={"code": -32601, "message": "Method not found"})
