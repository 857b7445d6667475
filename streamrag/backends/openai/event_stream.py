"""Parses a stream of server-sent events, as https://html.spec.whatwg.org/multipage/server-sent-events.html says."""

import codecs
import io
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

OTHER_FIELDS = ("event", "id", "retry", "")  # of no use to us; a comment's name is empty
MAX_STRAY_LINES = 100


async def event_data(body: AsyncIterator[bytes], stray: list[str]) -> AsyncGenerator[str, None]:
    """Yield the data of each event that has some, without spaces around it.

    The last event needs no empty line behind it if it ends as an object does. The first lines that belong to no event,
    usually an error in another format, are appended to `stray`.
    """
    fields: list[str] = []
    async with aclosing(_lines(body)) as lines:
        async for line in lines:
            name, _, value = line.partition(":")
            if name == "data":
                fields.append(value.removeprefix(" "))
            elif not line:
                if data := "\n".join(fields).strip():
                    yield data
                fields.clear()
            elif name not in OTHER_FIELDS and len(stray) < MAX_STRAY_LINES:
                stray.append(line)
    if (data := "\n".join(fields).strip()).endswith("}"):
        yield data


async def _lines(body: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yield the lines of a body in UTF-8, which end with LF, CR or CRLF, and with no other character of Unicode's."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True)
    unfinished: list[str] = []
    async for piece in body:
        first, *others = decoder.decode(piece).split("\n")
        unfinished.append(first)
        for line in others:
            yield "".join(unfinished)
            unfinished = [line]
    for line in ("".join(unfinished) + decoder.decode(b"", final=True)).split("\n"):
        yield line
