"""The state of phase 1 of a plan: grants so far, what is left of the budget, and the requests that wait."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from streamrag.engine.request import Memory, RequestView
from streamrag.engine.victims import Victims

MEMORY = "Memory"
BUDGET = "StepBudget"
"""Names that a plan reports in place of a rule's, for requests held back by memory or by the step's budget."""


class Wait(Enum):
    """The effect on other requests of one that gets nothing in this step."""

    SKIP = auto()
    """No effect: it continues in a later step."""
    MEMORY = auto()
    """Waiting for free memory. Meanwhile any other request may take its blocks."""
    RESERVE = auto()
    """Waiting because memory is reserved for others. Its own blocks are taken only if nothing else could run."""
    YIELD = auto()
    """Waiting for other requests to end. Meanwhile any other request may take its blocks."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The most that one step may compute."""

    num_tokens: int
    num_seqs: int
    """Requests that may compute in one step."""
    num_ahead: int = 0
    """Requests that run before the plan with one token each. Their blocks do not count as free."""
    num_ending: int = 0
    """Requests that hold a slot, and KV, until the step in flight ends, and compute nothing more."""


class Grant(NamedTuple):
    """`request` computes `num_tokens` in this step."""

    request: RequestView
    num_tokens: int
    """0 if it only asks for KV that is elsewhere."""
    num_blocks_claimed: int | None = None
    """Blocks that it may need until its answer ends; None unless it starts here under a KV budget."""


class Candidate:
    """The request whose turn it is, and what the rules have decided about it so far."""

    num_reserved = 0
    """Blocks that must stay free if it computes and may not evict."""
    held_by_memory = MEMORY
    """Name to report if memory does not suffice: that of the rule that reserved blocks, if one did."""
    num_blocks_claimed: int | None = None
    """See `Grant`."""
    num_missing: int
    """Blocks still missing for `num_allowed` tokens beside the grants; negative if some stay free. Set by `measure`."""
    _num_present: int | None = None

    def __init__(self, walk: "Walk", request: RequestView, position: int) -> None:
        self.walk = walk
        self.request = request
        self.position = position
        self.is_new = request.num_blocks == 0
        """Whether it holds no KV, so that it would start in this step."""
        self.num_allowed = walk.num_tokens_left
        """Most tokens that it may compute. Rules change it; `measure` lowers it to what its prompt has left."""
        self.may_evict = request.is_complete

    @property
    def num_present(self) -> int:
        """Leading tokens that it need not compute. The first access is costly."""
        if self._num_present is None:
            self._num_present = self.walk.memory.num_present_tokens(self.request)
        return self._num_present

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes if no rule lowers `num_allowed` further."""
        return min(self.num_allowed, self.request.num_tokens - self.num_present)

    def measure(self) -> None:
        """Fix `num_allowed` and compute `num_missing`, which is costly."""
        self.num_allowed = self.num_tokens
        needed = self.walk.memory.num_blocks_needed(self.request, self.num_allowed)
        self.num_missing = self.walk.num_missing + needed


class Walk:
    """A walk through the order that grants tokens to one candidate after the other.

    Whatever the policy says, requests with output come first, and drafts last. Of the requests with output, those that
    hold a slot come first: their slot cannot be taken without evicting their KV. `prompts` are neither of the two.
    """

    def __init__(
        self,
        order: Sequence[RequestView],
        idle: Callable[[], Sequence[RequestView]],
        budget: StepBudget,
        memory: Memory,
    ) -> None:
        drafts = [r for r in order if r.request_class == "draft"]
        others = [r for r in order if r.request_class != "draft"] if drafts else order
        self.with_output = [r for r in others if r.has_output]
        self.with_output.sort(key=lambda r: not r.is_running)
        self.prompts = [r for r in others if not r.has_output] if self.with_output else others
        self.order = [*self.with_output, *self.prompts, *drafts]
        self.memory = memory
        self.victims = Victims(self.order, idle, memory)
        self.num_tokens = self.num_tokens_left = budget.num_tokens - budget.num_ahead
        self.num_seqs_left = budget.num_seqs - budget.num_ahead - budget.num_ending
        self.num_ahead = budget.num_ahead
        self.num_ending = budget.num_ending
        self.num_missing = -memory.num_free_blocks
        """Blocks still missing for the grants so far; negative if some stay free."""
        self.num_unfit = 0
        """Requests that would start in this step but were measured not to fit."""
        self.grants: list[Grant] = []
        self.last_position = -1
        """Position of the last grant; -1 before the first."""
        self.is_closed = False
        """Whether the step has ended for all requests."""
        self.is_closed_to_partial = False
        """Whether the step has ended for partial prompts."""
        self.is_closed_to_new = False
        """Whether a request that may evict did not fit: none without KV may start behind it."""
        self.is_put_off = False
        """Whether the step ended because a victim cannot be evicted before the step in flight has ended."""
        self.waiting: list[RequestView] = []
        self._held_by_reserve: list[Candidate] = []
        self._closed_by = self._closed_to_partial_by = ""  # names, for reports
        if self.num_tokens <= 0 or self.num_seqs_left <= 0:
            self.close(BUDGET)

    @property
    def frees_memory(self) -> bool:
        """Whether a request computes in this step, or ends before it, so that its end will free memory."""
        return bool(self.grants or self.num_ahead or self.num_ending)

    def memory_wait(self, candidate: Candidate) -> Wait | None:
        """Return how `candidate` has to wait for memory; None if it fits, or if victims can free what it lacks.

        It is `MEMORY` if the candidate may not evict or needs reserved blocks. Otherwise it is `SKIP`, and the step
        ends for requests without KV; but if nothing else runs, the candidate may take everything. If the next victim
        cannot be evicted before the step in flight has ended, this step ends for all, so that the victim rests.
        """
        num_missing = candidate.num_missing
        if num_missing <= -candidate.num_reserved:
            return None
        if not candidate.may_evict:
            self.num_unfit += candidate.is_new
            return Wait.MEMORY  # requests behind it may run: its own turn comes when its prompt is complete
        choice = self.victims.choose(num_missing, candidate.position)
        if choice.num_freed >= num_missing:
            return None
        if choice.is_put_off:
            self.is_put_off = True
            self.close(MEMORY)
            return Wait.SKIP
        if not self.frees_memory:
            # The most urgent request may take everything. Shared blocks, which the estimate leaves out, are freed too.
            for held in self._held_by_reserve:
                self.victims.offer(held.request, held.position)
            return None
        self.is_closed_to_new = True
        return Wait.SKIP

    def hold(self, candidate: Candidate, wait: Wait) -> None:
        """Record that `candidate` waits for memory or behind a reserve; offer its blocks if `MEMORY` or `YIELD`."""
        if wait is Wait.MEMORY:
            self.waiting.append(candidate.request)
        elif wait is Wait.RESERVE:
            self._held_by_reserve.append(candidate)
        if wait is Wait.MEMORY or wait is Wait.YIELD:
            self.victims.offer(candidate.request, candidate.position)

    def close(self, name: str) -> None:
        """End the step for all requests. `name` is what reports say of those that it leaves without tokens."""
        self.is_closed, self._closed_by = True, name

    def close_to_partial(self, name: str) -> None:
        """End the step for partial prompts. `name` is what reports say of them."""
        self.is_closed_to_partial, self._closed_to_partial_by = True, name

    def is_closed_to(self, request: RequestView) -> bool:
        """Whether the step has ended for `request`, or for all."""
        is_closed_to_new = self.is_closed_to_new and not request.num_blocks
        return self.is_closed or is_closed_to_new or (self.is_closed_to_partial and not request.is_complete)

    def closed_by(self, request: RequestView) -> str:
        """Return what reports say of `request`, for which the step has ended: the name of the rule, or of memory."""
        if self.is_closed_to_partial and not request.is_complete:
            return self._closed_to_partial_by
        if self.is_closed_to_new and not request.num_blocks:
            return MEMORY  # it was skipped before the step ended
        return self._closed_by if self.is_closed else MEMORY

    def grant(self, candidate: Candidate) -> None:
        """Grant `candidate` its `num_allowed` tokens, and close the step if the budget is used up."""
        self.num_missing = candidate.num_missing
        self.grants.append(Grant(candidate.request, candidate.num_allowed, candidate.num_blocks_claimed))
        self.num_tokens_left -= candidate.num_allowed
        self.num_seqs_left -= candidate.num_allowed > 0
        self.last_position = candidate.position
        if self.num_tokens_left <= 0 or self.num_seqs_left <= 0:
            self.close(BUDGET)

    def end(self) -> None:
        """Add requests behind a reserve to `waiting` if nothing runs whose end would free memory for them."""
        if not self.frees_memory:
            self.waiting += [held.request for held in self._held_by_reserve]
