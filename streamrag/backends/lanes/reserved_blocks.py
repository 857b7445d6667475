"""Counts the KV blocks of a decode lane that are reserved for open queries.

vLLM reports the use of its blocks only after a step, and knows a query only once its prompt is computed elsewhere. So
we count. A query shares blocks with those that answered when it reserved its own: vLLM caches blocks that it loads only
once all of a query's have come, so queries that load the same beginning at the same time each have a copy.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

Block: TypeAlias = tuple[int, str]
"""The key of a full block, and the id of the query that reserved it first."""


class ReservedBlocks:
    """The reserved KV blocks of one lane, which has `num_blocks`.

    The prompt of a query is given as the keys of its full blocks. For the rest, each answer needs a block of its own.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_queries_with: Counter[Block] = Counter()
        self._blocks_of: dict[str, list[Block]] = {}  # by open query
        self._num_answers_of: dict[str, int] = {}  # by open query
        self._shareable: dict[int, Block] = {}  # by key, of queries that answer

    def has_room(self, keys: Sequence[int], num_answers: int) -> bool:
        """Whether a query's blocks fit beside the reserved ones. Without open queries, every prompt fits."""
        num_new = sum(key not in self._shareable for key in keys) + num_answers
        num_reserved = len(self._num_queries_with) + sum(self._num_answers_of.values())
        return not self._blocks_of or num_reserved + num_new <= self._num_blocks

    def reserve(self, query_id: str, keys: Sequence[int], num_answers: int) -> None:
        """Reserve the blocks of a query."""
        self._blocks_of[query_id] = [self._shareable.get(key, (key, query_id)) for key in keys]
        self._num_queries_with.update(self._blocks_of[query_id])
        self._num_answers_of[query_id] = num_answers

    def share(self, query_id: str) -> None:
        """Let later queries share the blocks of a query, which now answers. Do nothing if none are reserved for it."""
        for block in self._blocks_of.get(query_id, ()):
            self._shareable.setdefault(block[0], block)

    def release(self, query_id: str) -> None:
        """Release the blocks of a query. Do nothing if none are reserved for it."""
        self._num_answers_of.pop(query_id, None)
        for block in self._blocks_of.pop(query_id, ()):
            self._num_queries_with[block] -= 1
            if not self._num_queries_with[block]:
                del self._num_queries_with[block]
                if self._shareable.get(block[0]) == block:
                    del self._shareable[block[0]]
