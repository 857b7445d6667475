"""Event streams as servers write them. Most inputs are those that the web platform's tests give to browsers."""

from collections.abc import AsyncIterator

import pytest

from streamrag.backends.openai.http import event_data


async def events_of(body: bytes, piece_bytes: int) -> tuple[list[str], str]:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), piece_bytes):
            yield body[start : start + piece_bytes]

    stray: list[str] = []
    return [data async for data in event_data(pieces(), stray)], "\n".join(stray)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\xef\xbb\xbfdata:1\n\ndata:3\n\n", ["1", "3"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata:1\n\ndata:2\n\n", ["2"]),
        (b"data:1\r:\0\n:\r\ndata:2\n:long\rdata:3\n:data:fail\r:long\ndata:4\n\n", ["1\n2\n3\n4"]),
        (b"data:\0\ndata:  2\rData:1\ndata\0:2\ndata:1\r\0data:4\nda-ta:3\rdata_5\n\n", ["\0\n 2\n1"]),
        (b"data:3\rdata:\r\n data:32\ndata:4\n\n", ["3\n\n4"]),
        (b"data:test\r\ndata\ndata:test\r\n\r\n", ["test\n\ntest"]),
        (b"data:\n\ndata\ndata\n\ndata:test\n\n", ["test"]),
        (b"data:test\n data\ndata\nfoobar:xxx\njustsometext\n:thisisacommentyay\ndata:test\n\n", ["test\n\ntest"]),
        (b"data:ok\r\rdata: also ok\r\r", ["ok", "also ok"]),
        (b"retry:3000\ndata:x\n\nretry:1000x\ndata:y\n\n", ["x", "y"]),
        (b"event:test\ndata:x\n\nevent:\ndata:x\n\n", ["x", "x"]),
        (b"id: 1\ndata: 1\n\n: ping\n\nevent: ping\n\nid: 2\n\nretry: 3000\n\ndata:\n\ndata: \ndata:\n\n", ["1"]),
        ("data: ok \u2026 \u2028 \x85 \x0b \x0c \x1c here\n\n".encode(), ["ok \u2026 \u2028 \x85 \x0b \x0c \x1c here"]),
        (b"data: [DONE]  \n\n", ["[DONE]"]),
        (b"data: \xff\n\n", ["\ufffd"]),
        (b"data: {}\n\ndata: {}\n", ["{}", "{}"]),
        (b"data: {}\n\ndata: {}", ["{}", "{}"]),
        (b'data: {}\n\ndata: {"te', ["{}"]),
        (b"", []),
    ],
)  # fmt: skip
async def test_events_are_those_that_a_browser_finds(body: bytes, expected: list[str], piece_bytes: int) -> None:
    assert (await events_of(body, piece_bytes))[0] == expected


@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_lines_of_no_event_are_kept_up_to_a_limit(piece_bytes: int) -> None:
    assert await events_of(b'{\r\n "detail": 1\r\n}', piece_bytes) == ([], '{\n "detail": 1\n}')
    _, stray_text = await events_of(b"x\n" * 10_000, 1000)
    assert len(stray_text) < 1000
