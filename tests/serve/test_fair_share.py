"""Event loop time for what clients cause, on a clock that the tests set."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from starlette.types import Message

from streamrag.serve import Limits, Service, connections
from streamrag.serve.connections import READ_BYTES, Connection
from streamrag.serve.fair_share import BUSY_SHARE, FREE_S, Account, FairShare
from streamrag.serve.protocols.stream_body import LINE_BYTES, LINES_A_TURN, StreamBody
from streamrag.testing import ScriptedBackend


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
def test_all_that_cause_much_work_take_a_fifth_of_the_time_together(num_accounts: int) -> None:
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


def connected(protocol: Any) -> tuple[Connection, Transport]:
    transport = Transport()
    connection = Connection(protocol, Account(FairShare(Clock())))
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def receive(connection: Connection, data: bytes) -> None:
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
    assert lines._waiting.qsize() <= Limits().max_frame_bytes / LINE_BYTES + LINES_A_TURN
