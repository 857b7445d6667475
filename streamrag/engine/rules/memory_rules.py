"""Rules about memory: who may evict, which KV blocks stay free, admission by a KV budget, slots for LoRA adapters, and
planning time when memory is short."""

from collections.abc import Callable, Set
from typing import NamedTuple

from streamrag.engine.request import RequestView
from streamrag.engine.rules.rule import Rule
from streamrag.engine.walk import Candidate, Wait, Walk


class PartialEviction(Rule):
    """Decides whether partial prompts may evict other requests, which they may not without this rule.

    Growing prompts gain from it if evicted KV is copied back rather than computed again: they have little left to
    compute when they are complete. Prompts that are replaced would only thrash. It comes before `Turns` and `LowWater`,
    which read `may_evict`.

    can_partial: whether all partial prompts may evict.
    can_growing: returns whether partial prompts that are not speculative may evict in this step.
    """

    asks_complete = False

    def __init__(self, can_partial: bool = False, can_growing: Callable[[], bool] = lambda: False) -> None:
        self._can_partial = can_partial
        self._can_growing = can_growing

    def start(self, walk: Walk) -> None:
        self._can_growing_now = self._can_growing()

    def ask(self, candidate: Candidate) -> Wait | None:
        candidate.may_evict = self._can_partial or (self._can_growing_now and not candidate.request.is_speculative)
        return None


LOW_WATER = 0.1
"""Share of the KV blocks that `LowWater` keeps free by default."""


class LowWater(Rule):
    """Keeps `num_blocks` free beside a partial prompt that was evicted, would start again, and may not evict others.

    Other requests are likely to need its blocks before it is complete, and would evict it a second time.
    """

    asks_complete = False

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def ask(self, candidate: Candidate) -> Wait | None:
        """Reserve `num_blocks` beside such a candidate; return `MEMORY` if they are not free even before it starts."""
        if not candidate.is_new or not candidate.request.was_evicted or candidate.may_evict:
            return None
        candidate.num_reserved, candidate.held_by_memory = self._num_blocks, type(self).__name__
        # Its own need is costly to compute and is checked last, by `Walk.memory_wait`.
        return Wait.MEMORY if candidate.walk.num_missing > -self._num_blocks else None


class DataHighWater(Rule):
    """Keeps `num_blocks` free for questions: data of a session wait (`RESERVE`) if they fit only there; none evict."""

    asks_complete = False

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def ask_measured(self, candidate: Candidate) -> Wait | None:
        if candidate.request.request_class != "stream":
            return None
        candidate.may_evict = False
        return Wait.RESERVE if -self._num_blocks < candidate.num_missing <= 0 else None


class ConnectorLookup(Rule):
    """Lets a partial prompt wait while a KV connector looks up what it has of it, or until it is complete.

    look_up: returns how a prompt has to wait for the connector; None if it need not.
    """

    asks_complete = False

    def __init__(self, look_up: Callable[[RequestView], Wait | None]) -> None:
        self._look_up = look_up

    def ask(self, candidate: Candidate) -> Wait | None:
        return self._look_up(candidate.request)


class KvBudgetLeft(NamedTuple):
    """The KV memory that complete prompts may still claim, for their prompts and answers."""

    num_blocks: int
    """Blocks that are not claimed; negative if one request alone has claimed more than there are."""
    has_claims: bool
    """Whether any request has a claim. If none has, the next one may start whatever it claims."""


class KvBudget(Rule):
    """Admits a complete prompt only if there is KV memory for it and its whole answer.

        starts ──claim: blocks for prompt and answer──▶ in the budget ──evicted, or ended──▶ claim released

    Once a prompt does not fit, smaller ones behind it wait too, so that it cannot starve. Blocks that other requests
    hold already are not claimed: questions of one session share all but their own tokens.
    Source: cell-budget admission of arXiv 2605.13784, section 3.7.

    budget_left: returns what is left of the budget when a plan starts.
    """

    asks_partial = False

    def __init__(self, budget_left: Callable[[], KvBudgetLeft]) -> None:
        self._budget_left = budget_left

    def start(self, walk: Walk) -> None:
        self._num_blocks, self._has_claims = self._budget_left()
        self._is_over = False

    def ask(self, candidate: Candidate) -> Wait | None:
        """Set what `candidate` claims; once a claim does not fit beside others, return `YIELD` to all without one."""
        if candidate.request.has_claim or not candidate.num_tokens:  # the latter while a connector has yet to load it
            return None
        if not self._is_over:
            candidate.num_blocks_claimed = _num_blocks_until_end(candidate)
            self._is_over = self._has_claims and candidate.num_blocks_claimed > self._num_blocks
        return Wait.YIELD if self._is_over else None

    def on_grant(self, candidate: Candidate) -> None:
        if candidate.num_blocks_claimed is not None:
            self._num_blocks -= candidate.num_blocks_claimed
            self._has_claims = True


def _num_blocks_until_end(candidate: Candidate) -> int:
    """Return how many unshared blocks the request may hold when its answer ends: those held, and those it needs."""
    request, memory = candidate.request, candidate.walk.memory
    num_held = memory.num_blocks_freed(request) if request.num_blocks else 0
    num_tokens = request.num_tokens - candidate.num_present + request.num_answer_tokens
    return num_held + memory.num_blocks_needed(request, num_tokens)


class AdapterSlots(Rule):
    """Lets at most `max_adapters` LoRA adapters into one step: vLLM's engine ends if a step has more.

    adapters_ahead: returns the adapters of the requests that run before the plan.
    """

    def __init__(self, max_adapters: int, adapters_ahead: Callable[[], Set[int]]) -> None:
        self._max_adapters = max_adapters
        self._adapters_ahead = adapters_ahead
        self._adapters: set[int] = set()

    def start(self, walk: Walk) -> None:
        self._adapters = set(self._adapters_ahead())

    def ask(self, candidate: Candidate) -> Wait | None:
        adapter = candidate.request.adapter_id
        is_new = adapter is not None and adapter not in self._adapters
        return Wait.SKIP if is_new and len(self._adapters) >= self._max_adapters else None

    def on_grant(self, candidate: Candidate) -> None:
        if candidate.request.adapter_id is not None:
            self._adapters.add(candidate.request.adapter_id)


MOST_TRIES = 4
"""Requests that are measured not to fit, before further ones are only examined in turn: measuring is costly, and when
memory is short, many requests wait and hardly any fits."""

NUM_IN_TURN = 4
"""Positions of the order that are examined in each step once `MOST_TRIES` is reached, so that all get their turn."""


class Turns(Rule):
    """Skips partial prompts that would start and may not evict once `MOST_TRIES` did not fit, except a few in turn."""

    asks_complete = False
    is_waived_if_nothing_runs = True

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn - 1

    def start(self, walk: Walk) -> None:
        self._turn += 1

    def ask(self, candidate: Candidate) -> Wait | None:
        if candidate.walk.num_unfit < MOST_TRIES or not candidate.is_new or candidate.may_evict:
            return None
        num = len(candidate.walk.order)
        has_turn = (candidate.position - self._turn * NUM_IN_TURN) % num < NUM_IN_TURN
        return None if has_turn else Wait.SKIP
