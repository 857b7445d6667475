"""Rules about the length of steps and when they are planned; see `streamrag.engine.step_size` for the costs."""

import math
from collections.abc import Callable, Sequence

from streamrag.engine.request import RequestView
from streamrag.engine.rules.rule import Rule, TokenRule
from streamrag.engine.step_size import StepCosts
from streamrag.engine.walk import Candidate, Grant, Walk


class SizedSteps(TokenRule):
    """Ends a step where more tokens would delay other requests by more than they save.

    estimate_costs: returns the estimated costs of steps; None while they are unknown.
    """

    def __init__(self, estimate_costs: Callable[[], StepCosts | None]) -> None:
        self._estimate_costs = estimate_costs

    def start(self, walk: Walk) -> None:
        """Set the length to aim for: no limit while costs are unknown, or where no complete prompt waits."""
        costs = self._estimate_costs()
        self._num_waiting = 0.0 if costs is None else count_waiting(walk.prompts, costs)
        self._costs = costs if self._num_waiting else None
        self._num_added = 0  # awaited prompts
        self._length, self._best_length = 0.0, costs.best_length(self._num_waiting) if costs else math.inf

    def most_tokens(self, candidate: Candidate) -> float:
        """Return how many tokens the step should have of the request; if none, end it behind an awaited prompt."""
        costs, request = self._costs, candidate.request
        if costs is None or candidate.num_present >= request.num_tokens - 1:  # an answer's next token, or a lookup
            return math.inf
        length = self._awaited_length(candidate, costs) if _is_awaited(request) else self._best_length - self._length
        if length <= 0:
            if self._num_added:
                candidate.walk.close(type(self).__name__)
            return 0
        return length if length == math.inf else math.ceil(costs.num_fitting(length, candidate.num_present))

    def _awaited_length(self, candidate: Candidate, costs: StepCosts) -> float:
        """Return the length that makes the step one of the even parts of what it has and all of this prompt, or of this
        prompt if it is the first awaited one; 0 or less if others in the step would wait for too long."""
        num_present = candidate.num_present
        rest = costs.length(candidate.request.num_tokens - num_present, num_present)
        in_one_step = min(costs.even_part(rest, self._best_length), costs.length(candidate.num_tokens, num_present))
        if not costs.is_worth_adding(in_one_step, self._num_added, self._num_waiting - self._num_added):
            return 0
        length = self._length if self._num_added else 0.0
        return costs.even_part(length + rest, self._best_length) - length

    def on_grant(self, candidate: Candidate) -> None:
        """Add a grant to the step, unless the step has no limit or the grant is empty."""
        if self._costs is not None and candidate.num_allowed:
            self._length += self._costs.length(candidate.num_allowed, candidate.num_present)
            self._num_added += _is_awaited(candidate.request)

    def is_worth_putting_off(self, grants: Sequence[Grant]) -> bool:
        """Whether a step of `grants` is better planned when the step in flight has ended, by its length and by how many
        prompts wait; see `StepCosts`. False while costs are unknown, and where only answers are read."""
        costs = self._costs
        if costs is None:
            return False
        length = sum(costs.length(g.num_tokens, g.request.num_tokens - g.request.num_likely_tokens) for g in grants)
        return costs.is_worth_putting_off(length, self._num_waiting)


def _is_awaited(request: RequestView) -> bool:
    """Whether a reader waits for the first token of `request`."""
    return request.is_complete and not request.has_output and not request.is_draft


def count_waiting(prompts: Sequence[RequestView], costs: StepCosts) -> float:
    """Return how many complete `prompts` have tokens to compute, plus those that will arrive while these compute."""
    num, length, pair_cost = 0, 0.0, costs.pair_cost
    for request in prompts:
        if not request.is_complete:
            continue
        # `num_likely_tokens` and `StepCosts.length`, inlined: hundreds of requests wait on a busy engine.
        num_before, num_kept = request.num_computed_tokens, request.num_kept_tokens
        if num_kept > num_before:
            num_before = num_kept
        num_likely = request.num_tokens - num_before
        if num_likely:
            num += 1
            length += num_likely * (1 + pair_cost * (num_before + num_likely / 2))
    return num + costs.arrivals_per_token * length


class LateBinding(Rule):
    """Puts off a step of partial prompts, or a long step, while another step computes.

    A prompt that becomes complete meanwhile can then join the step instead of waiting for its end.

    has_prefills_in_flight: returns whether a step computes prompts now: then the next one need not be planned yet.
    sized_steps: decides which steps of complete prompts are put off; None to put off no such step.
    """

    asks_complete = asks_partial = False

    def __init__(self, has_prefills_in_flight: Callable[[], bool], sized_steps: SizedSteps | None = None) -> None:
        self._has_prefills_in_flight = has_prefills_in_flight
        self._sized_steps = sized_steps

    def puts_off_step(self, walk: Walk) -> bool:
        """Whether prompts are in flight, nothing runs ahead, and grants are partial or drafts, or better put off."""
        if walk.num_ahead or not self._has_prefills_in_flight():
            return False
        if not any(g.request.is_complete and not g.request.is_draft for g in walk.grants):
            return True
        return self._sized_steps is not None and self._sized_steps.is_worth_putting_off(walk.grants)
