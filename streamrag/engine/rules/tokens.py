"""Rules that limit the tokens of partial prompts, so that complete prompts do not wait for long steps."""

from collections.abc import Callable

from streamrag.engine.rules.rule import Rule, TokenRule
from streamrag.engine.walk import BUDGET, Candidate, Wait, Walk

NO_LIMIT = 1 << 62

BACKLOG_SHARE = 1 / 32
"""Share of the backlog up to which partial prompts fill any step: a complete prompt with that much before it is hardly
delayed by so much more, and longer steps have less overhead. Source: our simulations of arXiv 2604.16395's crawls."""

LEAST_DATA_TOKENS = 128
"""Least tokens of a session's data in a step, however many other prompts there are: shorter steps are hardly quicker.
Source: arXiv 2605.13784, section 3.7."""


class LeanPartials(TokenRule):
    """Limits the tokens of partial prompts in a step.

    Beside a complete prompt they get none, except up to `BACKLOG_SHARE` of the backlog.

    num_tokens: returns the most tokens of partial prompts in a step; None for no limit.
    num_blocks_short: with at most so many free blocks, requests that wait for memory do not count as backlog.
    """

    asks_complete = False

    def __init__(self, num_tokens: Callable[[], int | None], num_blocks_short: int = 0) -> None:
        self._num_tokens = num_tokens
        self._num_blocks_short = num_blocks_short

    def start(self, walk: Walk) -> None:
        num_tokens = self._num_tokens()
        self._num_left = NO_LIMIT if num_tokens is None else num_tokens
        self._num_filling = NO_LIMIT if num_tokens is None else -1  # computed at the first partial prompt

    def most_tokens(self, candidate: Candidate) -> float:
        """Return the tokens left of the limit, or of the backlog's share if more; at 0, close the step to partials."""
        walk = candidate.walk
        if self._num_filling < 0:
            self._num_filling = num_filling_tokens(walk, self._num_blocks_short)
        most = max(self._num_left, self._num_filling - (walk.num_tokens - walk.num_tokens_left))
        if most <= 0:
            walk.close_to_partial(type(self).__name__)
        return most

    def on_grant(self, candidate: Candidate) -> None:
        """Take a partial prompt's tokens off the limit; a complete prompt without output lowers the limit to 0."""
        if not candidate.request.is_complete:
            self._num_left -= candidate.num_allowed
        elif not candidate.request.has_output:
            self._num_left = 0


def num_filling_tokens(walk: Walk, num_blocks_short: int) -> int:
    """Return the size of a step up to which partial prompts may compute in any case: a share of the backlog.

    The backlog is what must be computed sooner or later. Speculative prompts may be replaced first, and requests that
    wait for memory may be complete first, so neither counts. Drafts do not count either.
    """
    is_memory_short = walk.memory.num_free_blocks <= num_blocks_short
    num_tokens = 0
    for request in (*walk.with_output, *walk.prompts):
        if request.is_complete or not (request.is_speculative or (is_memory_short and not request.num_blocks)):
            num_before, num_kept = request.num_computed_tokens, request.num_kept_tokens
            num_tokens += request.num_tokens - (num_before if num_before > num_kept else num_kept)
    return int(num_tokens * BACKLOG_SHARE)


class ShortBeforeReplaced(TokenRule):
    """Limits a partial prompt to its `num_step_tokens`, so that its replacement wastes little computation."""

    asks_complete = False

    def most_tokens(self, candidate: Candidate) -> float:
        num_tokens = candidate.request.num_step_tokens
        return NO_LIMIT if num_tokens is None else num_tokens


class DataShare(TokenRule):
    """Limits the data of one session to an equal share of the step among all prompts that have tokens to compute.

    num_tokens: the most that a share may be. The least is `LEAST_DATA_TOKENS`.
    """

    asks_complete = False

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def start(self, walk: Walk) -> None:
        num_prompts = sum(r.num_remaining_tokens > 0 and not r.has_output for r in walk.order)
        share = (walk.num_tokens + walk.num_ahead) // max(num_prompts, 1)
        self._num_share = min(max(share, LEAST_DATA_TOKENS), self._num_tokens)

    def most_tokens(self, candidate: Candidate) -> float:
        return self._num_share if candidate.request.request_class == "stream" else NO_LIMIT


class WholeUnits(Rule):
    """Rounds the tokens of a request down to a multiple of `num_tokens`, but not to 0, unless its prompt ends there.

    vLLM keeps states of Mamba layers at the ends of blocks only, and computes nothing that ends before the first.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def ask(self, candidate: Candidate) -> Wait | None:
        """Round `num_allowed`; if the first unit needs more tokens than are left, close the step and return `SKIP`."""
        num_left = candidate.request.num_tokens - candidate.num_present
        if candidate.num_allowed < num_left:
            whole = max(candidate.num_allowed // self._num_tokens, 1) * self._num_tokens
            candidate.num_allowed = min(whole, num_left)
        if candidate.num_allowed <= candidate.walk.num_tokens_left:
            return None
        candidate.walk.close(BUDGET)  # or shorter prompts would overtake it as long as others decode
        return Wait.SKIP
