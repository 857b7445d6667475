"""An agent's next step over HTTP: it is opened before its tools have ended, and reads their results in order meanwhile.

make serve; python examples/agent_over_http.py http://127.0.0.1:8080
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx


async def run(tool: str, num_lines: int, results: Any) -> None:
    for number in range(num_lines):
        await asyncio.sleep(0.05)  # what a tool does
        results.put_nowait({"text": f"{tool}, line {number}: it jams on thick paper.", "uri": tool})
    results.put_nowait(None)


async def body(question: str) -> AsyncIterator[bytes]:
    yield json.dumps({"type": "open", "query": question, "finish_at_end": True}).encode() + b"\n"
    async with asyncio.TaskGroup() as tools:
        for call in (calls := [("ticket", 1, asyncio.Queue[Any]()), ("log", 20, asyncio.Queue[Any]())]):
            tools.create_task(run(*call))
        for *_, results in calls:
            while (chunk := await results.get()) is not None:
                yield json.dumps({"type": "append", "chunk": chunk}).encode() + b"\n"


async def main(url: str) -> None:
    request: dict[str, Any] = {"url": f"{url}/v1/streams", "content": body("Why does the printer jam?")}
    async with httpx.AsyncClient(timeout=None) as http, http.stream("POST", **request) as got:
        async for text in got.aiter_text():
            print(text, end="")


asyncio.run(main(sys.argv[1]))
