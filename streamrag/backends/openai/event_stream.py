"""Parses a stream of server-sent events, as https://html.spec.whatwg.org/multipage/server-sent-events.html says."""

import codecs
import io
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

FIELDS = ("event", "id", "retry", "")  # of no use to us; a comment's name is empty
MAX_STRAY_LINES = 100


class EventStream:
    """The data of the events in a body.

    Events without data, such as pings, are left out. The last event is complete without an empty line if it ends as an
    object does: some servers forget that line.
    """

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._stray: list[str] = []

    @property
    def stray_text(self) -> str:
        """The first lines that belong to no event: as a rule, an error in another format."""
        return "\n".join(self._stray)

    async def data(self) -> AsyncGenerator[str, None]:
        """Yield the data of each event, without spaces around it."""
        fields: list[str] = []
        async with aclosing(_lines(self._body)) as lines:
            async for line in lines:
                name, _, value = line.partition(":")
                if name == "data":
                    fields.append(value.removeprefix(" "))
                elif not line:
                    if data := "\n".join(fields).strip():
                        yield data
                    fields.clear()
                elif name not in FIELDS and len(self._stray) < MAX_STRAY_LINES:
                    self._stray.append(line)
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
