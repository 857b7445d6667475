"""The requests that could give up KV memory in a step, and the choice among them."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from streamrag.engine.forecast import ChunkForecast
from streamrag.engine.policies import Policy
from streamrag.engine.request import Memory, RequestView


class Choice(NamedTuple):
    """The victims chosen for some blocks."""

    victims: list[RequestView]
    num_freed: int
    """Blocks that they free."""
    is_put_off: bool
    """Whether the next victim cannot be evicted before the step in flight has ended; no other is taken in its place."""


class Victims:
    """The candidates for eviction: first the idle requests, then the order from its end."""

    def __init__(self, order: Sequence[RequestView], idle: Callable[[], Sequence[RequestView]], memory: Memory) -> None:
        self._order = order
        self._idle = idle
        self._memory = memory
        self._measured: list[tuple[RequestView, int, int]] = []  # victim, its position in the order, blocks it frees
        self._unmeasured: list[tuple[RequestView, int]] | None = None
        self._offered: list[tuple[RequestView, int]] = []

    def offer(self, request: RequestView, position: int) -> None:
        """Let any other request take the blocks of `request`, which cannot run in this step."""
        if request.num_blocks:
            self._offered.append((request, position))

    def choose(self, num_blocks: int, after: int) -> Choice:
        """Choose the first victims that together free `num_blocks`, or all of them.

        Victims are first the idle requests, then the requests of the order from its end down to the position behind
        `after`, then the offered requests at `after` or before.
        """
        victims: list[RequestView] = []
        num_freed = 0
        for victim, num_own_blocks in self._candidates(after):
            if num_freed >= num_blocks:
                break
            if not self._memory.can_evict(victim):
                return Choice(victims, num_freed, is_put_off=True)
            victims.append(victim)
            num_freed += num_own_blocks
        return Choice(victims, num_freed, is_put_off=False)

    def _candidates(self, after: int) -> Iterator[tuple[RequestView, int]]:
        """Yield the candidates in the order of `choose`, with the blocks that they free."""
        for victim, position, num_own_blocks in self._measured_candidates():
            if position <= after:
                break
            yield victim, num_own_blocks
        for victim, position in reversed(self._offered):
            if position <= after:
                yield victim, self._memory.num_blocks_freed(victim)

    def _measured_candidates(self) -> Iterator[tuple[RequestView, int, int]]:
        """Yield (victim, position, blocks it frees), idle ones first, then from the order's end, each measured once."""
        yield from self._measured
        if self._unmeasured is None:
            holders = [(r, i) for i, r in enumerate(self._order) if r.num_blocks]
            self._unmeasured = holders + [(r, len(self._order)) for r in self._idle() if r.num_blocks]
        while self._unmeasured:
            victim, position = self._unmeasured.pop()
            self._measured.append((victim, position, self._memory.num_blocks_freed(victim)))
            yield self._measured[-1]


def order_idle(idle: Sequence[RequestView], policy: Policy, forecast: ChunkForecast, now_s: float) -> list[RequestView]:
    """Return the idle streams that hold KV. The last one is the first victim: its next chunk is furthest away."""
    held = policy.order([view for view in idle if view.num_blocks], now_s)
    return sorted(held, key=lambda view: forecast.expected_s(view, now_s))
