"""Retrieval, written down while it happens."""

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import anyio

from streamrag.core import Append, Chunk, CutShort, Progress, Skipped, SourceEvent, Update
from streamrag.errors import TraceError
from streamrag.starting import started_once
from streamrag.support.messages import message_of
from streamrag.support.tasks import run_regardless
from streamrag.trace.background import BackgroundWriter
from streamrag.trace.lines import EndLine, Line, QueryLine, SkippedLine, TextMode
from streamrag.trace.values import Outcome, TracedChunk
from streamrag.trace.write import chunk_key, chunk_line, clean, event_line, make_header, seconds

MAX_BEHIND = 256
"""Events that wait to be written; with more, retrieval waits for the disk."""

CountTokens: TypeAlias = Callable[[Sequence[tuple[int, Chunk]]], Awaitable[Sequence[int]]]
"""Tokens of each chunk as the prompt has it, given its number in the prompt, from 1."""


class TraceRecorder:
    """Writes what retrieval does to a trace file, for `Pipeline(recorder=...)`.

    path: JSON Lines: plain, or gzip (.gz) or zstd (.zst) by its suffix. An existing trace is appended to, as a further
        session; what a killed program left torn at its end is removed first.
    text: "hash" records only a hash and lengths of each chunk. Queries, titles and addresses are always recorded.
    provenance: anything to remember about how the trace came about; plain values.

    A thread writes, so the event loop does not wait for the disk. Whatever happens to the program, the file is complete
    up to the last query that ended. If it cannot be written, queries go on, and closing the recorder raises.

    :raises TraceError: `text` is neither, or `provenance` is not plain values.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        text: TextMode = "full",
        provenance: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if text not in ("full", "hash"):
            raise TraceError(f"TraceRecorder: text={text!r} must be 'full' or 'hash'")
        make_header(text, None, provenance or {})  # raises now rather than in the first query
        self.path = Path(path)
        self._text: TextMode = text
        self._provenance = dict(provenance or {})
        self._clock = clock
        self._writer: BackgroundWriter | None = None
        self._tokenizer: str | None = None
        self._defined: set[str] = set()
        self._num_queries = 0
        self._began_s = 0.0

    @started_once(remedy="A Pipeline owns its recorder: give it one that was not started, and to no other Pipeline")
    async def start(self, progress: Progress) -> None:
        """Open the file, and repair its end if it needs that.

        :raises TraceError: the file is something else, is broken, is being recorded to, or cannot be written.
        :raises MissingDependencyError: it is a .zst file, and zstandard is not installed.
        """
        progress(f"recording to {self.path}")
        try:
            await run_regardless(self._open(), "streamrag trace opens")
        except BaseException:  # whoever is cancelled has not entered what would close it
            await self.aclose()
            raise
        self._defined = set()
        self._num_queries = 0

    async def _open(self) -> None:
        self._writer = await anyio.to_thread.run_sync(BackgroundWriter, self.path)
        self._tokenizer = self._writer.tokenizer

    async def aclose(self) -> None:
        """Write what is left, and close the file. Does nothing when not started.

        :raises TraceError: something could not be written.
        """
        writer, self._writer, self.is_started = self._writer, None, False
        if writer:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(writer.close)

    async def __aenter__(self) -> Self:
        await self.start(lambda line: None)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def record(
        self, query: str, events: AsyncIterator[SourceEvent], count_tokens: CountTokens, *, tokenizer: str
    ) -> AsyncGenerator[SourceEvent, None]:
        """The same events, each recorded when it comes. Close it if it is not read to its end: that closes them too.

        `tokenizer` names what `count_tokens` counts with.

        :raises TraceError: the recorder is not started, or the trace has counts of another tokenizer.
        """
        began_s = self._clock()
        writer, query_id = self._begin(query, tokenizer, began_s)
        outcome: Outcome = "cancelled"
        failure: Exception | None = None
        cut_short: str | None = None
        num_chunks = 0
        try:
            async for event in events:
                at_s = self._clock() - began_s
                if isinstance(event, Skipped):
                    writer.put([_skipped(query_id, at_s, event)])
                elif isinstance(event, CutShort):
                    cut_short = event.reason
                else:
                    appends = isinstance(event, Append)
                    chunks = (event.chunk,) if isinstance(event, Append) else event.chunks
                    first = num_chunks + 1 if appends else 1
                    num_chunks = first + len(chunks) - 1
                    counts = await count_tokens(list(enumerate(chunks, first)))
                    writer.put(self._event_lines(query_id, at_s, event, chunks, counts))
                if writer.num_behind > MAX_BEHIND:
                    await anyio.to_thread.run_sync(writer.catch_up)
                yield event
            outcome = "complete"
        except Exception as error:
            outcome, failure = "failed", error
            raise
        finally:
            end = EndLine(
                query=query_id,
                end_s=seconds(self._clock() - began_s),
                outcome=outcome,
                error=None if failure is None else clean(message_of(failure)),
                cut_short=None if cut_short is None else clean(cut_short),
            )
            writer.put([end], flush=True)
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    def _begin(self, query: str, tokenizer: str, began_s: float) -> tuple[BackgroundWriter, str]:
        if not self._writer:
            raise TraceError("TraceRecorder is not started: use it in a Pipeline, or in `async with` first")
        if self._tokenizer not in (None, tokenizer):
            raise TraceError(
                f"{self.path} has token counts of {self._tokenizer!r}, and these would be of {tokenizer!r}: "
                "record to another file"
            )
        self._tokenizer = tokenizer
        if self._num_queries == 0:
            self._began_s = began_s
            self._writer.put([make_header(self._text, tokenizer, self._provenance)], flush=True)
        self._num_queries += 1
        query_id = f"{self._writer.num_sessions + 1}-{self._num_queries}"
        self._writer.put([QueryLine(id=query_id, arrival_s=seconds(began_s - self._began_s), text=clean(query))])
        return self._writer, query_id

    def _event_lines(
        self, query_id: str, at_s: float, event: Append | Update, chunks: Sequence[Chunk], counts: Sequence[int]
    ) -> Iterator[Line]:
        """Made in the writer's thread."""
        keys = []
        for chunk, num_tokens in zip(chunks, counts, strict=True):
            text, uri, title = clean(chunk.text), clean(chunk.uri), clean(chunk.title)
            key = chunk_key(text, uri, title, chunk.passage)
            keys.append(key)
            if key not in self._defined:
                self._defined.add(key)
                yield chunk_line(TracedChunk(key, num_tokens, text, uri, title, chunk.passage), self._text)
        scores = [chunk.score for chunk in chunks]
        yield event_line(query_id, at_s, keys, scores, event.hint, appends=isinstance(event, Append))


def _skipped(query_id: str, at_s: float, event: Skipped) -> SkippedLine:
    return SkippedLine(query=query_id, at_s=seconds(at_s), uri=clean(event.uri), reason=clean(event.reason))
