"""Several sources at once, as one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf
from typing import TypeAlias

from streamrag.core import (
    Append,
    Chunk,
    CutShort,
    Hint,
    Progress,
    Skipped,
    Source,
    SourceEvent,
    Update,
    part_name,
)
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.modes.context import Context, UpdateMode
from streamrag.retrieving import Retrieval
from streamrag.sources.fusion import RRF_K, reciprocal_rank_fusion, without_score
from streamrag.starting import start_all, started_once
from streamrag.support.messages import is_number, message_of, short
from streamrag.support.tasks import cancel_regardless

_Came: TypeAlias = tuple[int, SourceEvent | BaseException | None, asyncio.Event]
"""The number of a source, what came from it, or None at its end, and what is set when that has been used."""

_Expected: TypeAlias = tuple[float, Hint | None]
"""When a source's last event came, and what it said of those to come."""

PACE = 4
"""Times as long as a fusion took, what comes is collected before the next: thousands of chunks take time to sort."""


class Merged:
    """Asks all `sources` at once.

    While they only append, so does this, in order of arrival. Once one of them has sent an `Update`, every event is an
    `Update` with the passages of all, fused by reciprocal rank; `weights`, one for each source, say whose ranks count
    for more, and the larger `k` is, the less the first ranks differ from the others. Hints are of all together: what
    each source that still runs expected last, the chunks added, and the latest end; unknown where one has not said. A
    source that fails is skipped and reported; when all fail, so does this. The sources are started and closed with it.

    :raises ConfigurationError: there is no source, or `weights` are not as many positive numbers, or `k` is below 0.
    """

    def __init__(
        self, *sources: Source, weights: Sequence[float] | None = None, k: int = RRF_K, name: str = ""
    ) -> None:
        if not sources:
            raise ConfigurationError("Merged needs at least one source")
        for source in sources:
            if isinstance(source, type) or not callable(getattr(source, "stream", None)):
                raise ConfigurationError(
                    f"Merged: {short(source)} is no source: it is no object with a method 'stream'"
                )
        if weights is not None:
            weights = tuple(weights) if isinstance(weights, Iterable) else ()
            if len(weights) != len(sources) or not all(is_number(each) and 0 < each < inf for each in weights):
                raise ConfigurationError(f"Merged: weights={short(weights)} must be a positive number for each source")
        if not is_number(k) or not 0 <= k < float("inf"):
            raise ConfigurationError(f"Merged: k={short(k)} must be a number, at least 0")
        self._sources = sources
        self._weights = weights
        self._k = k
        self._started = AsyncExitStack()
        self.name = name or f"Merged({', '.join(map(part_name, sources))})"

    @started_once
    async def start(self, progress: Progress) -> None:
        """Start the sources that must be, at once. If one cannot be, the others are closed."""
        self._started = await start_all(self._sources, progress)

    async def aclose(self) -> None:
        """Close the sources."""
        self.is_started = False
        await self._started.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """The events of all sources.

        :raises SourceError: all of them failed.
        """
        came: asyncio.Queue[_Came] = asyncio.Queue()
        pulls = [asyncio.create_task(_pull(i, each, query, came)) for i, each in enumerate(self._sources)]
        rankings = [Context() for _ in pulls]
        known: dict[tuple[str, str], Chunk] = {}  # so that a passage stays the same chunk, whoever finds it again
        is_appended: set[Chunk] = set()
        fused: tuple[Chunk, ...] | None = None
        errors: list[BaseException] = []
        next_s, is_changed = 0.0, False
        now = asyncio.get_running_loop().time
        expected: dict[int, _Expected] = dict.fromkeys(range(len(pulls)), (0.0, None))  # of each source that runs
        try:
            while expected or is_changed:
                if is_changed and (not expected or now() >= next_s):
                    began_s, is_changed = now(), False
                    before, fused = fused, reciprocal_rank_fusion(rankings, self._weights, k=self._k)
                    next_s = now() + PACE * (now() - began_s)  # whoever reads it may take as long as they like
                    if fused != before:
                        yield Update(fused, _together(expected.values(), now()))
                    continue
                try:
                    number, event, is_used = await asyncio.wait_for(came.get(), next_s - now() if is_changed else None)
                except TimeoutError:
                    continue
                if isinstance(event, Append | Update):
                    event = _renamed(event, known)
                    expected[number] = now(), event.hint
                    rankings[number] = rankings[number].become(UpdateMode().fold(rankings[number], event))
                    if isinstance(event, Update) or fused is not None:
                        fused, is_changed = fused or (), True
                    elif event.chunk not in is_appended:
                        is_appended.add(event.chunk)
                        yield replace(event, hint=_together(expected.values(), now()))
                elif isinstance(event, Skipped | CutShort):
                    yield event
                elif isinstance(event, StreamRagError) and not isinstance(event, SourceError):
                    raise event  # the program's mistake, not a failed retrieval
                else:
                    del expected[number]
                    if event is not None:
                        errors.append(event)
                        yield Skipped(part_name(self._sources[number]), message_of(event))
                is_used.set()
        finally:
            await cancel_regardless(pulls)
        if len(errors) == len(pulls):
            raise SourceError(f"{self.name} failed: {'; '.join(map(message_of, errors))}") from errors[0]


def _together(running: Iterable[_Expected], now_s: float) -> Hint | None:
    """What sources that run expect together; those that have ended expect nothing."""
    hints = [(at_s, hint or Hint()) for at_s, hint in running]
    chunks = [hint.num_chunks for _, hint in hints if hint.num_chunks is not None]
    ends = [max(hint.end_s - (now_s - at_s), 0.0) for at_s, hint in hints if hint.end_s is not None]
    num_chunks = sum(chunks) if len(chunks) == len(hints) else None
    end_s = max(ends, default=0.0) if len(ends) == len(hints) else None
    return None if num_chunks is None and end_s is None else Hint(num_chunks, end_s)


def _renamed(event: Append | Update, known: dict[tuple[str, str], Chunk]) -> Append | Update:
    """The event with the chunks that are known already for the same texts of the same documents."""

    def same(chunk: Chunk) -> Chunk:
        return known.setdefault((chunk.uri, chunk.text), without_score(chunk))

    if isinstance(event, Append):
        return replace(event, chunk=same(event.chunk))
    return replace(event, chunks=tuple(map(same, event.chunks)))


async def _pull(number: int, source: Source, query: str, came: "asyncio.Queue[_Came]") -> None:
    """Each event, once the one before has been used; then its error, or None for its end."""
    end: BaseException | None = None
    retrieval = Retrieval(source, query)
    try:
        async for event in retrieval.events():
            is_used = asyncio.Event()
            came.put_nowait((number, event, is_used))
            await is_used.wait()
    except Exception as error:
        end = error
    finally:
        await retrieval.aclose()
    came.put_nowait((number, end, asyncio.Event()))
