"""How much of the KV memory complete prompts may claim, their answers included.

    begins ──claim: blocks for prompt and answer──▶ in the budget ──loses its KV, or ends──▶ claim released

Source: cell-budget admission of arXiv 2605.13784, section 3.7. Here a block that others hold already is not counted:
questions of one session share all but their own tokens.
"""

from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.engine import Budget


class Admission:
    """Keeps count of what is claimed. `num_blocks` is the budget; with None there is none, and nothing is counted."""

    def __init__(self, num_blocks: int | None) -> None:
        self._num_blocks = num_blocks
        self._num_claimed = 0
        self._num_claims = 0

    @property
    def budget(self) -> Budget | None:
        if self._num_blocks is None:
            return None
        return Budget(self._num_blocks - self._num_claimed, has_claims=self._num_claims > 0)

    def claim(self, request: StreamRequest, num_blocks: int) -> None:
        """`request`, which has no claim, begins."""
        request.num_blocks_claimed, request.view = num_blocks, None
        self._num_claimed += num_blocks
        self._num_claims += 1

    def release(self, request: StreamRequest) -> None:
        """It has lost its KV, or has ended."""
        if request.num_blocks_claimed is not None:
            self._num_claimed -= request.num_blocks_claimed
            self._num_claims -= 1
            request.num_blocks_claimed = request.view = None
