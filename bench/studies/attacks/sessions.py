"""Attacks by means of sessions and of stored responses, by a client that has a key."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx

from .connections import TEXT, flood, frame, repeated, socket

NUM_SESSIONS = 16
"""As many as one client may have."""
NUM_WATCHES = 32
"""As many as one session may have."""
NUM_READERS = 100

NUM_AT_ONCE = 8
"""Requests that an attacker has open at once, besides its readers."""
CHANGES_PER_S = 20.0
"""Changes of the data that have watched questions answered anew. More would measure the requests that bring them, which
`data_flood` does."""


@asynccontextmanager
async def attacker(port: int, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the attacker's key."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30.0) as http:
        yield http


async def opened(http: httpx.AsyncClient, **options: Any) -> str:
    """Open a session, and return its path."""
    answer = await http.post("/v1/sessions", json=options)
    return f"/v1/sessions/{answer.json()['id']}"


async def repeat(
    seconds: float, request: Callable[[int], Awaitable[httpx.Response]], per_s: float | None = None
) -> dict[int, int]:
    """Send requests for `seconds`, a few at once, and count the answers by their status (0: none came).

    per_s: about how many a second at most; None for as many as are answered.
    """
    seen: dict[int, int] = {}
    numbers = itertools.count()

    async def work() -> None:
        while True:
            try:
                status = (await request(next(numbers))).status_code
            except httpx.HTTPError:
                status = 0
            seen[status] = seen.get(status, 0) + 1
            if per_s is not None:
                await asyncio.sleep(NUM_AT_ONCE / per_s)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AT_ONCE):
                tasks.create_task(work())
    return seen


def change(http: httpx.AsyncClient, urls: list[str], number: int) -> Awaitable[httpx.Response]:
    """Append a reading to one of the sessions, in turn."""
    return http.post(f"{urls[number % len(urls)]}/data", json={"data": [f"reading {number}"]})


async def data_flood(port: int, key: str | None, seconds: float) -> str:
    """Append data to sessions as fast as they are taken: a flood of whole requests."""
    async with attacker(port, key) as http:
        urls = [await opened(http, window_tokens=200) for _ in range(NUM_SESSIONS)]
        seen = await repeat(seconds, lambda i: change(http, urls, i))
    return f"{NUM_SESSIONS} sessions; answers to data by status: {seen}"


async def frame_flood(port: int, key: str | None, seconds: float) -> str:
    """Append data on WebSockets of sessions, as fast as they are taken."""
    append = frame(TEXT, b'{"type":"append","data":["reading"]}')
    async with attacker(port, key) as http:
        urls = [await opened(http, window_tokens=200) for _ in range(NUM_SESSIONS)]
        sent = [0, 0]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                for url in urls:
                    first, pieces = socket(key, path=f"{url}/socket"), itertools.repeat(repeated(append))
                    tasks.create_task(flood(port, first, pieces, reads=True, sent=sent))
        versions = [(await http.get(url)).json()["version"] for url in urls]
    return f"{NUM_SESSIONS} sockets, {sent[1] / 1e6:.0f} MB; {sum(versions):,} frames were appended"


async def watch_flood(port: int, key: str | None, seconds: float) -> str:
    """Watch as many questions as may be, each with a long answer, and change the data all the time."""
    async with attacker(port, key) as http:
        urls = [await opened(http, window_tokens=200) for _ in range(NUM_SESSIONS)]
        for url, number in itertools.product(urls, range(NUM_WATCHES)):
            watch = {"question": f"Tell me all about number {number}, at length.", "max_tokens": 1024}
            await http.put(f"{url}/watches/{number}", json=watch)
        seen = await repeat(seconds, lambda i: change(http, urls, i), CHANGES_PER_S)
    return f"{NUM_SESSIONS} sessions of {NUM_WATCHES} watches each; answers to data by status: {seen}"


async def restricted_watch_flood(port: int, key: str | None, seconds: float) -> str:
    """The same with answers that are told apart by many passes, and of which one takes hardly any time."""
    answers = [f"{letter * 12}{number}" for letter in "abcdefgh" for number in range(8)]
    async with attacker(port, key) as http:
        urls = [await opened(http, window_tokens=200) for _ in range(NUM_SESSIONS)]
        for url, number in itertools.product(urls, range(NUM_WATCHES)):
            watch = {"question": f"Which is number {number}?", "answers": answers, "decisive_margin": 1e9}
            await http.put(f"{url}/watches/{number}", json=watch)
        seen = await repeat(seconds, lambda i: change(http, urls, i), CHANGES_PER_S)
    return f"{NUM_SESSIONS} sessions of {NUM_WATCHES} watches each; answers to data by status: {seen}"


async def silent_event_readers(port: int, key: str | None, seconds: float) -> str:
    """Have long questions watched, open many streams of events, read none of them, and make events all the time."""
    head = f"host: 127.0.0.1\r\nauthorization: Bearer {key}\r\n" if key else "host: 127.0.0.1\r\n"
    async with attacker(port, key) as http, AsyncExitStack() as ends:
        url = await opened(http, window_tokens=200)
        for length in (100_000, 10_000, 1_000):  # the longest that is let in
            for number in range(NUM_WATCHES):
                watch = {"question": f"{number}" + "\U0001f600" * (length - 5), "max_tokens": 16}
                await http.put(f"{url}/watches/{length}-{number}", json=watch)
        num_open = 0
        for _ in range(NUM_READERS):
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(f"GET {url}/events HTTP/1.1\r\n{head}\r\n".encode())
                ends.callback(writer.close)
                num_open += 1
        seen = await repeat(seconds, lambda i: http.post(f"{url}/data", json={"data": [f"reading {i}"]}))
    return f"{num_open} readers that never read; answers to data by status: {seen}"


async def many_event_readers(port: int, key: str | None, seconds: float) -> str:
    """Open as many streams of events as may be on all sessions, read all of them, and make events all the time."""
    async with attacker(port, key) as http, AsyncExitStack() as ends:
        urls = [await opened(http, window_tokens=200) for _ in range(NUM_SESSIONS)]
        tasks = await ends.enter_async_context(asyncio.TaskGroup())
        num_bytes = 0

        async def read(url: str) -> None:
            nonlocal num_bytes
            head = f"host: 127.0.0.1\r\nauthorization: Bearer {key}\r\n" if key else "host: 127.0.0.1\r\n"
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"GET {url}/events HTTP/1.1\r\n{head}\r\n".encode())
                while piece := await reader.read(1 << 16):
                    num_bytes += len(piece)
                writer.close()

        reading = [tasks.create_task(read(url)) for url in urls for _ in range(20)]
        seen = await repeat(seconds, lambda i: change(http, urls, i), CHANGES_PER_S)
        for task in reading:
            task.cancel()
    return f"{len(reading)} readers read {num_bytes:,} bytes; answers to data by status: {seen}"


async def stored_responses(port: int, key: str | None, seconds: float) -> str:
    """Have responses stored whose fields take thirty times as much memory as objects as they have bytes of JSON."""
    tools = f'[{{"type":"file_search","x":[{"[]," * 300_000}1]}}]'
    body = f'{{"input":"Where?","max_output_tokens":16,"tools":{tools}}}'
    headers = {"content-type": "application/json"}
    async with attacker(port, key) as http:
        seen = await repeat(seconds, lambda i: http.post("/v1/responses", content=body, headers=headers))
    return f"{len(body):,} bytes each; answers by status: {seen}"


async def tool_calls(port: int, key: str | None, seconds: float) -> str:
    """Call the tool of `/mcp` with as many empty lists as a request may have."""
    arguments = f'{{"question":"Where?","x":[{"[]," * 16_000}1]}}'
    body = f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"ask","meta":{arguments}}}}}'
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    async with attacker(port, key) as http:
        seen = await repeat(seconds, lambda i: http.post("/mcp", content=body, headers=headers))
    return f"{len(body):,} bytes each; answers by status: {seen}"


async def stored_turns(port: int, key: str | None, seconds: float) -> str:
    """Have conversations of a thousand turns stored, each of one character."""
    turns = [{"role": "user", "content": "x"}] * 1000
    async with attacker(port, key) as http:
        asked = {"input": turns, "max_output_tokens": 16, "tool_choice": "none"}
        seen = await repeat(seconds, lambda i: http.post("/v1/responses", json=asked))
    return f"{len(turns):,} turns each; answers by status: {seen}"


async def kept_answers(port: int, key: str | None, seconds: float) -> str:
    """Ask sessions long questions, each another, whose answers are kept under all of their text."""
    async with attacker(port, key) as http:
        urls = [await opened(http, window_tokens=200) for _ in range(NUM_SESSIONS)]

        def ask(number: int) -> Awaitable[httpx.Response]:
            question = {"question": f"{number}" + "\U0001f600" * 90_000, "max_tokens": 1}
            return http.post(f"{urls[number % len(urls)]}/ask", json=question)

        seen = await repeat(seconds, ask)
    return f"questions of 90,000 characters; answers by status: {seen}"


ATTACKS: dict[str, Callable[[int, str | None, float], Awaitable[str]]] = {
    each.__name__: each
    for each in (
        data_flood,
        frame_flood,
        watch_flood,
        restricted_watch_flood,
        silent_event_readers,
        many_event_readers,
        stored_responses,
        tool_calls,
        stored_turns,
        kept_answers,
    )
}
