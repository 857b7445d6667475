"""Grouped prefill: requests whose next tokens are the same compute them once.

    leader     ├─ present ─┼─ computed in this step ─┼─ ...           the first in the order
    follower   ├─ present ─┤ waits, and finds the blocks in the prefix cache later

No state is kept between steps, so when a leader is aborted, preempted or short of memory, the next request in the order
leads. Source: arXiv 2605.13784, section 3.7, which compares eight tokens. Here whole KV blocks are compared, by the
hashes of the prefix cache, which cover a block and all before it.
"""

from collections.abc import Callable, Hashable
from typing import TypeAlias

from streamrag.engine.request import RequestView
from streamrag.engine.rules.rule import Rule
from streamrag.engine.walk import Candidate, Wait, Walk

NextBlock: TypeAlias = Callable[[RequestView, int], Hashable | None]
"""Given a request and a number of leading tokens, returns the hash of the whole block that the next token is in; None
if that block is not whole or cannot be shared."""


class GroupedPrefills(Rule):
    """Lets a request wait if another computes its next block in this step and waiting gains it more tokens.

    A request that holds a slot does not wait. A request without KV finds in this very step what its leader computes, so
    it waits only if they share still more blocks. A complete prompt does not wait for a partial one, whose share of a
    step is small.
    """

    def __init__(self, next_block: NextBlock) -> None:
        self._next_block = next_block

    def start(self, walk: Walk) -> None:
        self._leaders: dict[Hashable, tuple[RequestView, int]] = {}  # by next block: leader, end of what it computes

    def ask(self, candidate: Candidate) -> Wait | None:
        """Return `SKIP` if a leader computes the next block and `candidate` has KV or shares the block behind that."""
        request = candidate.request
        if request.is_running:
            return None
        block = self._next_block(request, candidate.num_present)
        if block is None or block not in self._leaders:
            return None
        leader, end = self._leaders[block]
        if request.is_complete and not leader.is_complete:
            return None
        next_of_leader = self._next_block(leader, end)
        gains = request.num_blocks > 0 or (
            next_of_leader is not None and next_of_leader == self._next_block(request, end)
        )
        return Wait.SKIP if gains else None

    def on_grant(self, candidate: Candidate) -> None:
        block = self._next_block(candidate.request, candidate.num_present)
        if block is not None:
            self._leaders.setdefault(block, (candidate.request, candidate.num_present + candidate.num_allowed))
