"""Plan one step of the engine, in two phases. No memory is allocated or freed, and no queue changes.

    order:   r0   r1   r2   r3   r4 │ idle: i0   i1
             ▲ phase 1 grants tokens from here on       ▲ phase 2 takes victims from here on: i1, i0, r4, r3, ...

Phase 1 walks the order and grants tokens while the budget and the memory last. For a complete prompt, blocks of
requests further back count as free; for a partial one they do if the rule `PartialEviction` allows it. Phase 2 chooses
the victims whose blocks the grants need, from the other end, and the fate of their KV.
Source: arXiv 2604.16395, two-phase scheduling. Every other limit is a rule: see `streamrag.engine.rules`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamrag.engine.recompute_or_swap import Fate
from streamrag.engine.request import Memory, RequestView
from streamrag.engine.rules.rule import Rule, RuleList
from streamrag.engine.walk import Candidate, Grant, StepBudget, Wait, Walk

NO_RULES = RuleList()


@dataclass(frozen=True, slots=True)
class Eviction:
    """`request` loses its KV before this step."""

    request: RequestView
    fate: Fate


class Hold(NamedTuple):
    """A request with tokens to compute that gets none in this step."""

    request_id: str
    rule: str
    """The name of the rule that held it back or put off the step, or "Memory" or "StepBudget"."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Grants in order of urgency, and evictions in the order in which they are made."""

    budget: StepBudget
    """The most that the grants, and what runs ahead of them, may add up to."""
    grants: tuple[Grant, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    is_full: bool = False
    """Whether the step ended before the turn of all requests: its tokens or slots were used up, or a rule ended it."""
    is_put_off: bool = False
    """Whether the step ended early, or grants nothing, because the rest is better planned after the step in flight."""
    waiting: tuple[RequestView, ...] = ()
    """Requests that continue when memory is free, or when their prompt is complete."""
    holds: tuple[Hold, ...] = ()
    """Requests that were held back; empty unless the caller asked for them with `reports_holds`."""

    def __post_init__(self) -> None:
        num_tokens = [grant.num_tokens for grant in self.grants if grant.num_tokens]
        assert sum(num_tokens) <= max(self.budget.num_tokens - self.budget.num_ahead, 0)
        assert len(num_tokens) <= max(self.budget.num_seqs - self.budget.num_ahead - self.budget.num_ending, 0)
        if self.evictions:
            names = [g.request.request_id for g in self.grants] + [e.request.request_id for e in self.evictions]
            assert len(set(names)) == len(names)


def plan(
    order: Sequence[RequestView],
    idle: Callable[[], Sequence[RequestView]],
    budget: StepBudget,
    memory: Memory,
    rules: RuleList = NO_RULES,
    fate: Callable[[RequestView], Fate] = lambda victim: "recompute",
    reports_holds: bool = False,
) -> Plan:
    """Plan which requests compute how many tokens in the next step, and which requests are evicted for it.

    If nothing is granted and nothing runs ahead, plan again without the rules that are waived then. If a rule puts off
    the step, the plan has holds only.

    :param order: the requests that have tokens to compute or hold KV, the most urgent first. `Walk` moves requests with
        output to the front, and drafts to the end.
    :param idle: returns the idle requests, the last of which is the first victim. Called only when memory is short.
    :param fate: decides what happens to a victim's KV.
    :param reports_holds: whether to report the requests that were held back, and the rule that did so.
    """
    # Phase 1
    walk, held_by = _grant_tokens(Walk(order, idle, budget, memory), rules)
    if not walk.grants and not walk.num_ahead and rules.if_nothing_runs is not rules:
        rules = rules.if_nothing_runs
        walk, held_by = _grant_tokens(Walk(order, idle, budget, memory), rules)
    put_off_by = next((type(r).__name__ for r in rules.that_put_off if walk.grants and r.puts_off_step(walk)), "")
    holds = tuple(_holds(walk, held_by, put_off_by)) if reports_holds else ()
    if put_off_by:
        return Plan(budget, is_put_off=True, holds=holds)
    # Phase 2
    victims = walk.victims.choose(walk.num_missing, walk.last_position).victims if walk.num_missing > 0 else []
    evictions = tuple(Eviction(victim, fate(victim)) for victim in victims)
    is_full = walk.is_closed and not walk.is_put_off
    return Plan(budget, tuple(walk.grants), evictions, is_full, walk.is_put_off, tuple(walk.waiting), holds)


def _grant_tokens(walk: Walk, rules: RuleList) -> tuple[Walk, dict[str, str]]:
    """Grant tokens to each request in turn, as rules and memory allow. Return the walk, and a rule per held request.

    A complete prompt that does not fit lets requests behind it that hold KV continue, but lets none without KV start.
    A partial prompt that may not evict blocks no other request.
    """
    for rule in rules.that_start:
        rule.start(walk)
    held_by: dict[str, str] = {}
    for position, request in enumerate(walk.order):
        if walk.is_closed:
            break
        if request.num_tokens <= request.num_computed_tokens or walk.is_closed_to(request):
            continue
        candidate = Candidate(walk, request, position)
        wait, name = _first_wait(candidate, *(rules.for_complete if request.is_complete else rules.for_partial))
        if wait is None:
            walk.grant(candidate)
            for rule in rules.that_observe:
                rule.on_grant(candidate)
        else:
            walk.hold(candidate, wait)
            held_by[request.request_id] = name
    walk.end()
    return walk, held_by


def _first_wait(candidate: Candidate, before: Sequence[Rule], after: Sequence[Rule]) -> tuple[Wait | None, str]:
    """Return how `candidate` must wait, or None, and the name of the first rule that objects, else that of memory."""
    for rule in before:
        if wait := rule.ask(candidate):
            return wait, type(rule).__name__
    candidate.measure()
    for rule in after:
        if wait := rule.ask_measured(candidate):
            return wait, type(rule).__name__
    return candidate.walk.memory_wait(candidate), candidate.held_by_memory


def _holds(walk: Walk, held_by: Mapping[str, str], put_off_by: str) -> Iterator[Hold]:
    """Yield a `Hold` for each request that has tokens to compute and gets none, with the rule that held it, that ended
    the step before its turn, or that put off the step."""
    granted = {grant.request.request_id for grant in walk.grants}
    for request in walk.order:
        request_id, is_granted = request.request_id, request.request_id in granted
        if request.num_remaining_tokens > 0 and (put_off_by or not is_granted):
            yield Hold(request_id, put_off_by if is_granted else held_by.get(request_id) or walk.closed_by(request))
