"""Requests whose next tokens are the same compute them once: grouped prefill.

    leader     ├─ there ─┼─ computed in this step ─┼─ ...           the first of the order
    follower   ├─ there ─┤ waits, and finds them in the prefix cache when they are there

Nothing is remembered from step to step: who leads is who computes them in this one, so that a leader that is aborted,
preempted or short of memory is followed by the next in the order. Source: arXiv 2605.13784, section 3.7, which compares
eight tokens; here it is whole KV blocks, by the hashes of the prefix cache: of a block and of all before it.
"""

from collections.abc import Callable, Hashable
from typing import TypeAlias

from streamrag.engine.request import RequestView

NextBlock: TypeAlias = Callable[[RequestView, int], Hashable | None]
"""Names the whole block in which the token behind so many leading tokens of a request stands, and all before it; None
if that block is not whole, or the request cannot share it."""


class Groups:
    """Those of one plan. Without `next_block` there are none."""

    def __init__(self, next_block: NextBlock | None) -> None:
        self._next_block = next_block
        self._leaders: dict[Hashable, tuple[RequestView, int]] = {}  # with the end of what it computes

    def must_wait(self, request: RequestView, num_present: int) -> bool:
        """Whether somebody computes what `request` lacks next, and it would have more of that by waiting.

        One that holds a slot goes on. One that holds nothing finds in this very step what its
        leader computes: it waits only if the leader has more to compute that they share. And no complete prompt waits
        for a partial one, of which steps have little.
        """
        if self._next_block is None or request.is_running:
            return False
        block = self._next_block(request, num_present)
        if block is None or block not in self._leaders:
            return False
        leader, end = self._leaders[block]
        if request.is_complete and not leader.is_complete:
            return False
        behind = self._next_block(leader, end)
        return request.num_blocks > 0 or (behind is not None and behind == self._next_block(request, end))

    def add(self, request: RequestView, num_present: int, num_tokens: int) -> None:
        """It computes so many tokens in this step."""
        if self._next_block is not None:
            block = self._next_block(request, num_present)
            if block is not None:
                self._leaders.setdefault(block, (request, num_present + num_tokens))
