"""Counts the KV blocks that the open queries of a decode lane need for their prompts.

vLLM reports the use of its blocks only after a step, and knows a query only once its prompt is computed elsewhere. So
blocks are promised when a query gets its seat. Queries with equal beginnings share blocks, and need them once.
"""

from collections import Counter
from collections.abc import Sequence


class KvPromises:
    """The promised KV blocks of one lane, which has `num_blocks`."""

    def __init__(self, num_blocks: float) -> None:
        self._num_blocks = num_blocks
        self._num_queries_with: Counter[int] = Counter()  # by the key of a full block
        self._keys_of: dict[str, Sequence[int]] = {}  # by open query

    def has_room(self, keys: Sequence[int]) -> bool:
        """Whether a prompt of these full blocks fits beside those of the open queries, each with one block more for the
        prompt's end and the answer. Without open queries, every prompt fits."""
        num_new = sum(key not in self._num_queries_with for key in keys)
        num_promised = len(self._num_queries_with) + len(self._keys_of)
        return not self._keys_of or num_promised + num_new + 1 <= self._num_blocks

    def add(self, query_id: str, keys: Sequence[int]) -> None:
        """Promise the blocks of a query."""
        self._keys_of[query_id] = keys
        self._num_queries_with.update(keys)

    def remove(self, query_id: str) -> None:
        """Take back what was promised to a query; do nothing for an unknown one."""
        for key in self._keys_of.pop(query_id, ()):
            self._num_queries_with[key] -= 1
            if not self._num_queries_with[key]:
                del self._num_queries_with[key]
