"""Concurrent sources, merged into one."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated, TypeAlias

from pydantic import Field

from streamrag.core import Append, Chunk, CutShort, Hint, Progress, Skipped, Source, SourceEvent, Update, part_name
from streamrag.core.lifecycle import start_all, started_once
from streamrag.core.retrieval import Retrieval
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.modes.context import Context, UpdateMode
from streamrag.sources.fusion import RRF_K, reciprocal_rank_fusion, without_score
from streamrag.support.messages import message_of, short_repr
from streamrag.support.tasks import cancel_and_wait
from streamrag.support.validation import Number, Positive, validated

log = logging.getLogger("streamrag.sources")

_Queue: TypeAlias = "asyncio.Queue[tuple[int, SourceEvent | BaseException | None, asyncio.Event]]"
"""The number of a source; its event, its error, or None at its end; and an event to set when that was processed."""

FUSION_INTERVAL = 4  # time between fusions, in durations of the last one: thousands of chunks take time to sort


class MergedSource:
    """A source that queries all `sources` concurrently.

    While the sources only append, their appends are passed on as they arrive. After the first `Update` of a source,
    every event is an `Update` with the passages of all sources, ranked by reciprocal rank fusion. A hint adds up the
    chunks that the running sources expect and takes their latest end; it is unknown while one of them has given no
    hint. A source that fails is reported as `Skipped`, with the reason in the log; if all fail, the merged source
    fails. Starting and closing it starts and closes `sources`.

    sources: the sources to query; with the same text from several of them, the first one's passage is used.
    weights: a factor for the ranks of each source; 1 by default.
    k: the rank fusion's constant; the larger it is, the less the first ranks stand out.
    name: name for errors and schedulers; by default it lists the names of `sources`.

    :raises ConfigurationError: there is no source, or `weights` or `k` is invalid.
    """

    @validated
    def __init__(
        self,
        *sources: Source,
        weights: Sequence[Positive] | None = None,
        k: Annotated[Number, Field(ge=0)] = RRF_K,
        name: str = "",
    ) -> None:
        if not sources:
            raise ConfigurationError("MergedSource needs at least one source")
        for source in sources:
            if isinstance(source, type) or not callable(getattr(source, "stream", None)):
                raise ConfigurationError(f"MergedSource: {short_repr(source)} is no source: it has no method 'stream'")
        if weights is not None and len(weights) != len(sources):
            raise ConfigurationError(f"weights={short_repr(weights)} must be a positive number for each source")
        self._sources = sources
        self._weights = weights
        self._k = k
        self._started = AsyncExitStack()
        self.name = name or f"MergedSource({', '.join(map(part_name, sources))})"

    @started_once
    async def start(self, progress: Progress) -> None:
        """Start the sources concurrently. If one fails to start, the others are closed."""
        self._started = await start_all(self._sources, progress)

    async def aclose(self) -> None:
        """Close the sources that `start` started."""
        self.is_started = False
        await self._started.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the merged events of all sources. A failed one gives a `Skipped`, and the others continue.

        Once fused, events that arrive within four times the last fusion's duration are fused together.

        :raises SourceError: all sources failed.
        :raises StreamRagError: a source reports a mistake of the program, such as a source that is not started.
        """
        queue: _Queue = asyncio.Queue()
        pulls = [asyncio.create_task(_pull(i, each, query, queue)) for i, each in enumerate(self._sources)]
        context = _MergedContext(len(pulls), self._weights, self._k)
        errors: list[BaseException] = []
        try:
            while context.running or context.is_changed:
                if (wait_s := context.wait_s()) is not None and wait_s <= 0:
                    if (update := context.fuse()) is not None:
                        yield update
                    continue
                try:
                    number, event, is_processed = await asyncio.wait_for(queue.get(), wait_s)
                except TimeoutError:
                    continue
                if isinstance(event, Append | Update):
                    if (passed_on := context.add(number, event)) is not None:
                        yield passed_on
                elif isinstance(event, Skipped | CutShort):
                    yield event
                else:
                    del context.running[number]
                    if event is not None:
                        errors.append(event)
                        yield skip_failed(self._sources[number], event)
                is_processed.set()
        finally:
            await cancel_and_wait(pulls)
        if len(errors) == len(pulls):
            raise SourceError(f"{self.name} failed: {'; '.join(map(message_of, errors))}") from errors[0]


class _MergedContext:
    """The passages and hints of all sources for one query."""

    def __init__(self, num_sources: int, weights: Sequence[float] | None, k: float) -> None:
        self._weights, self._k = weights, k
        self._rankings = [Context() for _ in range(num_sources)]
        self._chunks: dict[tuple[str, str], Chunk] = {}
        self._appended: set[Chunk] = set()
        self._fused: tuple[Chunk, ...] | None = None
        """The passages of the last `Update`; None while all sources only append."""
        self._next_fusion_s = 0.0
        self._now = asyncio.get_running_loop().time
        self.is_changed = False  # whether events have arrived since the last fusion
        self.running: dict[int, tuple[float, Hint | None]] = dict.fromkeys(range(num_sources), (0.0, None))
        """The time and the hint of the last event of each running source."""

    def wait_s(self) -> float | None:
        """Return the seconds until the next fusion, or None if there is nothing to fuse."""
        if not self.is_changed:
            return None
        return self._next_fusion_s - self._now() if self.running else 0.0

    def add(self, number: int, event: Append | Update) -> Append | None:
        """Add a source's event. Return the append to pass on, with the merged hint, unless its chunk is known.

        From the first `Update` on, return None, and set `is_changed` for the next fusion.
        """
        if isinstance(event, Append):
            event = replace(event, chunk=self._unify(event.chunk))
        else:
            event = replace(event, chunks=tuple(map(self._unify, event.chunks)))
        self.running[number] = self._now(), event.hint
        ranking = self._rankings[number]
        self._rankings[number] = ranking.with_chunks(UpdateMode().fold(ranking, event))
        if isinstance(event, Update) or self._fused is not None:
            self._fused, self.is_changed = self._fused or (), True
            return None
        if event.chunk in self._appended:
            return None
        self._appended.add(event.chunk)
        return replace(event, hint=self._hint())

    def _unify(self, chunk: Chunk) -> Chunk:
        """Return the first chunk with the same text and uri, from whichever source."""
        return self._chunks.setdefault((chunk.uri, chunk.text), without_score(chunk))

    def fuse(self) -> Update | None:
        """Fuse all rankings, and set the time of the next fusion; return the `Update`, or None if nothing changed."""
        began_s, self.is_changed = self._now(), False
        before, self._fused = self._fused, reciprocal_rank_fusion(self._rankings, self._weights, k=self._k)
        self._next_fusion_s = self._now() + FUSION_INTERVAL * (self._now() - began_s)
        return Update(self._fused, self._hint()) if self._fused != before else None

    def _hint(self) -> Hint | None:
        """Return the sum of expected chunks and the latest end from now, each None if a running source knows none.

        Return None if both are None.
        """
        hints = [(at_s, hint or Hint()) for at_s, hint in self.running.values()]
        chunks = [hint.num_chunks for _, hint in hints if hint.num_chunks is not None]
        ends = [max(hint.end_s - (self._now() - at_s), 0.0) for at_s, hint in hints if hint.end_s is not None]
        num_chunks = sum(chunks) if len(chunks) == len(hints) else None
        end_s = max(ends, default=0.0) if len(ends) == len(hints) else None
        return None if num_chunks is None and end_s is None else Hint(num_chunks, end_s)


def skip_failed(source: object, error: BaseException) -> Skipped:
    """Log a source's error, and return an event that does not quote it. Raise a mistake of the program instead.

    A mistake is a StreamRagError that is no SourceError.
    """
    if isinstance(error, StreamRagError) and not isinstance(error, SourceError):
        raise error  # a mistake of the program, not a failed retrieval
    log.warning("%s failed: %s: %s", part_name(source), type(error).__name__, message_of(error))
    return Skipped(part_name(source), "the source failed")


async def _pull(number: int, source: Source, query: str, queue: _Queue) -> None:
    """Put each event into the queue after the previous one was processed; at last the error, or None."""
    end: BaseException | None = None
    retrieval = Retrieval(source, query)
    try:
        async for event in retrieval.events():
            is_processed = asyncio.Event()
            queue.put_nowait((number, event, is_processed))
            await is_processed.wait()
    except Exception as error:
        end = error
    finally:
        await retrieval.aclose()
    queue.put_nowait((number, end, asyncio.Event()))
