"""One step of the engine, planned in two phases that change nothing.

    order:   r0   r1   r2   r3   r4 │ idle: i0   i1
             ▲ phase 1 grants tokens from here on       ▲ phase 2 takes victims from here on: i1, i0, r4, r3, ...

Phase 1 walks the order and grants tokens while the budget lasts and memory suffices, counting as free what those
behind could give up. Phase 2 names the victims that the grants need, from the other end, and what becomes of their KV.
Source: arXiv 2604.16395, two-phase scheduling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from streamrag.engine.request import RequestView

__all__ = ["Eviction", "Fate", "Grant", "Limits", "Memory", "Plan", "plan"]

Fate: TypeAlias = Literal["recompute", "swap"]
"""What becomes of a victim's KV: forgotten, or copied to host memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use."""

    num_tokens: int
    """Token budget."""
    num_seqs: int
    """Requests that may compute in one step."""
    can_partial_evict: bool = True
    """Whether a request whose prompt is partial may take memory from others. Without, partial prompts thrash less."""
    num_ahead: int = 0
    """Requests that are served before all others in any case, with one token each, and whose blocks are not free."""


class Memory(Protocol):
    """KV memory as a plan sees it. Answers may be costly; each is asked for only where it matters."""

    num_free_blocks: int

    def num_cached_tokens(self, request: RequestView) -> int:
        """Leading tokens that `request`, which holds nothing, would find in the prefix cache if it started now."""

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        """Free blocks that must be there for `request` to compute `num_tokens` more."""

    def num_blocks_freed(self, request: RequestView) -> int:
        """Blocks that come free if `request` alone loses its KV: those that it shares with nobody. A lower bound."""


@dataclass(frozen=True, slots=True)
class Grant:
    """`request` computes `num_tokens` in this step."""

    request: RequestView
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """`request` loses its KV before this step."""

    request: RequestView
    fate: Fate


@dataclass(frozen=True, slots=True)
class Plan:
    """Grants in order of urgency, and evictions in the order in which they are made."""

    grants: tuple[Grant, ...]
    evictions: tuple[Eviction, ...]


class _Victims:
    """Those who could give up their KV, the first to go first. Asks lazily: mostly none is needed."""

    def __init__(self, order: Sequence[RequestView], idle: Callable[[], Sequence[RequestView]], memory: Memory) -> None:
        self._order = order
        self._idle = idle
        self._memory = memory
        self._found: list[tuple[RequestView, int, int]] = []  # victim, its position in the order, blocks freed so far
        self._rest: list[tuple[RequestView, int]] | None = None

    def _next(self) -> tuple[RequestView, int] | None:
        if self._rest is None:
            holders = [(r, i) for i, r in enumerate(self._order) if r.num_blocks]
            self._rest = holders + [(r, len(self._order)) for r in self._idle() if r.num_blocks]
        return self._rest.pop() if self._rest else None

    def take(self, num_blocks: int, after: int) -> tuple[list[RequestView], int]:
        """The first victims that together free `num_blocks`, all behind position `after`, and how many they do free."""
        taken: list[RequestView] = []
        num_freed = 0
        for victim, position, num_freed_then in self._found:
            if num_freed >= num_blocks or position <= after:
                return taken, num_freed
            taken.append(victim)
            num_freed = num_freed_then
        while num_freed < num_blocks and (found := self._next()):
            victim, position = found
            num_freed_then = num_freed + self._memory.num_blocks_freed(victim)
            self._found.append((victim, position, num_freed_then))
            if position <= after:
                break
            taken.append(victim)
            num_freed = num_freed_then
        return taken, num_freed


def plan(
    order: Sequence[RequestView],
    idle: Callable[[], Sequence[RequestView]],
    limits: Limits,
    memory: Memory,
    fate: Callable[[RequestView], Fate] = lambda victim: "recompute",
) -> Plan:
    """Who computes how much in the next step, and who gives up memory for it.

    `order` holds the requests that have something to compute or KV in use, the most urgent first; those that have shown
    a token are moved to its front, and of these first the ones that hold a slot, which cannot be taken from them
    without their KV. `idle` gives the idle ones in the same sense, and is asked only when memory is
    short. A request that does not fit lets those behind it continue, but nobody behind it start: it would never fit.
    """
    if shown := [r for r in order if r.has_output]:
        shown.sort(key=lambda r: not r.is_running)
        order = shown + [r for r in order if not r.has_output]
    victims = _Victims(order, idle, memory)
    grants, num_missing, last = _select(order, victims, limits, memory)
    taken, _ = victims.take(num_missing, last) if num_missing > 0 else ([], 0)
    return Plan(tuple(grants), tuple(Eviction(victim, fate(victim)) for victim in taken))


def _select(
    order: Sequence[RequestView], victims: _Victims, limits: Limits, memory: Memory
) -> tuple[list[Grant], int, int]:
    """Phase 1: the grants, the free blocks that they miss, and the position of the last."""
    grants: list[Grant] = []
    num_tokens_left = limits.num_tokens - limits.num_ahead
    num_seqs_left = limits.num_seqs - limits.num_ahead
    num_needed, last, is_blocked = 0, -1, False
    for position, request in enumerate(order):
        if num_tokens_left <= 0 or len(grants) >= num_seqs_left:
            break
        is_new = request.num_blocks == 0
        if request.num_remaining_tokens <= 0 or (is_blocked and is_new):
            continue
        num_present = request.num_computed_tokens or (memory.num_cached_tokens(request) if is_new else 0)
        num_tokens = min(request.num_tokens - num_present, num_tokens_left)
        num_needed_now = num_needed + memory.num_blocks_needed(request, num_tokens)
        num_missing = num_needed_now - memory.num_free_blocks
        # The most urgent request may take everything: what sharing hides from the estimate is free then.
        is_first = not grants and limits.num_ahead == 0
        if num_missing > 0 and not is_first and not _can_cover(num_missing, request, position, victims, limits):
            is_blocked = True
            continue
        grants.append(Grant(request, num_tokens))
        num_tokens_left -= num_tokens
        num_needed, last = num_needed_now, position
    return grants, num_needed - memory.num_free_blocks, last


def _can_cover(num_missing: int, request: RequestView, position: int, victims: _Victims, limits: Limits) -> bool:
    if not (request.is_complete or limits.can_partial_evict):
        return False
    return victims.take(num_missing, position)[1] >= num_missing
