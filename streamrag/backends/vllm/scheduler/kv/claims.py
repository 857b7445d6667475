"""Claims of KV blocks by complete prompts, from which the rule `KvBudget` computes what is left of its budget."""

from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.engine.rules import KvBudgetLeft


class KvClaims:
    """Counts the KV blocks that requests claim of a budget: `share` of `num_blocks`; None for no budget."""

    def __init__(self, share: float | None, num_blocks: int) -> None:
        self._num_blocks = None if share is None else int(share * num_blocks)
        self._num_claimed = 0
        self._num_claims = 0

    @property
    def budget_left(self) -> KvBudgetLeft:
        """The blocks that further requests may claim. Only for an engine with a budget."""
        assert self._num_blocks is not None
        return KvBudgetLeft(self._num_blocks - self._num_claimed, has_claims=self._num_claims > 0)

    def claim(self, request: StreamRequest, num_blocks: int) -> None:
        """Add the claim of a request that begins and has no claim."""
        request.num_blocks_claimed, request.view = num_blocks, None
        self._num_claimed += num_blocks
        self._num_claims += 1

    def release(self, request: StreamRequest) -> None:
        """Remove the claim, if any, of a request that has lost its KV or has ended."""
        if request.num_blocks_claimed is not None:
            self._num_claimed -= request.num_blocks_claimed
            self._num_claims -= 1
            request.num_blocks_claimed = request.view = None
