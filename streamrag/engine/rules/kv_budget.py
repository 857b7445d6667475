"""Complete prompts begin only if what they may come to need is there.

    begins ──claim: blocks for prompt and answer──▶ in the budget ──loses its KV, or ends──▶ claim released

Source: cell-budget admission of arXiv 2605.13784, section 3.7. Here a block that others hold already is not counted:
questions of one session share all but their own tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

from streamrag.engine.rules.rule import WaitRule
from streamrag.engine.walk import Candidate, Wait, Walk


class Budget(NamedTuple):
    """The KV memory that complete prompts may still claim, for their answers too."""

    num_blocks: int
    """Blocks that are not claimed; below zero if one request alone has claimed more than there are."""
    has_claims: bool
    """Whether any request has a claim. If none has, the next is served whatever it claims."""


class KvBudget(WaitRule):
    """Lets a complete prompt wait until there is KV memory for it and its answer.

    Nobody who needs less passes it.

    budget: returns what is left of it.
    """

    __slots__ = ("_budget", "_has_claims", "_is_over", "_num_blocks")

    asks_partial = False

    def __init__(self, budget: Callable[[], Budget]) -> None:
        self._budget = budget

    def start(self, walk: Walk) -> None:
        self._num_blocks, self._has_claims = self._budget()
        self._is_over = False

    def must_wait(self, candidate: Candidate) -> Wait | None:
        if candidate.request.has_claim:
            return None
        if not self._is_over:
            candidate.num_blocks_claimed = _num_blocks_to_come(candidate)
            self._is_over = self._has_claims and candidate.num_blocks_claimed > self._num_blocks
        return Wait.YIELD if self._is_over else None

    def on_grant(self, candidate: Candidate) -> None:
        if candidate.num_blocks_claimed is not None:
            self._num_blocks -= candidate.num_blocks_claimed
            self._has_claims = True


def _num_blocks_to_come(candidate: Candidate) -> int:
    """Return the blocks that it may come to need until its answer ends, but for those that others hold as well."""
    request, memory = candidate.request, candidate.walk.memory
    num_held = memory.num_blocks_freed(request) if request.num_blocks else 0
    num_tokens = request.num_tokens - candidate.num_present + request.num_answer_tokens
    return num_held + memory.num_blocks_needed(request, num_tokens)
