"""One step of the engine, planned in two phases that change nothing.

    order:   r0   r1   r2   r3   r4 │ idle: i0   i1
             ▲ phase 1 grants tokens from here on       ▲ phase 2 takes victims from here on: i1, i0, r4, r3, ...

Phase 1 walks the order and grants tokens while the budget lasts and memory suffices, counting as free what those
behind could give up. Phase 2 names the victims that the grants need, from the other end, and what becomes of their KV.
Source: arXiv 2604.16395, two-phase scheduling.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamrag.engine.eviction import Fate
from streamrag.engine.groups import Groups, NextBlock
from streamrag.engine.request import RequestView
from streamrag.engine.step_size import StepSize

BACKLOG_SHARE = 1 / 32
"""Share of what waits to be computed up to which partial prompts fill any step: who has that much before it is hardly
delayed by so much more, and long steps have less overhead. Source: our simulations of arXiv 2604.16395's crawls."""

MOST_TRIES = 4
"""Partial prompts in a step that are found not to fit, before only those are asked whose turn it is: what each needs is
costly to know, they are many when memory is short, and hardly anybody fits then."""

NUM_IN_TURN = 4
"""Positions of the order that have their turn in a step, so that everybody is asked some time."""

LEAST_DATA_TOKENS = 128
"""Of a session's data in a step, however many others there are: shorter steps are hardly quicker. Source: arXiv
2605.13784, section 3.7."""

NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Budget:
    """What complete prompts may claim of the KV memory, answers included."""

    num_blocks: int
    """That nobody has claimed; below zero if one alone has claimed more than there is."""
    has_claims: bool
    """Whether anybody has. Else the next is served whatever it claims."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use."""

    num_tokens: int
    """Token budget."""
    num_seqs: int
    """Requests that may compute in one step."""
    can_partial_evict: bool = False
    """Whether a request whose prompt is partial may take memory from others. If so, partial prompts thrash."""
    can_growing_evict: bool = False
    """Whether those may that only grow. It serves them well where what is lost is copied back and not computed again:
    little is left to compute when they are complete."""
    num_ahead: int = 0
    """Requests that are served before all others in any case, with one token each, and whose blocks are not free."""
    num_partial_tokens: int | None = None
    """If given, steps are lean: partial prompts compute so many tokens at most, and none beside a complete one, so that
    neither those that wait for an answer nor what comes next waits for a long step. See `BACKLOG_SHARE`."""
    step_size: StepSize | None = None
    """If given, a step computes only as many tokens of complete prompts as are worth that others wait for its end."""
    is_early: bool = False
    """Whether there is time to plan later, because a step computes prompts now. A step of partial prompts only is put
    off: nobody waits for it, and a prompt that becomes complete before it starts would wait for its end. So is a long
    one of complete prompts, see `StepSize.is_better_late`."""
    num_blocks_kept_free: int = 0
    """Blocks that must be left free where a partial prompt that was evicted starts again. What it needs before it is
    complete is likely to be wanted by others soon, and then computed in vain a second time."""
    num_blocks_kept_from_data: int | None = None
    """If given, data of sessions are computed only where so many blocks stay free, and take memory from nobody: what
    is short of memory goes to questions."""
    max_data_tokens: int | None = None
    """If given, most tokens of one session's data in a step: an equal share among all that have prompts to compute,
    between `LEAST_DATA_TOKENS` and this."""
    budget: Budget | None = None
    """If given, a complete prompt begins only if what it may come to need is there. Nobody who needs less begins
    before it."""
    turn: int = 0
    """Number of the step: of partial prompts that hold nothing, others are asked in each whether they fit."""


class Memory(Protocol):
    """KV memory as a plan sees it. Answers may be costly; each is asked for only where it matters."""

    num_free_blocks: int

    def num_present_tokens(self, request: RequestView) -> int:
        """Leading tokens that `request` would not compute if it ran now: what it holds, and what the prefix cache has
        of the rest."""

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        """Free blocks that must be there for `request` to compute `num_tokens` more."""

    def num_blocks_freed(self, request: RequestView) -> int:
        """Blocks that come free if `request` alone loses its KV: those that it shares with nobody. A lower bound."""


@dataclass(frozen=True, slots=True)
class Grant:
    """`request` computes `num_tokens` in this step."""

    request: RequestView
    num_tokens: int
    num_blocks_claimed: int | None = None
    """If it begins here and there is a budget, blocks that it may come to need until its answer ends."""


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
    is_put_off: bool = False
    """Whether nothing is granted now so that it can be planned anew when the step under way has ended."""
    waiting: tuple[RequestView, ...] = ()
    """Partial prompts that go on when memory is free, or when they are complete: of those that were asked."""


class _Victims:
    """Those who could give up their KV, the first to go first. Asks lazily: mostly none is needed."""

    def __init__(self, order: Sequence[RequestView], idle: Callable[[], Sequence[RequestView]], memory: Memory) -> None:
        self._order = order
        self._idle = idle
        self._memory = memory
        self._found: list[tuple[RequestView, int, int]] = []  # victim, its position in the order, blocks that it frees
        self._rest: list[tuple[RequestView, int]] | None = None
        self._yielding: list[tuple[RequestView, int]] = []

    def yields(self, request: RequestView, position: int) -> None:
        """`request` cannot go on, and what it holds may be had by anybody, also from behind it."""
        if request.num_blocks:
            self._yielding.append((request, position))

    def take(self, num_blocks: int, after: int) -> tuple[list[RequestView], int]:
        """The first victims that together free `num_blocks`, and how many they do free: all behind position `after`,
        then those that yield."""
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
        yield from self._found
        if self._rest is None:
            holders = [(r, i) for i, r in enumerate(self._order) if r.num_blocks]
            self._rest = holders + [(r, len(self._order)) for r in self._idle() if r.num_blocks]
        while self._rest:
            victim, position = self._rest.pop()
            self._found.append((victim, position, self._memory.num_blocks_freed(victim)))
            yield self._found[-1]


def plan(
    order: Sequence[RequestView],
    idle: Callable[[], Sequence[RequestView]],
    limits: Limits,
    memory: Memory,
    fate: Callable[[RequestView], Fate] = lambda victim: "recompute",
    next_block: NextBlock | None = None,
) -> Plan:
    """Who computes how much in the next step, and who gives up memory for it.

    `order` holds the requests that have something to compute or KV in use, the most urgent first; those that have shown
    a token are moved to its front, and of these first the ones that hold a slot, which cannot be taken from them
    without their KV. `idle` gives the idle ones in the same sense, and is asked only when memory is short. A request
    that does not fit lets those behind it continue, but nobody behind it start: it would never fit. A partial prompt
    that may not evict stands in nobody's way, nor does what it holds. With `next_block`, requests that share what they
    have to compute next do it once; see `streamrag.engine.groups`.
    """
    if shown := [r for r in order if r.has_output]:
        shown.sort(key=lambda r: not r.is_running)
        order = shown + [r for r in order if not r.has_output]
    num_waiting = _num_waiting(order, limits.step_size) if limits.step_size else 0.0
    for num_tries in (MOST_TRIES, len(order)):
        victims = _Victims(order, idle, memory)
        groups = Groups(next_block)
        grants, num_missing, last, waiting = _select(order, num_waiting, victims, limits, memory, num_tries, groups)
        if grants or limits.num_ahead or num_tries >= len(order):
            break  # else nobody has anything to do, and there is time to ask everybody
    if limits.is_early and grants and not limits.num_ahead and _is_better_late(grants, num_waiting, limits.step_size):
        return Plan((), (), is_put_off=True)
    taken, _ = victims.take(num_missing, last) if num_missing > 0 else ([], 0)
    evictions = tuple(Eviction(victim, fate(victim)) for victim in taken)
    return Plan(tuple(grants), evictions, waiting=tuple(waiting))


def _num_waiting(order: Sequence[RequestView], size: StepSize) -> float:
    """Complete prompts that have something to compute, and those that will come while they are computed."""
    num, length, pair = 0, 0.0, size.pair
    for request in order:
        if not request.is_complete or request.has_output:
            continue
        # `num_likely_tokens` and `StepSize.length`, written out: hundreds wait on a busy engine.
        num_before, num_kept = request.num_computed_tokens, request.num_kept_tokens
        if num_kept > num_before:
            num_before = num_kept
        num_likely = request.num_tokens - num_before
        if num_likely:
            num += 1
            length += num_likely * (1 + pair * (num_before + num_likely / 2))
    return num + size.arrivals * length


def _length(request: RequestView, num_tokens: int, size: StepSize) -> float:
    return size.length(num_tokens, request.num_tokens - request.num_likely_tokens)


def _is_better_late(grants: Sequence[Grant], num_waiting: float, size: StepSize | None) -> bool:
    """Whether this step should be planned when the one under way has ended."""
    if not any(grant.request.is_complete for grant in grants):
        return True
    length = sum(_length(g.request, g.num_tokens, size) for g in grants) if size else 0.0
    return size is not None and size.is_better_late(length, num_waiting)


def _select(
    order: Sequence[RequestView],
    num_waiting: float,
    victims: _Victims,
    limits: Limits,
    memory: Memory,
    num_tries: int,
    groups: Groups,
) -> tuple[list[Grant], int, int, list[RequestView]]:
    """Phase 1: the grants, the free blocks that they miss, the position of the last, and who waits for memory."""
    grants: list[Grant] = []
    waiting: list[RequestView] = []
    num_all_tokens = num_tokens_left = limits.num_tokens - limits.num_ahead
    num_seqs_left = limits.num_seqs - limits.num_ahead
    num_lean_left = NO_LIMIT if limits.num_partial_tokens is None else limits.num_partial_tokens
    num_filling = None
    num_ready, size = 0, limits.step_size if num_waiting else None
    length_left = size.longest(num_waiting) if size is not None else math.inf
    num_most_of_data = _num_data_tokens(order, limits)
    budget, is_over_budget = limits.budget, False
    num_kept_from_data = limits.num_blocks_kept_from_data
    deferred: list[RequestView] = []
    num_needed, last, is_blocked, num_tries_left = 0, -1, False, num_tries
    for position, request in enumerate(order):
        if num_tokens_left <= 0 or length_left < 1 or len(grants) >= num_seqs_left:
            break
        is_new, is_complete = request.num_blocks == 0, request.is_complete
        if request.num_remaining_tokens <= 0 or (is_blocked and is_new):
            continue
        num_most = num_tokens_left
        if not is_complete:
            if num_filling is None:  # a busy engine hardly ever comes to a partial prompt
                num_filling = _num_filling_tokens(order, limits, memory)
            num_most = min(num_most, max(num_lean_left, num_filling - (num_all_tokens - num_tokens_left)))
            if request.num_step_tokens is not None:
                num_most = min(num_most, request.num_step_tokens)
        is_data = request.request_class == "stream" and not is_complete
        if is_data:
            num_most = min(num_most, num_most_of_data)
        if num_most <= 0:
            continue
        can_growing_evict = limits.can_growing_evict and not request.is_speculative
        may_evict = is_complete or limits.can_partial_evict or can_growing_evict
        has_turn = (position - limits.turn * NUM_IN_TURN) % len(order) < NUM_IN_TURN
        if num_tries_left <= 0 and is_new and not (may_evict or has_turn):
            continue
        waits = is_new and request.was_evicted and not may_evict
        # Before it is asked what is left of its KV: that takes a while, and in most steps it would be for nothing.
        if waits and num_needed - memory.num_free_blocks > -limits.num_blocks_kept_free:
            waiting.append(request)
            continue
        needs_claim = budget is not None and is_complete and not request.has_claim
        if needs_claim and is_over_budget:
            victims.yields(request, position)
            continue
        num_present = memory.num_present_tokens(request)
        num_tokens = min(request.num_tokens - num_present, num_most)
        is_waiting, length = is_complete and not request.has_output, 0.0
        if size is not None:
            num_tokens = int(min(num_tokens, max(size.num_fitting(length_left, num_present), 1)))
            length = size.length(num_tokens, num_present)
            if is_waiting and not size.is_worth(length, num_ready, num_waiting):
                break
        if groups.must_wait(request, num_present):
            continue
        num_claimed = _num_claimed(request, num_present, memory) if needs_claim else None
        if num_claimed is not None and budget is not None and budget.has_claims and num_claimed > budget.num_blocks:
            is_over_budget = True
            victims.yields(request, position)
            continue
        num_needed_now = num_needed + memory.num_blocks_needed(request, num_tokens)
        num_missing = num_needed_now - memory.num_free_blocks
        if waits and num_missing > -limits.num_blocks_kept_free:
            num_tries_left -= 1
            waiting.append(request)
            continue
        if is_data and num_kept_from_data is not None:
            if -num_kept_from_data < num_missing <= 0:
                deferred.append(request)  # it has memory as soon as a little is free
                continue
            may_evict = False
        if num_missing > 0:
            if not may_evict:
                num_tries_left -= is_new
                waiting.append(request)
                victims.yields(request, position)
                continue  # its turn comes when the prompt is complete: those behind need not wait for that
            # The most urgent request may take everything: what sharing hides from the estimate is free then.
            is_first = not grants and limits.num_ahead == 0
            if not is_first and victims.take(num_missing, position)[1] < num_missing:
                is_blocked = True
                continue
        grants.append(Grant(request, num_tokens, num_claimed))
        groups.add(request, num_present, num_tokens)
        if budget is not None and num_claimed is not None:
            budget = Budget(budget.num_blocks - num_claimed, has_claims=True)
        num_tokens_left -= num_tokens
        length_left -= length
        if is_waiting:
            num_waiting -= 1
            num_ready += num_present + num_tokens == request.num_tokens
        num_needed, last = num_needed_now, position
        if not is_complete:
            num_lean_left -= num_tokens
        elif not request.has_output:
            num_lean_left = 0
    if not grants and limits.num_ahead == 0:
        waiting += deferred  # nobody will free any
    return grants, num_needed - memory.num_free_blocks, last, waiting


def _num_claimed(request: RequestView, num_present: int, memory: Memory) -> int:
    """Blocks that a complete prompt may come to need until its answer ends, but for those that others hold as well."""
    num_held = memory.num_blocks_freed(request) if request.num_blocks else 0
    num_to_come = request.num_tokens - num_present + request.num_answer_tokens
    return num_held + memory.num_blocks_needed(request, num_to_come)


def _num_data_tokens(order: Sequence[RequestView], limits: Limits) -> int:
    """The most that one session's data may compute in this step."""
    if limits.max_data_tokens is None:
        return NO_LIMIT
    num_prompts = sum(r.num_remaining_tokens > 0 and not r.has_output for r in order)
    return min(max(limits.num_tokens // max(num_prompts, 1), LEAST_DATA_TOKENS), limits.max_data_tokens)


def _num_filling_tokens(order: Sequence[RequestView], limits: Limits, memory: Memory) -> int:
    """The size of a step up to which partial prompts may compute in any case.

    A backlog is what must be computed sooner or later. That is not known of speculative prompts, nor of those that must
    wait for memory: others may be complete first.
    """
    if limits.num_partial_tokens is None:
        return NO_LIMIT
    is_memory_short = memory.num_free_blocks <= limits.num_blocks_kept_free
    num_tokens = 0
    for request in order:
        if request.is_complete or not (request.is_speculative or (is_memory_short and not request.num_blocks)):
            num_before, num_kept = request.num_computed_tokens, request.num_kept_tokens
            num_tokens += request.num_tokens - (num_before if num_before > num_kept else num_kept)
    return int(num_tokens * BACKLOG_SHARE)
