"""A bounded index of the prompt prefixes that each replica is believed to hold.

keys        k0 ── k1 ── k2 ── k3          a key stands for a block and all before it
holders   {a,b} {a,b}  {a}   {}          each set contains the next, so one walk finds the match of every replica:
                                         three blocks on a, two on b
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 64
MAX_BLOCKS = 1_000_000  # most blocks of all replicas together: about 300 MB
UNKNOWN_KV_TOKENS = 131_072  # capacity that is assumed for a replica until its first report


class PrefixIndex:
    """An LRU index of the prefixes that each replica holds.

    Of a prompt, later blocks are evicted before earlier ones.

    block_size: tokens per block; matches are whole blocks.
    max_blocks: most blocks of all replicas together; each replica has at least an equal share.
    """

    def __init__(self, block_size: int = BLOCK_SIZE, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._holders: dict[int, dict[str, None]] = {}
        self._blocks_of: dict[str, OrderedDict[int, None]] = {}  # least recently used first
        self._most_blocks_of: dict[str, int] = {}

    def keys(self, token_ids: Sequence[int]) -> list[int]:
        """Return a key for each full block, which stands for the tokens up to its end, given as a tuple or a list."""
        size, key, keys = self.block_size, 0, []
        for start in range(0, len(token_ids) - size + 1, size):
            key = hash((key, *token_ids[start : start + size]))
            keys.append(key)
        return keys

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """Return the length of the match in tokens, for each replica that holds a prefix of the prompt with `keys`."""
        lengths: dict[str, int] = {}
        before: dict[str, None] = {}
        num_tokens = 0
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            if len(holders) < len(before):
                lengths.update((replica_id, num_tokens) for replica_id in before if replica_id not in holders)
            before = holders
            num_tokens += self.block_size
        lengths.update((replica_id, num_tokens) for replica_id in before)
        return lengths

    def num_tokens(self, replica_id: str) -> int:
        return len(self._blocks_of.get(replica_id, ())) * self.block_size

    def resize(self, replica_id: str, num_kv_tokens: int) -> None:
        """Set the replica's capacity in tokens, 0 if unknown. Takes effect at the next `hold`."""
        self._most_blocks_of[replica_id] = (num_kv_tokens or UNKNOWN_KV_TOKENS) // self.block_size

    def hold(self, keys: Sequence[int], replica_id: str) -> None:
        """Record that the replica holds the first of these `keys`, up to its capacity and its share of `max_blocks`;
        evict its least recently used keys beyond that. Then, while all together hold more than `max_blocks`, evict the
        least recently used key of the replica that holds most."""
        blocks = self._blocks_of.setdefault(replica_id, OrderedDict())
        most = self._most_blocks_of.get(replica_id, UNKNOWN_KV_TOKENS // self.block_size)
        most = min(most, self._max_blocks // len(self._blocks_of))
        for key in reversed(keys[:most]):  # the first block last, so that it is the most recently used
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
                self._holders.setdefault(key, {})[replica_id] = None
                self._num_blocks += 1
        while len(blocks) > most:
            self._drop_oldest(replica_id)
        while self._num_blocks > self._max_blocks:  # new replicas have reduced the shares of the others
            self._drop_oldest(max(self._blocks_of, key=lambda other: len(self._blocks_of[other])))

    def forget(self, replica_id: str) -> None:
        """Remove all that a replica holds, and its capacity. Does nothing for an unknown one."""
        for key in self._blocks_of.pop(replica_id, ()):
            self._remove_holder(key, replica_id)
        self._most_blocks_of.pop(replica_id, None)

    def _drop_oldest(self, replica_id: str) -> None:
        key, _ = self._blocks_of[replica_id].popitem(last=False)
        self._remove_holder(key, replica_id)

    def _remove_holder(self, key: int, replica_id: str) -> None:
        """Remove a replica from the holders of a block, and the block itself if it was the last one."""
        holders = self._holders[key]
        del holders[replica_id]
        self._num_blocks -= 1
        if not holders:
            del self._holders[key]
