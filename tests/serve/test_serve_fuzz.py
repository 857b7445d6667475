"""Anything at all, sent to every interface: a 4xx in OpenAI's form, never a 500, and a good request works behind it.

Short here; `make fuzz OF=serve` tries thousands of each. `test_odd_requests.py` tries single odd values in every field:
by chance, one of a hundred requests seldom has null in the one field that does not bear it.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.serve.raw import FINISH, OPEN, append
from tests.serve.requests import CASES, places
from tests.serve.serving import limits_of, serving

LIMITS = limits_of(
    max_requests_per_minute=10**9,
    max_body_bytes=20_000,
    max_frame_bytes=5_000,
    max_stream_bytes=20_000,
    max_head_bytes=4_096,
    max_tokens=5,
    head_s=0.2,
    body_s=0.2,
    idle_s=0.2,
)

PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/ask", "/v1/retrieve"]

TEXTS = st.text(st.characters(), max_size=30)  # halves of characters too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "bard"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS | VALUES}) | VALUES, min_size=1, max_size=3)
GOOD = st.sampled_from(
    [
        {"messages": [{"role": "user", "content": "Where?"}]},
        {"messages": [{"role": "user", "content": "Where?"}], "stream": True},
        {"input": "Where?"},
        {"question": "Where?"},
        {"query": "Where?"},
    ]
)


@st.composite
def _changed(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> bytes:
    """Text that was right, with a piece of it replaced."""
    text = draw(texts)
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 8)))
    return text[:start] + draw(st.binary(max_size=4)) + text[end:]


def _dumped(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return values.map(lambda value: json.dumps(value).encode())


WHOLE = [case for case in CASES if case.path in PATHS]


@st.composite
def _almost_good(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a good body for it with odd values in some of its model's fields."""
    case = draw(st.sampled_from(WHOLE))
    body = case.body
    found = list(places(case.model, case.body, set()))
    for place in draw(st.lists(st.sampled_from(found), min_size=1, max_size=3)):
        with suppress(AttributeError, KeyError, IndexError, TypeError):  # an earlier value has no such place
            body = place.put(body, draw(st.none() | MESSAGES | VALUES))
    return case.path, json.dumps(body).encode()


BODIES = st.binary(max_size=200) | _dumped(VALUES) | _changed(_dumped(GOOD))
REQUESTS = _almost_good() | st.tuples(st.sampled_from(PATHS), BODIES)

LINES = st.sampled_from(
    [
        OPEN,
        FINISH,
        append("Paris is in France."),
        {"type": "update", "chunks": [{"text": "a", "uri": "b"}], "hint": {"num_chunks": 1, "end_s": 0.1}},
        {"type": "skipped", "uri": "a", "reason": "b"},
        {"type": "cut_short", "reason": "late"},
    ]
)
LINE_FIELDS = st.dictionaries(
    st.sampled_from(["type", "query", "chunk", "chunks", "hint", "uri", "reason", "max_tokens", "stop"]), VALUES
)
ALMOST_LINES = st.tuples(LINES, LINE_FIELDS).map(lambda both: {**both[0], **both[1]})
STREAMS = st.lists(
    _dumped(LINES) | _dumped(ALMOST_LINES) | _dumped(VALUES) | _changed(_dumped(LINES)) | st.binary(max_size=50),
    max_size=6,
).flatmap(lambda lines: st.sampled_from([b"\n".join(lines), b"\n".join([json.dumps(OPEN).encode(), *lines]) + b"\n"]))

HEADER_NAMES = st.sampled_from(
    [
        "host",
        "origin",
        "authorization",
        "x-request-id",
        "traceparent",
        "tracestate",
        "content-length",
        "transfer-encoding",
        "content-type",
        "expect",
        "connection",
        "upgrade",
        "accept",
        "accept-encoding",
        "sec-websocket-key",
        "sec-websocket-version",
        "x-anything",
    ]
).map(str.encode)
HEADER_VALUES = st.binary(max_size=40) | st.sampled_from(
    [
        b"localhost",
        b"chunked",
        b"2",
        b"-1",
        b"99999999999999999999",
        b"close",
        b"keep-alive",
        b"100-continue",
        b"[",
        b"websocket",
        b"Upgrade",
        b"Bearer x",
        b"http://[::1",
        b"http://localhost",
        b"null",
        b"identity",
        b"gzip",
    ]
)
HEADERS = st.lists(st.tuples(HEADER_NAMES | st.binary(max_size=10), HEADER_VALUES), max_size=5)
METHODS = st.sampled_from([b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH", b"TRACE", b"BREW"])
TARGETS = st.sampled_from([path.encode() for path in [*PATHS, "/v1/streams", "/", "*", "http://x/", "//", "/%ff%00"]])

FUZZ = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a service in a thread of its own."""
    ready = threading.Event()
    given: dict[str, Any] = {}

    async def run() -> None:
        given["stop"] = asyncio.Event()
        given["loop"] = asyncio.get_running_loop()
        async with serving(limits=LIMITS) as served:
            given["url"] = served.url
            ready.set()
            await given["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(30)
    yield given["url"]
    given["loop"].call_soon_threadsafe(given["stop"].set)
    thread.join(30)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


def check(answer: httpx.Response) -> None:
    """It is an answer, or an error of whoever asked."""
    if answer.status_code == 200:
        for line in answer.text.splitlines():
            if line.startswith("data: {"):
                error = json.loads(line[6:]).get("error")
                assert error is None or error["code"] != "internal_error", error
        return
    error = answer.json()["error"]
    assert error["message"]
    assert error.keys() - {"line"} == {"message", "type", "param", "code"}
    assert 400 <= answer.status_code < 500 or error["code"] == "deadline_exceeded", answer.text


def check_that_it_works(client: httpx.Client) -> None:
    status = 408
    while status == 408:  # a machine that stands still for as long as a body may take
        answer = client.post("/v1/ask", json={"question": "Where?"})
        status = answer.status_code
    assert status == 200
    assert "event: answered" in answer.text


@FUZZ
@given(request=REQUESTS)
def test_no_body_is_an_error_of_ours(client: httpx.Client, request: tuple[str, bytes]) -> None:
    path, body = request
    check(client.post(path, content=body))
    check_that_it_works(client)


@FUZZ
@given(body=STREAMS)
def test_no_lines_are_an_error_of_ours(client: httpx.Client, body: bytes) -> None:
    check(client.post("/v1/streams", content=body))
    check_that_it_works(client)


@FUZZ
@given(method=METHODS, target=TARGETS | st.binary(max_size=20), headers=HEADERS, is_plain=st.booleans())
@example(
    method=b"POST",
    target=b"/v1/chat/completions",
    headers=[(b"host", b""), (b"upgrade", b"\x01"), (b"\n", b"")],
    is_plain=False,
)
def test_no_headers_are_an_error_of_ours(
    client: httpx.Client,
    url: str,
    method: bytes,
    target: bytes,
    headers: list[tuple[bytes, bytes]],
    is_plain: bool,
) -> None:
    plain = [(b"host", b"localhost"), (b"content-length", b"22"), (b"connection", b"close")] if is_plain else []
    lines = [b"%s %s HTTP/1.1" % (method, target), *(b"%s: %s" % header for header in [*plain, *headers]), b"", b""]
    at = urlsplit(url)
    with socket.create_connection((at.hostname, at.port), timeout=120) as sock:
        sock.sendall(b"\r\n".join(lines) + b'{"question": "Where?"}')
        said = b""
        try:
            while piece := sock.recv(65_536):
                said += piece
                sock.settimeout(0.2)  # a connection that is kept alive
        except (ConnectionError, TimeoutError):
            pass
    if said:
        head, _, body = said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
        status = int(head.split()[1])
        assert status < 500, said
        if status >= 400 and b"content-type: application/json" in head and method != b"HEAD":
            error, _ = json.JSONDecoder().raw_decode(body.decode())  # a line end in a header begins a second request
            assert error["error"]["message"]
    check_that_it_works(client)
