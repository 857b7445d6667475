"""KV memory as a plan sees it, and those who could give some of it up."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from streamrag.engine.request import RequestView


class Memory(Protocol):
    """The KV memory, as a plan sees it. Its methods may be costly; a plan calls them only where the result matters."""

    num_free_blocks: int

    def num_present_tokens(self, request: RequestView) -> int:
        """Leading tokens that `request` would not compute if it ran now: what it holds, and what the prefix cache has
        of the rest."""

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        """Free blocks that must be there for `request` to compute `num_tokens` more."""

    def num_blocks_freed(self, request: RequestView) -> int:
        """Blocks that come free if `request` alone loses its KV: those that it shares with nobody. A lower bound."""


class Victims:
    """Requests that could give up their KV, the first to go first: the idle ones, then the order from its end."""

    def __init__(self, order: Sequence[RequestView], idle: Callable[[], Sequence[RequestView]], memory: Memory) -> None:
        self._order = order
        self._idle = idle
        self._memory = memory
        self._found: list[tuple[RequestView, int, int]] = []  # victim, its position in the order, blocks that it frees
        self._rest: list[tuple[RequestView, int]] | None = None
        self._yielding: list[tuple[RequestView, int]] = []

    def offer(self, request: RequestView, position: int) -> None:
        """Let anybody have what `request` holds, also from behind it: it cannot go on in this step."""
        if request.num_blocks:
            self._yielding.append((request, position))

    def take(self, num_blocks: int, after: int) -> tuple[list[RequestView], int]:
        """Return the first victims that together free `num_blocks`, and how many blocks they do free.

        Victims are all behind position `after`, then those that are on offer.
        """
        taken: list[RequestView] = []
        num_freed = 0
        for victim, position, num_freed_by_it in self._from_the_end():
            if num_freed >= num_blocks or position <= after:
                break
            taken.append(victim)
            num_freed += num_freed_by_it
        for victim, position in reversed(self._yielding):
            if num_freed >= num_blocks:
                break
            if position <= after:
                taken.append(victim)
                num_freed += self._memory.num_blocks_freed(victim)
        return taken, num_freed

    def _from_the_end(self) -> Iterator[tuple[RequestView, int, int]]:
        """Ask for each victim only when it is needed: mostly none is."""
        yield from self._found
        if self._rest is None:
            holders = [(r, i) for i, r in enumerate(self._order) if r.num_blocks]
            self._rest = holders + [(r, len(self._order)) for r in self._idle() if r.num_blocks]
        while self._rest:
            victim, position = self._rest.pop()
            self._found.append((victim, position, self._memory.num_blocks_freed(victim)))
            yield self._found[-1]
