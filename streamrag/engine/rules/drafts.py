"""Rules about drafts: answers to prompts that may still change, for which nobody waits. They come last in each step."""

import math
from collections.abc import Callable

from streamrag.engine.rules.rule import Rule, TokenRule
from streamrag.engine.rules.tokens import NO_LIMIT
from streamrag.engine.step_size import StepCosts
from streamrag.engine.walk import Candidate, Wait, Walk


class DraftPrice(TokenRule):
    """Limits the tokens of a draft to those that take no more time from others than one of its tokens saves its user.

    A token that holds saves the overhead of a step. Each token that a step computes delays all other requests in it,
    and those that wait for its end. Alone, a draft has no limit; beside others it waits while costs are unknown.

    estimate_costs: returns the estimated costs of steps; None while they are unknown.
    survival: returns the share of drafted tokens that hold.
    """

    asks_partial = False

    def __init__(self, estimate_costs: Callable[[], StepCosts | None], survival: Callable[[], float]) -> None:
        self._estimate_costs = estimate_costs
        self._survival = survival

    def start(self, walk: Walk) -> None:
        self._most_length: float | None = None  # computed at the first draft, behind all others

    def most_tokens(self, candidate: Candidate) -> float:
        """Return how many tokens of a draft are worth their cost, 0 if less than one; no limit for other requests."""
        if not candidate.request.is_draft:
            return NO_LIMIT
        if self._most_length is None:
            self._costs = self._estimate_costs()
            self._most_length = self._price(candidate.walk)
        most = self._most_length
        if self._costs is not None:
            most = self._costs.num_fitting(most, candidate.num_present)
        return most if most >= 1 else 0

    def _price(self, walk: Walk) -> float:
        """Return by how many tokens each draft may lengthen the step: a step's overhead, times the share of drafted
        tokens that hold, by the number of other requests; infinity if alone, 0 while costs are unknown."""
        if not walk.grants and not walk.num_ahead:
            return math.inf
        if self._costs is None:
            return 0
        num_others = walk.num_ahead + sum(r.num_remaining_tokens > 0 and not r.is_draft for r in walk.order)
        return self._survival() * self._costs.overhead / max(num_others, 1)  # 0 beside a partial draft only


class ShortDrafts(TokenRule):
    """Limits the tokens that a draft computes in a step, so that what arrives meanwhile does not wait long.

    num_tokens: returns the most tokens; None for no limit.
    """

    asks_partial = False

    def __init__(self, num_tokens: Callable[[], int | None]) -> None:
        self._num_tokens = num_tokens

    def most_tokens(self, candidate: Candidate) -> float:
        num_tokens = self._num_tokens()
        return NO_LIMIT if num_tokens is None or not candidate.request.is_draft else num_tokens


class DraftMemory(Rule):
    """Lets a draft wait (`YIELD`) that would leave fewer than `num_blocks` free while others compute."""

    asks_partial = False

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def ask_measured(self, candidate: Candidate) -> Wait | None:
        walk = candidate.walk
        if not candidate.request.is_draft or not (walk.grants or walk.num_ahead):
            return None
        return Wait.YIELD if candidate.num_missing > -self._num_blocks else None
