"""Event loop time for what clients cause, on a clock that the tests set."""

import asyncio
import heapq
import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked
from starlette.types import Message, Receive, Scope, Send

from streamrag.serve import Limits, Service
from streamrag.serve.connections import fair_share, json_body
from streamrag.serve.connections import http as connections
from streamrag.serve.connections.fair_share import BUSY_SHARE, FREE_S, Account, FairShare
from streamrag.serve.connections.gate import REQUEST_S, Gate
from streamrag.serve.connections.http import READ_BYTES, HttpConnection
from streamrag.serve.connections.json_body import (
    MAX_VALUES,
    MAX_WAITING,
    SMALL_BYTES,
    StrictModel,
    parse,
    parse_in_turn,
)
from streamrag.serve.failures import RequestError
from streamrag.serve.protocols.streams import LINE_BYTES, LINES_A_TURN, StreamBody
from streamrag.testing import ScriptedBackend
from tests.serve.responses.talking import talking
from tests.serve.serving import serving


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_little_work_is_free_and_becomes_free_again() -> None:
    clock = Clock()
    account = Account(FairShare(clock))
    assert account.pause_s(FREE_S) == 0.0
    assert account.pause_s(0.001) == pytest.approx(0.001 / BUSY_SHARE)
    clock.now_s = 1000.0
    assert account.pause_s(FREE_S) == 0.0


@pytest.mark.parametrize("num_accounts", [1, 12, 1000])
def test_clients_that_cause_much_work_take_a_fifth_of_the_time_together(num_accounts: int) -> None:
    clock = Clock()
    share = FairShare(clock)
    due = [(0.0, number, Account(share)) for number in range(num_accounts)]
    took_s = 0.0
    work_s = 0.008
    for _ in range(num_accounts * 20):
        at_s, number, account = heapq.heappop(due)
        clock.now_s = max(clock.now_s, at_s) + work_s
        took_s += work_s
        heapq.heappush(due, (clock.now_s + account.pause_s(work_s), number, account))
    assert took_s / clock.now_s == pytest.approx(BUSY_SHARE, rel=0.2)
    assert Account(share).pause_s(FREE_S) == 0.0, "whoever causes little waits for none of them"


def test_small_pieces_that_are_further_apart_than_their_pauses_never_wait() -> None:
    clock = Clock()
    account = Account(FairShare(clock))
    for number in range(1000):
        clock.now_s = number / 100
        assert account.turn_s(REQUEST_S) == 0.0


async def test_requests_of_one_client_take_turns_however_many_connections_bring_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_s: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer nothing."""

    async def sleep(seconds: float) -> None:
        waits_s.append(seconds)

    async def ask(key: str, path: str = "/v1/models") -> float:
        """Send a request, and return how long it waits."""
        waits_s.clear()
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        await gate({"type": "http", "method": "GET", "path": path, "headers": headers}, never, never)  # type: ignore[arg-type]
        return sum(waits_s)

    clock, never = Clock(), None
    gate = Gate(app, limits=Limits(), keys={"a": "alice", "b": "bob"}, share=FairShare(clock))
    monkeypatch.setattr(fair_share.asyncio, "sleep", sleep)
    num_free = round(FREE_S / REQUEST_S)
    flood_s = [await ask("a") for _ in range(100)]
    assert flood_s[: num_free + 1] == [0.0] * (num_free + 1)
    assert flood_s[-1] == pytest.approx((99 - num_free) * REQUEST_S / BUSY_SHARE)
    assert await ask("b") == 0.0, "another client waits for none of them"
    assert await ask("a", "/healthz") == 0.0
    clock.now_s = 1000.0
    assert await ask("a") == 0.0


class Transport:
    """Remembers whether it reads."""

    def __init__(self) -> None:
        self.reads = True
        self.written: list[bytes] = []
        self.write = self.written.append
        self.get_extra_info: Callable[[str], Any] = lambda name: None
        self.is_closing = lambda: False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Inner:
    """In place of uvicorn's protocol."""

    is_receiving = False

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.connection_made = lambda transport: None
        self.data_received = self.pieces.append
        self.pause_writing = self.resume_writing = lambda: None


def connected(protocol: Any) -> tuple[HttpConnection, Transport]:
    transport = Transport()
    connection = HttpConnection(protocol, Account(FairShare(Clock())))
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def receive(connection: HttpConnection, data: bytes) -> None:
    while data:
        buffer = connection.get_buffer(-1)
        piece, data = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(piece)] = piece
        connection.buffer_updated(len(piece))


async def test_a_connection_whose_parsing_takes_long_is_not_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = Clock()
    inner = Inner()
    connection, transport = connected(inner)
    monkeypatch.setattr(connections.time, "thread_time", cpu_s)

    def parse(data: bytes) -> None:
        inner.pieces.append(data)
        cpu_s.now_s += 0.008

    inner.data_received = parse
    receive(connection, b"x" * READ_BYTES)
    assert inner.pieces == [b"x" * READ_BYTES]
    assert not transport.reads
    connection.resume_reading()
    assert not transport.reads, "uvicorn does not lift the pause"
    connection._resume("busy")
    assert transport.reads


async def test_a_short_request_never_counts_as_long_whatever_happened_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_s = Clock()
    inner = Inner()
    connection, transport = connected(inner)
    monkeypatch.setattr(connections.time, "thread_time", cpu_s)
    inner.data_received = lambda data: setattr(cpu_s, "now_s", cpu_s.now_s + 1.0)  # a garbage collection
    receive(connection, b"x" * 300)
    assert transport.reads


async def test_a_websocket_that_reads_no_pongs_is_not_read() -> None:
    connection, transport = connected(Inner())
    connection.pause_writing()
    assert transport.reads, "an answer over HTTP waits by itself, and its request may still be coming"
    connection.set_protocol(Inner())  # type: ignore[arg-type]
    connection.pause_writing()
    assert not transport.reads
    connection.resume_writing()
    assert transport.reads


async def test_the_pongs_of_one_read_are_written_at_once() -> None:
    inner = Inner()
    connection, transport = connected(inner)
    inner.data_received = lambda data: [connection.write(b"pong") for _ in data]
    receive(connection, b"x" * 100)
    connection.write(b"an event")
    assert transport.written == [b"pong" * 100, b"an event"]


# --------------------------------------------------------------------------------------------------- lines of a stream


class Free(Account):
    """Pauses never, so that turns of the event loop can be counted."""

    def pause_s(self, took_s: float) -> float:
        return 0.0


OPEN = b'{"type": "open", "query": "What?"}\n'


async def reading(body: bytes) -> tuple[StreamBody, list[int]]:
    """Read a body as lines: the lines, and how many of them were counted after each turn of the event loop."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": True}]
    never = asyncio.Event()

    async def receive() -> Message:
        if not messages:
            await never.wait()
        return messages.pop()

    lines = StreamBody(receive, Service(ScriptedBackend()))
    lines._account = Free(FairShare())
    task = asyncio.create_task(lines.read())
    counts = [0]
    for _ in range(2000):
        await asyncio.sleep(0)
        counts.append(lines._num_lines)
    task.cancel()
    return lines, counts


@pytest.mark.parametrize("blank", [b"\n", b" \n"])
async def test_blank_lines_leave_turns_of_the_event_loop_to_others(blank: bytes) -> None:
    _, counts = await reading(OPEN + blank * 50_000)
    assert counts[-1] == 50_001
    assert max(after - before for before, after in pairwise(counts)) <= LINES_A_TURN


async def test_short_lines_that_wait_count_with_the_memory_that_they_take() -> None:
    line = b'{"type":"skipped","uri":"","reason":""}\n'
    lines, counts = await reading(OPEN + line * 20_000)
    assert counts[-1] == counts[-100], "it waits for room"
    assert lines._queue.qsize() <= Limits().max_frame_bytes / LINE_BYTES + LINES_A_TURN


# ------------------------------------------------------------------------------------------------------- large bodies


class Words(StrictModel):
    """A request."""

    words: list[str]


def large(num_values: int = 10) -> bytes:
    """Return a good body of `Words` that is parsed in turn."""
    return json.dumps({"words": ["x" * SMALL_BYTES, *["x"] * (num_values - 1)]}).encode()


async def test_large_bodies_of_one_client_are_parsed_one_at_a_time_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s, clock = Clock(), Clock()
    pauses_s: list[float] = []
    is_over = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        pauses_s.append(seconds)
        await is_over.acquire()
        clock.now_s += seconds

    account = Account(FairShare(clock))
    monkeypatch.setattr(fair_share.time, "thread_time", cpu_s)
    monkeypatch.setattr(fair_share.asyncio, "sleep", sleep)
    parsed: list[int] = []

    def parse(number: int) -> None:
        cpu_s.now_s += 0.010
        parsed.append(number)

    tasks = [asyncio.create_task(account.take_turn(partial(parse, number))) for number in range(3)]
    for number, task in enumerate(tasks):
        await wait_all_tasks_blocked()
        assert parsed == list(range(number + 1)), "the next one waits until the pause is over"
        is_over.release()
        await task
    assert pauses_s == pytest.approx([0.010 / BUSY_SHARE] * 3)
    assert account.num_waiting == 0


async def test_no_more_than_some_large_bodies_of_one_client_wait() -> None:
    account = Account(FairShare())
    tasks = [asyncio.create_task(parse_in_turn(large(), Words, account)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="wait to be parsed") as told:
        await parse_in_turn(large(), Words, account)
    assert told.value.status == 429
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await parse_in_turn(large(), Words, account)


@pytest.mark.parametrize("values", ["[]", "{}", '""', "1", '{"a":1}', r'"\\"', r'"\"\\\""', '"[,"', "[[[[[[[[]]]]]]]]"])
def test_json_of_more_values_than_any_request_needs_is_refused_before_it_is_parsed(
    values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "from_json", lambda *_, **__: pytest.fail("it was parsed"))
    body = f'{{"words": [{",".join([values] * (MAX_VALUES + 1))}]}}'
    for given in (body, body.encode()):
        with pytest.raises(RequestError, match="more than 32,768 values") as told:
            parse(given, Words)
        assert told.value.status == 413


@pytest.mark.parametrize("text", ["1, [2], {3}, ", r"\"key\": [1, 2], ", "\\\\", r"\\\"[,"])
def test_a_text_may_hold_whatever_stands_between_values(text: str) -> None:
    body = f'{{"words": ["{text * 30_000}", ""]}}'
    parsed = parse(body.encode(), Words)
    assert parsed.words == [json.loads(f'"{text}"') * 30_000, ""]
    assert len(parse(large(MAX_VALUES - 10), Words).words) == MAX_VALUES - 10


def test_errors_without_end_are_counted_and_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"^words.0: Input should be a valid string"):
        parse(f'{{"words": [{"1," * 999}1]}}', Words)
    with pytest.raises(RequestError, match=r"^30,001 values are invalid"):
        parse(f'{{"words": [{"1," * 30_000}1]}}', Words)


async def test_large_bodies_and_frames_count_for_their_client_and_their_values_are_bounded() -> None:
    paths = ["/v1/responses", "/v1/chat/completions", "/v1/ask", "/v1/retrieve", "/v1/sessions", "/mcp"]
    body = f'{{"type": "response.create", "question": "Where?", "x": [{"[]," * MAX_VALUES}1]}}'
    accounts: set[int] = set()
    take_turn = Account.take_turn

    async def noted(account: Account, work: Callable[[], Any]) -> Any:
        accounts.add(id(account))
        return await take_turn(account, work)

    async with serving() as served:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Account, "take_turn", noted)
            async with talking(served) as talk:
                await talk.connection.send_raw(body)
                (told,) = await talk.events()
                assert (told.type, told.status) == ("error", 413)
                for path in paths:
                    answer = await served.http.post(path, content=body)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_values")
        assert len(accounts) == 1
        answer = await served.http.post("/v1/streams", content=f"{body}\n")
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "invalid_line")
