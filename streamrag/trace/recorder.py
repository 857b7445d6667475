"""The recorder, which writes retrieval events to a trace as they happen."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeAlias

import anyio

from streamrag.core import Append, Chunk, CutShort, Progress, Skipped, Source, SourceEvent, Update
from streamrag.core.lifecycle import start_all, started_once
from streamrag.core.retrieval import Retrieval
from streamrag.errors import SourceError, TraceError
from streamrag.support.messages import message_of
from streamrag.support.tasks import cancel_and_wait, run_shielded
from streamrag.support.validation import validated
from streamrag.trace.file_schema import EndLine, QueryLine, TextMode, TraceLine
from streamrag.trace.values import RetrievalOutcome, TracedAppend, TracedChunk, TracedSkip, TracedUpdate
from streamrag.trace.write import SessionEncoder, chunk_key, clean, make_header, seconds
from streamrag.trace.writer_thread import WriterThread

MAX_BEHIND = 256  # maximum number of queued events; with more, retrieval waits for the disk (backpressure)

CountTokens: TypeAlias = Callable[[Sequence[tuple[int, Chunk]]], Awaitable[Sequence[int]]]
"""Counts the tokens of chunks as formatted in the prompt. Each comes with its number in the prompt, from 1."""

OnRecorded: TypeAlias = Callable[[int, int], None]
"""Called with the number of ended queries, and the number of chunk events so far."""


class TraceRecorder:
    """A recorder of retrieval events to a trace file, for `Pipeline(recorder=...)`.

    path: JSON Lines, compressed by suffix with gzip (.gz) or zstd (.zst). A new session is appended to an existing
        trace, whose torn end, as after a killed program, is removed first.
    text: "hash" records only a hash and the lengths of each chunk. Queries, titles and addresses are always recorded.
    provenance: JSON values that describe the trace's origin.

    A thread writes the file, so the event loop does not wait for the disk. Even if the program is killed, the file is
    complete up to the last query that ended. If writing fails, queries continue, and closing the recorder raises.

    :raises ConfigurationError: `text` is neither "full" nor "hash".
    :raises TraceError: `provenance` has values that are not JSON values.
    """

    @validated
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        text: TextMode = "full",
        provenance: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        make_header(text, None, provenance or {})  # validates `provenance`
        self.path = Path(path)
        self._text: TextMode = text
        self._provenance = dict(provenance or {})
        self._clock = clock
        self._writer: WriterThread | None = None
        self._tokenizer: str | None = None
        self._encoder = SessionEncoder(text)
        self._num_queries = 0
        self._began_s = 0.0

    @started_once(remedy="A Pipeline owns its recorder: give it one that was not started, and to no other Pipeline")
    async def start(self, progress: Progress) -> None:
        """Open the file for a new session, and remove a torn end. If this fails or is cancelled, close the file.

        :raises AlreadyStartedError: the recorder is started.
        :raises TraceError: the file is not a trace, is damaged, is open in another recorder, or cannot be written.
        :raises MissingDependencyError: it is a .zst file, but zstandard is not installed.
        """
        progress(f"recording to {self.path}")
        try:
            await run_shielded(self._open(), "streamrag trace opens")
        except BaseException:  # a cancelled caller cannot close it
            await self.aclose()
            raise
        self._encoder = SessionEncoder(self._text)
        self._num_queries = 0

    async def _open(self) -> None:
        """Open the file in a thread, and take over the tokenizer of its earlier sessions."""
        self._writer = await anyio.to_thread.run_sync(WriterThread, self.path)
        self._tokenizer = self._writer.tokenizer

    async def aclose(self) -> None:
        """Write the queued lines, and close the file, even if cancelled. Does nothing if not started.

        :raises TraceError: a line could not be written.
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
        """Record each event with its time, then yield it unchanged; at any end, record the outcome and its time.

        A `CutShort` is not recorded when it comes: its reason is recorded at the end, beside the outcome. Closing this
        generator closes `events` too. If too many events are unwritten, wait for the disk. Only `aclose` raises an
        error of writing.

        tokenizer: the name of the tokenizer that `count_tokens` uses.

        :raises TraceError: the recorder is not started, or the trace has token counts of another tokenizer.
        """
        began_s = self._clock()
        writer, query_id = self._begin(query, tokenizer, began_s)
        outcome: RetrievalOutcome = "cancelled"
        error_text: str | None = None
        cut_short: str | None = None
        num_chunks = 0
        try:
            async for event in events:
                at_s = self._clock() - began_s
                if isinstance(event, CutShort):
                    cut_short = clean(event.reason)
                elif isinstance(event, Skipped):
                    writer.put(self._encoder.encode(query_id, TracedSkip(at_s, event.uri, event.reason)))
                else:
                    first = num_chunks + 1 if isinstance(event, Append) else 1
                    chunks = (event.chunk,) if isinstance(event, Append) else event.chunks
                    num_chunks = first + len(chunks) - 1
                    counts = await count_tokens(list(enumerate(chunks, first)))
                    writer.put(self._encode(query_id, at_s, event, counts))
                if writer.num_behind > MAX_BEHIND:
                    await anyio.to_thread.run_sync(writer.catch_up)
                yield event
            outcome = "complete"
        except Exception as error:
            outcome, error_text = "failed", clean(message_of(error))
            raise
        finally:
            end_s = seconds(self._clock() - began_s)
            end = EndLine(query=query_id, end_s=end_s, outcome=outcome, error=error_text, cut_short=cut_short)
            writer.put([end], flush=True)
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    def _begin(self, query: str, tokenizer: str, began_s: float) -> tuple[WriterThread, str]:
        """Queue a header before the session's first query, then the query; return writer and id. Raises as `record`."""
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

    def _encode(self, query_id: str, at_s: float, event: Append | Update, counts: Sequence[int]) -> Iterator[TraceLine]:
        """Yield an event's lines, with the definitions of new chunks; the writer's thread iterates over them."""
        chunks = (event.chunk,) if isinstance(event, Append) else event.chunks
        traced = tuple(map(_traced_chunk, chunks, counts))
        if isinstance(event, Append):
            yield from self._encoder.encode(query_id, TracedAppend(at_s, traced[0], event.hint))
        else:
            yield from self._encoder.encode(query_id, TracedUpdate(at_s, traced, event.hint))


def _traced_chunk(chunk: Chunk, num_tokens: int) -> TracedChunk:
    text, uri, title = clean(chunk.text), clean(chunk.uri), clean(chunk.title)
    key = chunk_key(text, uri, title, chunk.passage)
    return TracedChunk(key, num_tokens, text, uri, title, chunk.passage, chunk.score)


async def record_queries(
    queries: Sequence[str],
    source: Source,
    recorder: TraceRecorder,
    count_tokens: CountTokens,
    *,
    tokenizer: str,
    num_at_once: int = 1,
    progress: Progress = lambda line: None,
    on_recorded: OnRecorded = lambda num_queries, num_events: None,
) -> dict[str, SourceError]:
    """Record `queries` without a model, at most `num_at_once` at a time; return the SourceErrors by failed query.

    Starts and closes both the source and the recorder. Any other error cancels the other queries, and is raised.

    on_recorded: called after each event and each end of a query.

    :raises ConfigurationError, TraceError: the source or the recorder cannot be started; the trace cannot be written.
    """
    failed: dict[str, SourceError] = {}
    num_ended = num_events = 0
    admission = anyio.CapacityLimiter(num_at_once)

    async def record(query: str) -> None:
        nonlocal num_ended, num_events
        async with admission:
            retrieval = Retrieval(source, query).events()
            try:
                async with aclosing(recorder.record(query, retrieval, count_tokens, tokenizer=tokenizer)) as events:
                    async for event in events:
                        num_events += isinstance(event, Append | Update)
                        on_recorded(num_ended, num_events)
            except SourceError as error:
                failed[query] = error
            num_ended += 1
            on_recorded(num_ended, num_events)

    async with await start_all((source, recorder), progress):
        tasks = [asyncio.create_task(record(query), name="streamrag record") for query in queries]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(tasks)
    return failed
