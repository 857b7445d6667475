"""Phase 1 of a plan as far as it has come: what is granted, what is left, and who waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from streamrag.engine.memory import Memory, Victims
from streamrag.engine.request import RequestView

MEMORY = "Memory"
BUDGET = "StepBudget"
"""Name for the step's budget where the rule that held a request back is reported."""


class Wait(Enum):
    """The effect on other requests of one that gets nothing in this step."""

    SKIP = auto()
    """No effect: the request goes on in a later step."""
    MEMORY = auto()
    """The request goes on when memory is free; meanwhile any other may take the blocks that it holds."""
    RESERVE = auto()
    """The memory for the request is reserved for others: it goes on as soon as a little more is free, and keeps what it
    holds as long as any other can go on without that."""
    YIELD = auto()
    """The request goes on when others have ended; meanwhile any other may take the blocks that it holds."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The most that one step may compute."""

    num_tokens: int
    num_seqs: int
    """Requests that may compute in one step."""
    num_ahead: int = 0
    """Requests that are served before all others in any case, with one token each, and whose blocks are not free."""


class Grant(NamedTuple):
    """`request` computes `num_tokens` in this step."""

    request: RequestView
    num_tokens: int
    num_blocks_claimed: int | None = None
    """Blocks that it may come to need until its answer ends, if it begins here and there is a KV budget."""


class Candidate:
    """The request whose turn it is, and what the rules have said of it so far."""

    num_reserved: int | None = None
    """Blocks that must stay free if it computes; None if memory may be used up."""
    held_by_memory = MEMORY
    """Name of the rule that holds it back if memory does not suffice: the one that reserves some, if any does."""
    num_blocks_claimed: int | None = None
    """See `Grant`."""
    _num_present: int | None = None
    _num_missing: int | None = None

    def __init__(self, walk: "Walk", request: RequestView, position: int) -> None:
        self.walk = walk
        self.request = request
        self.position = position
        self.is_new = request.num_blocks == 0
        """Whether it holds no KV: it would start in this step."""
        self.num_allowed = walk.num_tokens_left
        """Most tokens that it may compute. It may lack fewer, until `num_missing` was asked."""
        self.may_evict = request.is_complete

    @property
    def num_present(self) -> int:
        """Leading tokens that it need not compute. Costly when asked for the first time."""
        if self._num_present is None:
            self._num_present = self.walk.memory.num_present_tokens(self.request)
        return self._num_present

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes if nothing more is said of it."""
        return min(self.num_allowed, self.request.num_tokens - self.num_present)

    @property
    def num_missing(self) -> int:
        """Blocks that are missing if it computes `num_tokens` beside what is granted; below zero if some stay free.

        Costly when asked for the first time. Rules that shorten what it computes come before those that ask.
        """
        if self._num_missing is None:
            self.num_allowed = self.num_tokens
            needed = self.walk.memory.num_blocks_needed(self.request, self.num_allowed)
            self._num_missing = self.walk.num_missing + needed
        return self._num_missing

    @property
    def is_found_unfit(self) -> bool:
        """Whether it holds nothing, and it was asked at some cost what it needs."""
        return self.is_new and self._num_missing is not None


class Walk:
    """Grants tokens to one candidate after the other, and remembers who waits."""

    def __init__(
        self,
        order: Sequence[RequestView],
        idle: Callable[[], Sequence[RequestView]],
        budget: StepBudget,
        memory: Memory,
    ) -> None:
        self.order = order
        self.memory = memory
        self.victims = Victims(order, idle, memory)
        self.num_tokens = self.num_tokens_left = budget.num_tokens - budget.num_ahead
        self.num_seqs = budget.num_seqs - budget.num_ahead
        self.num_ahead = budget.num_ahead
        self.num_missing = -memory.num_free_blocks
        """Blocks that the grants so far lack; below zero if some stay free."""
        self.num_unfit = 0
        """New requests that were found not to fit."""
        self.grants: list[Grant] = []
        self.last = -1
        """Position of the last grant."""
        self.closed_by = ""
        """Name of the rule that ended the step for all; empty while others may still compute."""
        self.closed_to_partial_by = ""
        """Name of the rule that ended the step for partial prompts; empty while they may still compute."""
        self.closed_to_new_by = ""
        """Name of the rule that ended the step for requests that hold nothing: a more urgent one would never start."""
        self.waiting: list[RequestView] = []
        self._behind_reserve: list[Candidate] = []
        if self.num_tokens <= 0 or self.num_seqs <= 0:
            self.closed_by = BUDGET

    def wait_for_memory(self, candidate: Candidate) -> Wait | None:
        """Return how `candidate` has to wait for memory; None if it fits, or takes from others what it lacks."""
        num_missing = candidate.num_missing
        if candidate.num_reserved is not None and num_missing > -candidate.num_reserved:
            return Wait.MEMORY
        if num_missing <= 0:
            return None
        if not candidate.may_evict:
            return Wait.MEMORY  # those behind need not wait: its turn comes when its prompt is complete
        if self.victims.take(num_missing, candidate.position)[1] >= num_missing:
            return None
        if not self.grants and self.num_ahead == 0:
            # The most urgent request may take everything: what sharing hides from the estimate is free then.
            for held in self._behind_reserve:
                self.victims.offer(held.request, held.position)
            return None
        self.closed_to_new_by = MEMORY
        return Wait.SKIP

    def hold(self, candidate: Candidate, wait: Wait) -> None:
        """Note that `candidate` gets nothing, and who may have what it holds."""
        if wait is Wait.MEMORY:
            self.num_unfit += candidate.is_found_unfit
            self.waiting.append(candidate.request)
        elif wait is Wait.RESERVE:
            self._behind_reserve.append(candidate)
        if wait is Wait.MEMORY or wait is Wait.YIELD:
            self.victims.offer(candidate.request, candidate.position)

    def closed_to(self, request: RequestView) -> str:
        """Return what ended the step for `request`; empty if it may still compute."""
        if not request.is_complete and self.closed_to_partial_by:
            return self.closed_to_partial_by
        return self.closed_by if request.num_blocks else self.closed_by or self.closed_to_new_by

    def grant(self, candidate: Candidate) -> None:
        """Grant `candidate` its tokens."""
        self.num_missing = candidate.num_missing
        self.grants.append(Grant(candidate.request, candidate.num_allowed, candidate.num_blocks_claimed))
        self.num_tokens_left -= candidate.num_allowed
        self.last = candidate.position
        if self.num_tokens_left <= 0 or len(self.grants) >= self.num_seqs:
            self.closed_by = BUDGET

    def end(self) -> None:
        """Have those wait for memory whom nobody's progress will let on."""
        if not self.grants and self.num_ahead == 0:
            self.waiting += [held.request for held in self._behind_reserve]
