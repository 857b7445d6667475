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
from streamrag.engine.rules.rule import WaitRule
from streamrag.engine.walk import Candidate, Wait, Walk

NextBlock: TypeAlias = Callable[[RequestView, int], Hashable | None]
"""Names the whole block in which the token behind so many leading tokens of a request stands, and all before it; None
if that block is not whole, or the request cannot share it."""


class GroupedPrefills(WaitRule):
    """Lets a request wait if somebody computes what it lacks next, and it would have more of that by waiting.

    One that holds a slot goes on. One that holds nothing finds in this very step what its leader computes: it waits
    only if the leader has more to compute that they share. And no complete prompt waits for a partial one, of which
    steps have little.
    """

    __slots__ = ("_leaders", "_next_block")

    def __init__(self, next_block: NextBlock) -> None:
        self._next_block = next_block

    def start(self, walk: Walk) -> None:
        self._leaders: dict[Hashable, tuple[RequestView, int]] = {}  # with the end of what it computes

    def must_wait(self, candidate: Candidate) -> Wait | None:
        request = candidate.request
        if request.is_running:
            return None
        block = self._next_block(request, candidate.num_present)
        if block is None or block not in self._leaders:
            return None
        leader, end = self._leaders[block]
        if request.is_complete and not leader.is_complete:
            return None
        behind = self._next_block(leader, end)
        has_more = request.num_blocks > 0 or (behind is not None and behind == self._next_block(request, end))
        return Wait.SKIP if has_more else None

    def on_grant(self, candidate: Candidate) -> None:
        block = self._next_block(candidate.request, candidate.num_present)
        if block is not None:
            self._leaders.setdefault(block, (candidate.request, candidate.num_present + candidate.num_allowed))
