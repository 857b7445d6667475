"""Counts the KV blocks that the open queries of a decode lane need for their prompts.

vLLM reports the use of its blocks only after a step, and knows a query only once its prompt is computed elsewhere. So
blocks are promised when a query gets its seat. A query shares blocks with those that had begun to answer by then: vLLM
caches blocks that it loads only once all of them have come, so queries that load the same beginning each have a copy.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

Block: TypeAlias = tuple[int, str]
"""The key of a full block, and the query for which it was promised first."""


class KvPromises:
    """The promised KV blocks of one lane, which has `num_blocks`."""

    def __init__(self, num_blocks: float) -> None:
        self._num_blocks = num_blocks
        self._num_queries_with: Counter[Block] = Counter()
        self._blocks_of: dict[str, list[Block]] = {}  # by open query
        self._num_tails_of: dict[str, int] = {}  # by open query
        self._cached: dict[int, Block] = {}  # by key, of queries that have begun to answer

    def has_room(self, keys: Sequence[int], num_answers: int) -> bool:
        """Whether a prompt of these full blocks fits beside those of the open queries. Every query needs one more block
        than its full prompt blocks, for each of its answers. Without open queries, every prompt fits."""
        num_new = sum(key not in self._cached for key in keys) + num_answers
        num_promised = len(self._num_queries_with) + sum(self._num_tails_of.values())
        return not self._blocks_of or num_promised + num_new <= self._num_blocks

    def add(self, query_id: str, keys: Sequence[int], num_answers: int) -> None:
        """Promise the blocks of a query."""
        self._blocks_of[query_id] = [self._cached.get(key, (key, query_id)) for key in keys]
        self._num_queries_with.update(self._blocks_of[query_id])
        self._num_tails_of[query_id] = num_answers

    def begin(self, query_id: str) -> None:
        """Let further queries share the blocks of a query, which has begun to answer; do nothing for an unknown one."""
        for block in self._blocks_of.get(query_id, ()):
            self._cached.setdefault(block[0], block)

    def remove(self, query_id: str) -> None:
        """Take back what was promised to a query; do nothing for an unknown one."""
        self._num_tails_of.pop(query_id, None)
        for block in self._blocks_of.pop(query_id, ()):
            self._num_queries_with[block] -= 1
            if not self._num_queries_with[block]:
                del self._num_queries_with[block]
                if self._cached.get(block[0]) == block:
                    del self._cached[block[0]]
