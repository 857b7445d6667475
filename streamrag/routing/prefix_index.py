"""The leading blocks of prompts that lie on each replica, as the router believes. Bounded.

keys        k0 ── k1 ── k2 ── k3          a key stands for a block and all before it
holders   {a,b} {a,b}  {a}   {}          each set contains the next, so that one walk finds for all replicas
                                         how much lies there: a two more than none, b one less
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 64
MAX_BLOCKS = 1_000_000
"""Most blocks of all replicas together: about 300 MB."""
UNKNOWN_KV_TOKENS = 131_072
"""Tokens that a replica is assumed to hold until it reports."""


class PrefixIndex:
    """An index of the prefixes that each replica holds.

    A replica forgets the least recently used blocks first, the ends of prompts before their beginnings.

    block_size: tokens of a block; what is shared is known in whole blocks.
    max_blocks: of all replicas together, of which each has an equal share at least.
    """

    def __init__(self, block_size: int = BLOCK_SIZE, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._holders: dict[int, dict[str, None]] = {}
        self._blocks_of: dict[str, OrderedDict[int, None]] = {}  # least recently used first
        self._most_blocks_of: dict[str, int] = {}

    def keys(self, token_ids: Sequence[int]) -> list[int]:
        """Return a key for each whole block. `token_ids` is a tuple or a list; both give the same."""
        size, key, found = self.block_size, 0, []
        for start in range(0, len(token_ids) - size + 1, size):
            key = hash((key, *token_ids[start : start + size]))
            found.append(key)
        return found

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """Return how many leading tokens of a prompt with these `keys` lie on each replica that has any."""
        found: dict[str, int] = {}
        before: dict[str, None] = {}
        num_tokens = 0
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            if len(holders) < len(before):
                found.update((replica_id, num_tokens) for replica_id in before if replica_id not in holders)
            before = holders
            num_tokens += self.block_size
        found.update((replica_id, num_tokens) for replica_id in before)
        return found

    def num_tokens(self, replica_id: str) -> int:
        """Return how many tokens lie there."""
        return len(self._blocks_of.get(replica_id, ())) * self.block_size

    def resize(self, replica_id: str, num_kv_tokens: int) -> None:
        """Set how many tokens the replica holds at most, 0 if unknown. Takes effect at the next `hold`."""
        self._most_blocks_of[replica_id] = (num_kv_tokens or UNKNOWN_KV_TOKENS) // self.block_size

    def hold(self, keys: Sequence[int], replica_id: str) -> None:
        """Note that a prompt with these `keys` lies on that replica, used just now."""
        blocks = self._blocks_of.setdefault(replica_id, OrderedDict())
        most = self._most_blocks_of.get(replica_id, UNKNOWN_KV_TOKENS // self.block_size)
        most = min(most, self._max_blocks // len(self._blocks_of))
        for key in reversed(keys[:most]):  # the first block last: it is used as recently as any behind it
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
                self._holders.setdefault(key, {})[replica_id] = None
                self._num_blocks += 1
        while len(blocks) > most:
            self._drop_oldest(replica_id)
        while self._num_blocks > self._max_blocks:  # replicas have come since the others took their shares
            self._drop_oldest(max(self._blocks_of, key=lambda other: len(self._blocks_of[other])))

    def forget(self, replica_id: str) -> None:
        """Drop all that lies there."""
        for key in self._blocks_of.pop(replica_id, ()):
            self._let_go(key, replica_id)
        self._most_blocks_of.pop(replica_id, None)

    def _drop_oldest(self, replica_id: str) -> None:
        key, _ = self._blocks_of[replica_id].popitem(last=False)
        self._let_go(key, replica_id)

    def _let_go(self, key: int, replica_id: str) -> None:
        holders = self._holders[key]
        del holders[replica_id]
        self._num_blocks -= 1
        if not holders:
            del self._holders[key]
