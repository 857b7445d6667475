"""One step of the engine, planned in two phases that change nothing.

    order:   r0   r1   r2   r3   r4 │ idle: i0   i1
             ▲ phase 1 grants tokens from here on       ▲ phase 2 takes victims from here on: i1, i0, r4, r3, ...

Phase 1 walks the order and grants tokens while the budget lasts and memory suffices, counting as free what those
behind could give up. Phase 2 names the victims that the grants need, from the other end, and what becomes of their KV.
Source: arXiv 2604.16395, two-phase scheduling. Everything else is a rule: see `streamrag.engine.rules`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamrag.engine.eviction import Fate
from streamrag.engine.memory import Memory
from streamrag.engine.request import RequestView
from streamrag.engine.rules.rule import LateRule, Rule
from streamrag.engine.walk import Candidate, Grant, StepBudget, Wait, Walk


@dataclass(frozen=True, slots=True)
class Eviction:
    """`request` loses its KV before this step."""

    request: RequestView
    fate: Fate


class Hold(NamedTuple):
    """A request that gets nothing in this step, and what held it back."""

    request_id: str
    rule: str
    """The name of a rule, or "Memory" or "StepBudget"."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Grants in order of urgency, and evictions in the order in which they are made."""

    grants: tuple[Grant, ...]
    evictions: tuple[Eviction, ...]
    is_put_off: bool = False
    """Whether nothing is granted now so that it can be planned anew when the step under way has ended."""
    waiting: tuple[RequestView, ...] = ()
    """Requests that were asked, and go on when memory is free, or when they are complete."""
    holds: tuple[Hold, ...] = ()
    """Requests that have tokens to compute and get none, if the caller wanted to know."""


def plan(
    order: Sequence[RequestView],
    idle: Callable[[], Sequence[RequestView]],
    budget: StepBudget,
    memory: Memory,
    rules: Sequence[Rule] = (),
    fate: Callable[[RequestView], Fate] = lambda victim: "recompute",
    tells_holds: bool = False,
) -> Plan:
    """Plan who computes how much in the next step, and who gives up memory for it.

    :param order: the requests that have something to compute or KV in use, the most urgent first. Those that have shown
        a token are moved to its front, and of these first the ones that hold a slot, which cannot be taken from them
        without their KV.
    :param idle: returns the idle ones in the same sense; called only when memory is short.
    :param fate: says what becomes of a victim's KV.
    :param tells_holds: whether the plan says who gets nothing, and which rule held it back.
    """
    if shown := [r for r in order if r.has_output]:
        shown.sort(key=lambda r: not r.is_running)
        order = shown + [r for r in order if not r.has_output]
    # Phase 1
    walk, holds = _grant_tokens(Walk(order, idle, budget, memory), rules)
    if not walk.grants and not walk.num_ahead and any(rule.only_saves_time for rule in rules):
        # Nobody has anything to do, and there is time to ask everybody.
        rules = [rule for rule in rules if not rule.only_saves_time]
        walk, holds = _grant_tokens(Walk(order, idle, budget, memory), rules)
    told = tuple(_all_holds(walk, holds)) if tells_holds else ()
    if walk.grants and any(isinstance(rule, LateRule) and rule.is_better_late(walk) for rule in rules):
        return Plan((), (), is_put_off=True, holds=told)
    # Phase 2
    victims = walk.victims.take(walk.num_missing, walk.last)[0] if walk.num_missing > 0 else []
    evictions = tuple(Eviction(victim, fate(victim)) for victim in victims)
    return Plan(tuple(walk.grants), evictions, waiting=tuple(walk.waiting), holds=told)


def _grant_tokens(walk: Walk, rules: Sequence[Rule]) -> tuple[Walk, dict[str, str]]:
    """Ask the rules, then memory, about each request in turn; return the rule that held each request back.

    A request that does not fit lets those behind it continue, but nobody behind it start. A partial prompt that may not
    evict stands in nobody's way, nor does what it holds.
    """
    for rule in rules:
        rule.start(walk)
    learners = [rule for rule in rules if type(rule).on_grant is not Rule.on_grant]
    for_complete = [rule for rule in rules if rule.asks_complete]
    for_partial = [rule for rule in rules if rule.asks_partial]
    holds: dict[str, str] = {}
    for position, request in enumerate(walk.order):
        if walk.closed_by:
            break
        if request.num_tokens <= request.num_computed_tokens or walk.closed_to(request):
            continue
        candidate = Candidate(walk, request, position)
        wait, name = _first_wait(candidate, for_complete if request.is_complete else for_partial)
        if wait is None:
            walk.grant(candidate)
            for rule in learners:
                rule.on_grant(candidate)
        else:
            walk.hold(candidate, wait)
            holds[request.request_id] = name
    walk.end()
    return walk, holds


def _first_wait(candidate: Candidate, rules: Sequence[Rule]) -> tuple[Wait | None, str]:
    for rule in rules:
        if wait := rule.ask(candidate):
            return wait, type(rule).__name__
    return candidate.walk.wait_for_memory(candidate), candidate.held_by_memory


def _all_holds(walk: Walk, holds: Mapping[str, str]) -> Iterator[Hold]:
    """Yield who gets nothing; who was not asked was held back by what ended the step for it."""
    granted = {grant.request.request_id for grant in walk.grants}
    for request in walk.order:
        if request.num_remaining_tokens > 0 and request.request_id not in granted:
            yield Hold(request.request_id, holds.get(request.request_id) or walk.closed_to(request))
