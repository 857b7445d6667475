"""What HTTP costs, how many streams are held, what happens at twice saturation, and what a soak leaves behind.

    python -m studies.serve.run [--json FILE] [--soak-s 60] [--idle 1000] [--only scripted|engine]

The service runs in a process of its own, with a scripted backend that computes nothing, or with vLLM and a tiny model
with random weights; this process asks it with OpenAI's client, over sockets on loopback.

- HTTP: the same query asked over HTTP and of the pipeline itself, in turns, in one service. Time to the first text.
- Idle: streams that are open, with one chunk each, and wait. Memory of the service's process for each of them.
- Load: open loop, Poisson arrivals at half of, once and twice what a closed loop of `max_queries` clients got through.
  Goodput is answers a second, of those begun in the window; what is beyond it has to be a 429.
- Soak: every interface at half of saturation, a third of the clients leave early; then what is left is counted.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.table import Table
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from streamrag import Append, Chunk, SamplingParams, VllmBackend
from streamrag.serve import Limits, Service, create_app
from streamrag.serve.server import listen, serve
from streamrag.support.files import write_atomic
from streamrag.telemetry import TokensGenerated
from streamrag.testing import ScriptedBackend, ScriptedSource, make_tiny_llama
from streamrag_bench.summary import percentile

NUM_PAIRS = 200
WINDOW_S = 20.0
RETRIEVAL_S = 1.6
MAX_QUERIES = 8
PARAMS = SamplingParams(max_tokens=32)
QUESTION = "What is the capital of France?"
TEXT = "the capital of France is Paris. " * 4
PASSAGES = [Chunk(f"Passage {number}: {TEXT}", f"https://geo.example/{number}") for number in range(3)]

console = Console(highlight=False)


# ------------------------------------------------------------------------------------------------------ the service


def held_by_process() -> dict[str, float]:
    """What Linux says of this process."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
    return {
        "cpu_s": time.process_time(),
        "sockets": sum(name.startswith("socket:") for name in descriptors),
        "descriptors": len(descriptors),
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


async def run_service(kind: str, model: str, num_places: int) -> int:
    backend: Any = ScriptedBackend(answer="It is Paris [1]. " * 2)
    if kind == "engine":
        backend = VllmBackend(
            model, engine_args={"dtype": "float32"}, max_num_batched_tokens=512, kv_cache_bytes=1 << 30
        )

    def steps(query: str) -> list[Any]:
        pause = [] if query.startswith("at once") else [RETRIEVAL_S / 2]
        return [Append(PASSAGES[0]), *pause, Append(PASSAGES[1]), *pause, Append(PASSAGES[2])]

    limits = Limits(
        max_queries=num_places,
        max_queries_per_client=num_places,
        max_requests_per_minute=10**9,
        max_queued_tokens=10**9,
        deadline_s=900,
        idle_s=900,
        drain_s=1,
    ).model_copy(update={"max_connections": num_places + 1000})
    source = ScriptedSource(steps)
    service = Service(backend, source, limits=limits, model_name=kind, overlap=True)

    async def library(request: Request) -> JSONResponse:
        asked = await request.json()
        ttft_s = float("nan")
        for _ in range(asked.get("times", 1)):
            began_s = time.perf_counter()
            ttft_s = float("nan")
            async with service._pipeline.events(asked["question"], params=PARAMS) as events:
                async for event in events:
                    if isinstance(event, TokensGenerated) and ttft_s != ttft_s:
                        ttft_s = time.perf_counter() - began_s
        return JSONResponse({"ttft_s": ttft_s})

    async def left(request: Request) -> JSONResponse:
        return JSONResponse(
            {
                "tasks": len(asyncio.all_tasks()),
                **held_by_process(),
                "queries": len(service.queries),
                "retrievals": source.num_streams,
                "engine_requests": await backend.num_unfinished_requests()
                if kind == "engine"
                else backend.num_requests,
            }
        )

    async def kv(request: Request) -> JSONResponse:
        return JSONResponse({"is_free": await backend.reset_prefix_cache() if kind == "engine" else None})

    routes = [
        Route("/bench/library", library, methods=["POST"]),
        Route("/bench/left", left),
        Route("/bench/kv", kv),
    ]
    sock = listen("127.0.0.1", 0)
    await service.start(lambda line: print(line, file=sys.stderr))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    app = create_app(service)
    app._app.router.routes.extend(routes)  # type: ignore[attr-defined]
    return await serve(app, service, sock, on_ready=lambda: print(json.dumps(url), flush=True))


@asynccontextmanager
async def started(kind: str, model: str, num_places: int) -> AsyncIterator[str]:
    """A service in a process of its own, and its address."""
    command = [sys.executable, __file__, "--serve", kind, "--model", model, "--places", str(num_places)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    try:
        line = b""
        while not line.startswith(b'"http'):
            line = await process.stdout.readline()
            assert line, "the service did not start"
        yield json.loads(line)
    finally:
        process.terminate()
        await process.wait()


# ------------------------------------------------------------------------------------------------------- what is asked


def show_progress(line: str) -> None:
    if console.is_terminal:
        console.print(f"  {line}   ", end="\r")


async def chat(client: openai.AsyncOpenAI, question: str, *, leave: bool = False) -> float:
    """Seconds to the first text; the whole answer is read, unless it `leave`s there."""
    began_s = time.perf_counter()
    ttft_s = float("nan")
    stream = await client.chat.completions.create(
        model="", messages=[{"role": "user", "content": question}], stream=True, max_tokens=PARAMS.max_tokens
    )
    async with stream:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content and ttft_s != ttft_s:
                ttft_s = time.perf_counter() - began_s
                if leave:
                    break
    return ttft_s


async def stream(url: str, *, leave: bool, lines: int = 1, hold: asyncio.Event | None = None) -> None:
    """A stream of one's own context, over a socket; it waits for `hold`, and then leaves or finishes."""
    at = httpx.URL(url)
    reader, writer = await asyncio.open_connection(at.host, at.port)
    try:
        passage = {"type": "append", "chunk": {"text": PASSAGES[0].text, "uri": PASSAGES[0].uri}}
        sent = [{"type": "open", "query": QUESTION, "max_tokens": 16}, *[passage] * lines]
        body = "".join(json.dumps(line) + "\n" for line in sent).encode()
        head = b"POST /v1/streams HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%s\r\n" % (len(body), body))
        await reader.readuntil(b"event: prefill_progressed")
        if hold is not None:
            await hold.wait()
        if not leave:
            end = b'{"type": "finish"}\n'
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end))
            await reader.readuntil(b"event: answered")
    finally:
        writer.transport.abort()


# ------------------------------------------------------------------------------------------------------------ measured


async def cost_of_http(url: str, http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> dict[str, Any]:
    over_http, of_library = [], []
    for number in range(NUM_PAIRS + 10):
        question = f"at once {number}"
        ttft_s = await chat(client, question)
        answer = (await http.post("/bench/library", json={"question": question})).json()
        if number >= 10:  # the first ones open connections
            over_http.append(ttft_s * 1000)
            of_library.append(answer["ttft_s"] * 1000)
    cpu_s = [(await http.get("/bench/left")).json()["cpu_s"]]
    await http.post("/bench/library", json={"question": "at once", "times": NUM_PAIRS})
    cpu_s.append((await http.get("/bench/left")).json()["cpu_s"])
    for number in range(NUM_PAIRS):
        await chat(client, f"at once {number}")
    cpu_s.append((await http.get("/bench/left")).json()["cpu_s"])
    return {
        "library_cpu_ms": (cpu_s[1] - cpu_s[0]) / NUM_PAIRS * 1000,
        "http_cpu_ms": (cpu_s[2] - cpu_s[1]) / NUM_PAIRS * 1000,
        "num_pairs": NUM_PAIRS,
        "http_ttft_ms": {"median": median(over_http), "p95": percentile(over_http, 0.95)},
        "library_ttft_ms": {"median": median(of_library), "p95": percentile(of_library, 0.95)},
        "median_cost_ms": median(a - b for a, b in zip(over_http, of_library, strict=True)),
        "median_cost_percent": 100 * (median(over_http) / median(of_library) - 1),
    }


async def idle_streams(url: str, http: httpx.AsyncClient, client: openai.AsyncOpenAI, num: int) -> dict[str, Any]:
    before = (await http.get("/bench/left")).json()
    hold = asyncio.Event()
    async with AsyncExitStack() as stack:
        began_s = time.perf_counter()
        tasks = []
        for start in range(0, num, 50):
            tasks += [asyncio.create_task(stream(url, leave=True, hold=hold)) for _ in range(min(50, num - start))]
            while (left := (await http.get("/bench/left")).json())["queries"] < len(tasks):
                failed = [task for task in tasks if task.done()]
                assert not failed, failed[0].result()
                await asyncio.sleep(0.05)
            show_progress(f"{len(tasks)} idle streams, {left['rss_bytes'] >> 20} MiB")
        opened_s = time.perf_counter() - began_s
        opened = (await http.get("/bench/left")).json()
        during = [await chat(client, f"at once {number}") * 1000 for number in range(50)]
        held = (await http.get("/bench/left")).json()
        stack.callback(hold.set)
    await asyncio.gather(*tasks)
    gone_s = time.perf_counter()
    while (await http.get("/bench/left")).json()["queries"]:  # noqa: ASYNC110 -- it is in another process
        await asyncio.sleep(0.01)
    return {
        "num_streams": held["queries"],
        "opened_s": opened_s,
        "kib_per_stream": (held["rss_bytes"] - before["rss_bytes"]) / num / 1024,
        "ttft_ms_beside_them": {"median": median(during), "p95": percentile(during, 0.95)},
        "all_freed_s": time.perf_counter() - gone_s,
        "open_cpu_ms": (opened["cpu_s"] - before["cpu_s"]) / num * 1000,
        "leave_cpu_ms": ((await http.get("/bench/left")).json()["cpu_s"] - held["cpu_s"]) / num * 1000,
    }


async def saturation(client: openai.AsyncOpenAI) -> float:
    """Answers a second that a closed loop gets."""
    num = 0
    end_s = time.perf_counter() + WINDOW_S

    async def ask() -> None:
        nonlocal num
        while time.perf_counter() < end_s:
            await chat(client, QUESTION)
            num += 1

    await asyncio.gather(*(ask() for _ in range(MAX_QUERIES)))
    return num / WINDOW_S


async def open_loop(
    ask: Callable[[int], Coroutine[Any, Any, str]], rate: float, window_s: float, lateness_s: list[float]
) -> Counter[str]:
    """What became of queries that come whether others are done or not. `lateness_s` says how late this process was."""
    rng = random.Random(0)
    tasks: list[asyncio.Task[str]] = []
    began_s = time.perf_counter()
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < window_s:
        await asyncio.sleep(max(began_s + at_s - time.perf_counter(), 0))
        lateness_s.append(time.perf_counter() - began_s - at_s)
        tasks.append(asyncio.create_task(ask(len(tasks))))
        show_progress(f"{len(tasks)} begun")
    return Counter(await asyncio.gather(*tasks))


async def load(client: openai.AsyncOpenAI) -> dict[str, Any]:
    at_most = await saturation(client)
    rows = []
    for factor in (0.5, 1.0, 2.0):
        ttfts_ms: list[float] = []

        async def ask(number: int, ttfts_ms: list[float] = ttfts_ms) -> str:
            try:
                ttfts_ms.append(await chat(client, QUESTION) * 1000)
            except openai.RateLimitError:
                return "refused"
            except openai.OpenAIError as error:
                return type(error).__name__
            return "answered"

        lateness_s: list[float] = []
        outcomes = await open_loop(ask, at_most * factor, WINDOW_S, lateness_s)
        rows.append(
            {
                "factor": factor,
                "offered_per_s": sum(outcomes.values()) / WINDOW_S,
                "goodput_per_s": outcomes["answered"] / WINDOW_S,
                "ttft_ms": {"median": median(ttfts_ms), "p95": percentile(ttfts_ms, 0.95)},
                "client_late_ms": {"median": median(lateness_s) * 1000, "p95": percentile(lateness_s, 0.95) * 1000},
                "outcomes": dict(outcomes),
            }
        )
    return {"saturation_per_s": at_most, "rows": rows}


async def soak(
    url: str, http: httpx.AsyncClient, client: openai.AsyncOpenAI, soak_s: float, rate: float
) -> dict[str, Any]:
    async def ask(number: int) -> str:
        leave = number % 3 == 0
        try:
            match number % 5:
                case 0 | 1:
                    await chat(client, QUESTION, leave=leave)
                case 2:
                    await stream(url, leave=leave)
                case 3:
                    path = "/v1/ask" if number % 2 else "/v1/retrieve"
                    field = "question" if number % 2 else "query"
                    async with http.stream("POST", path, json={field: QUESTION}) as answer:
                        async for _ in answer.aiter_bytes():
                            if leave:
                                break
                case 4:
                    assert (await http.post("/v1/ask", content=b"{" * number)).status_code in (400, 413)
                    return "bad"
        except (openai.RateLimitError, asyncio.IncompleteReadError):
            return "refused"
        return "left" if leave else "answered"

    await open_loop(ask, rate, 5.0, [])  # what is allocated once
    await asyncio.sleep(6)  # connections that are kept alive end after 5 s
    before = (await http.get("/bench/left")).json()
    outcomes = await open_loop(ask, rate, soak_s, [])
    await asyncio.sleep(6)
    after = (await http.get("/bench/left")).json()
    return {
        "soak_s": soak_s,
        "outcomes": dict(outcomes),
        "before": before,
        "after": after,
        "kv_is_free": (await http.get("/bench/kv")).json()["is_free"],
    }


async def measure(kind: str, model: str, num_idle: int, soak_s: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for places, parts in ((num_idle + 100, ("http", "idle")), (MAX_QUERIES, ("load", "soak"))):
        async with started(kind, model, places) as url:
            limits = httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
            ):
                for part in parts:
                    console.print(f"{kind}: {part}   ")
                    if part == "http":
                        result[part] = await cost_of_http(url, http, client)
                    elif part == "idle":
                        result[part] = await idle_streams(url, http, client, num_idle)
                    elif part == "load":
                        result[part] = await load(client)
                    else:
                        result[part] = await soak(url, http, client, soak_s, result["load"]["saturation_per_s"] / 2)
    return result


def show(results: dict[str, Any]) -> None:
    table = Table("", *results)

    def row(name: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *(cell(result) for result in results.values()))

    def times(values: dict[str, float]) -> str:
        return f"{values['median']:.1f} (p95 {values['p95']:.1f})"

    row("TTFT of the library, ms", lambda r: times(r["http"]["library_ttft_ms"]))
    row("TTFT over HTTP, ms", lambda r: times(r["http"]["http_ttft_ms"]))
    row("cost, ms", lambda r: f"{r['http']['median_cost_ms']:.1f} ({r['http']['median_cost_percent']:.0f} %)")
    row("CPU of the service, library, ms", lambda r: f"{r['http']['library_cpu_ms']:.1f}")
    row("CPU of the service, HTTP, ms", lambda r: f"{r['http']['http_cpu_ms']:.1f}")
    row("idle streams", lambda r: f"{r['idle']['num_streams']}, opened in {r['idle']['opened_s']:.1f} s")
    row(
        "CPU to open and to leave one, ms",
        lambda r: f"{r['idle']['open_cpu_ms']:.1f}, {r['idle']['leave_cpu_ms']:.1f}",
    )
    row("KiB for each", lambda r: f"{r['idle']['kib_per_stream']:.0f}")
    row("TTFT beside them, ms", lambda r: times(r["idle"]["ttft_ms_beside_them"]))
    row("all freed after, s", lambda r: f"{r['idle']['all_freed_s']:.2f}")
    row("saturation, answers/s", lambda r: f"{r['load']['saturation_per_s']:.1f}")
    for i, factor in enumerate((0.5, 1.0, 2.0)):
        row(
            f"goodput at {factor:g}x",
            lambda r, i=i: "{goodput_per_s:.1f} of {offered_per_s:.1f}/s".format(**r["load"]["rows"][i]),  # type: ignore[misc]
        )
        row("  its TTFT, ms", lambda r, i=i: times(r["load"]["rows"][i]["ttft_ms"]))  # type: ignore[misc]
        row("  this process late, ms", lambda r, i=i: times(r["load"]["rows"][i]["client_late_ms"]))  # type: ignore[misc]
    row("soak", lambda r: ", ".join(f"{num} {name}" for name, num in sorted(r["soak"]["outcomes"].items())))
    for name in ("tasks", "sockets", "descriptors", "queries", "retrievals", "engine_requests"):
        row(f"  {name}", lambda r, n=name: f"{r['soak']['before'][n]} -> {r['soak']['after'][n]}")  # type: ignore[misc]
    row(
        "  memory, MiB",
        lambda r: " -> ".join(f"{r['soak'][when]['rss_bytes'] / 2**20:.1f}" for when in ("before", "after")),
    )
    row("  no KV block is held", lambda r: str(r["soak"]["kv_is_free"]))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--soak-s", type=float, default=60.0)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--only", choices=["scripted", "engine"])
    parser.add_argument("--serve", choices=["scripted", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--places", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        sys.exit(asyncio.run(run_service(args.serve, args.model, args.places)))
    kinds = [args.only] if args.only else ["scripted", "engine"]
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_llama(Path(folder) / "model")) if "engine" in kinds else ""
        results = {kind: asyncio.run(measure(kind, model, args.idle, args.soak_s)) for kind in kinds}
    show(results)
    if args.json:
        if args.only and args.json.exists():
            results = {**json.loads(args.json.read_text()), **results}
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        write_atomic(args.json, (json.dumps({**results, "machine": machine}, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
