"""What a question takes over HTTP whose answer is there already: a service on loopback, and a backend that is no model.

    python experiments/session_hits.py [--num N] [--json FILE]

A question is watched and answered. Then it is asked, one time after the other, on one kept connection each: with
`POST /v1/sessions/{id}/ask`, and on the session's WebSocket. No engine is asked meanwhile: what is measured is the way
there and back, of which the hit itself is the first row.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import websockets
from rich.console import Console

from streamrag.serve import Limits, Service, create_app
from streamrag.serve.server import QuietServer, listen, uvicorn_config
from streamrag.sessions import Session
from streamrag.support.files import write_atomic
from streamrag.testing import ScriptedBackend
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile

QUESTION = {"question": "Any over 90?", "answers": ["yes", "no"]}
console = Console(highlight=False)


async def timed(num: int, one: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """Milliseconds, after ten that do not count."""
    times_s = []
    for i in range(num + 10):
        began_s = time.perf_counter()
        await one()
        if i >= 10:
            times_s.append(time.perf_counter() - began_s)
    return {"p50_ms": 1e3 * percentile(times_s, 0.5), "p99_ms": 1e3 * percentile(times_s, 0.99)}


async def in_the_process(num: int) -> dict[str, float]:
    async with Session(ScriptedBackend(answer="no")) as session:
        watch = session.watch("Any over 90?", answers=("yes", "no"))
        await watch.at_least(await session.append("95"))

        async def one() -> None:
            async with session.ask("Any over 90?", answers=("yes", "no")) as answer:
                async for _ in answer:
                    pass

        return await timed(num, one)


async def over_http(num: int) -> dict[str, dict[str, float]]:
    backend = ScriptedBackend(answer="no")
    service = Service(backend, limits=Limits(max_requests_per_minute=1_000_000), model_name="scripted")
    await service.start()
    sock = listen("127.0.0.1", 0)
    server = QuietServer(uvicorn_config(create_app(service), service.limits))
    running = asyncio.create_task(server.serve(sockets=[sock]))
    await server.listens.wait()
    host = f"127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=f"http://{host}") as http:
            url = f"/v1/sessions/{(await http.post('/v1/sessions', json={})).json()['id']}"
            await http.put(f"{url}/watches/alarm", json=QUESTION)
            version = (await http.post(f"{url}/data", json={"data": ["95"]})).json()["version"]
            await http.post(f"{url}/ask", json={**QUESTION, "at_least": version})
            num_asked = len(backend.prompts)

            async def post() -> None:
                (await http.post(f"{url}/ask", json=QUESTION)).raise_for_status()

            async with websockets.connect(f"ws://{host}{url}/socket") as socket:

                async def send() -> None:
                    await socket.send(json.dumps({"type": "ask", "id": "a", "stream": False, **QUESTION}))
                    while json.loads(await socket.recv())["type"] != "answered":
                        pass

                found = {"POST": await timed(num, post), "WebSocket": await timed(num, send)}
            assert len(backend.prompts) == num_asked, "all were hits"
            return found
    finally:
        await service.aclose()
        server.should_exit = True
        await running


async def run(num: int) -> dict[str, Any]:
    return {"in the process": await in_the_process(num), **await over_http(num)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000, help="questions each way (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments.num))
    for way, row in rows.items():
        console.print(f"{way:>15}  P50 {row['p50_ms']:7.2f} ms   P99 {row['p99_ms']:7.2f} ms")
    if arguments.json is not None:
        told = {"num": arguments.num, "versions": versions(), "results": rows}
        write_atomic(arguments.json, (json.dumps(told, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
