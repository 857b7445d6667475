"""Bookkeeping of the KV blocks in host memory. Slots are numbers; the copies are made elsewhere.

             reserve                    saved                    num_valid, pin
    (free) ─────────▶ being saved ─────────────▶ valid ─────────────────────▶ loaded
       ▲                   │ failed                │ its last owner is gone, or it is evicted from a full pool
       └───────────────────┴───────────────────────┘

Each block is stored once, by a key that stands for its content and all blocks before it. Its owners are the requests
that may want it back; a block without owners is removed.

A spare is a block that the device holds too, because it was written through or loaded. Spares only take free slots, and
are evicted first, the newest before older ones: the device is about to lose the blocks that it has not used for long.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain


@dataclass(slots=True)
class _Block:
    slot: int
    is_spare: bool
    owners: set[str] = field(default_factory=set)
    is_valid: bool = False


class HostPool:
    """A bounded pool of `num_slots` blocks, evicted in LRU order."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blocks: dict[Hashable, _Block] = {}
        # Valid blocks that may be evicted, the least recently used first.
        self._spare: OrderedDict[Hashable, None] = OrderedDict()
        self._sole: OrderedDict[Hashable, None] = OrderedDict()
        self._keys_by_owner: dict[str, set[Hashable]] = {}
        self._free = list(reversed(range(num_slots)))
        self._saving: dict[int, Hashable] = {}  # by slot; the block may be removed before its copy ends
        self._pinned: dict[Hashable, None] = {}  # a dict for its order, so that evictions are deterministic

    @property
    def num_used(self) -> int:
        """Slots that are not free, including those that only wait for the end of their copy."""
        return self.num_slots - len(self._free)

    def keys_of(self, owner: str) -> Collection[Hashable]:
        """Return the keys of the blocks that `owner` may want back."""
        return self._keys_by_owner.get(owner, ())

    def claim(self, owner: str, key: Hashable, *, is_spare: bool = False) -> bool:
        """Add `owner` to the block, now the most recently used, if it is valid or being saved; return whether it is.

        is_spare: whether the device keeps the block.
        """
        block = self._blocks.get(key)
        if block is None:
            return False
        self._own(owner, key, block)
        self._remove_from_lru(key, block)
        block.is_spare = is_spare
        if block.is_valid and key not in self._pinned:
            self._add_to_lru(key, block)
        return True

    def reserve(self, owner: str, key: Hashable, *, is_spare: bool = False) -> int | None:
        """Return a slot for `owner`'s new block; if none is free, evict a block unless `is_spare`, or return None."""
        if not self._free and not is_spare:
            self._evict_one()
        if not self._free:
            return None
        slot = self._free.pop()
        block = self._blocks[key] = _Block(slot, is_spare)
        self._saving[slot] = key
        self._own(owner, key, block)
        return slot

    def on_saved(self, slot: int, *, is_valid: bool) -> None:
        """Make the block copied into `slot` valid, or remove it if the copy failed; free a slot whose block is gone."""
        key = self._saving.pop(slot)
        block = self._blocks.get(key)
        if block is None or block.slot != slot:  # removed meanwhile
            self._free_slot(slot)
        elif is_valid:
            block.is_valid = True
            self._add_to_lru(key, block)
        else:
            self._remove(key)

    def limit(self, num_slots: int) -> None:
        """Shrink the pool to its first `num_slots` slots. No block has been saved in any of the others."""
        self.num_slots = min(self.num_slots, num_slots)
        self._free = [slot for slot in self._free if slot < self.num_slots]

    def num_valid(self, keys: Iterable[Hashable]) -> int:
        """Return how many leading blocks of `keys` can be loaded."""
        num_valid = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.is_valid:
                break
            num_valid += 1
        return num_valid

    def pin(self, keys: Sequence[Hashable]) -> list[int]:
        """Return the slots of valid blocks that will be loaded, and keep them from eviction until `unpin`."""
        for key in keys:
            self._remove_from_lru(key, self._blocks[key])
        self._pinned.update(dict.fromkeys(keys))
        return [self._blocks[key].slot for key in keys]

    def unpin(self) -> None:
        """Make pinned blocks evictable spares, because their loads were sent, and remove those without an owner."""
        pinned, self._pinned = self._pinned, {}
        for key in pinned:
            block = self._blocks.get(key)
            if block and block.is_valid:
                block.is_spare = True
                self._add_to_lru(key, block)
                if not block.owners:
                    self._remove(key)

    def release(self, owner: str, *, but: Collection[Hashable] = ()) -> None:
        """Remove `owner` from its blocks, except those in `but`, and remove unpinned blocks without owners."""
        keys = self._keys_by_owner.get(owner)
        if keys is None:
            return
        for key in [key for key in keys if key not in but]:
            keys.discard(key)
            block = self._blocks[key]
            block.owners.discard(owner)
            if not block.owners and key not in self._pinned:
                self._remove(key)
        if not keys:
            del self._keys_by_owner[owner]

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Remove the blocks of `keys`, which turned out to be unusable."""
        for key in keys:
            if key in self._blocks:
                self._remove(key)

    def clear(self) -> None:
        """Remove all blocks; a slot that is being copied into becomes free when the copy has ended."""
        self.drop(list(self._blocks))

    def _own(self, owner: str, key: Hashable, block: _Block) -> None:
        block.owners.add(owner)
        self._keys_by_owner.setdefault(owner, set()).add(key)

    def _evict_one(self) -> None:
        key = next(chain(reversed(self._spare), self._sole), None)
        if key is not None:
            self._remove(key)

    def _add_to_lru(self, key: Hashable, block: _Block) -> None:
        (self._spare if block.is_spare else self._sole)[key] = None

    def _remove_from_lru(self, key: Hashable, block: _Block) -> None:
        (self._spare if block.is_spare else self._sole).pop(key, None)

    def _remove(self, key: Hashable) -> None:
        """Remove a block for all its owners, and free its slot unless a copy into the slot has yet to end."""
        block = self._blocks.pop(key)
        self._remove_from_lru(key, block)
        for owner in block.owners:
            keys = self._keys_by_owner[owner]
            keys.discard(key)
            if not keys:
                del self._keys_by_owner[owner]
        if self._saving.get(block.slot) != key:
            self._free_slot(block.slot)

    def _free_slot(self, slot: int) -> None:
        if slot < self.num_slots:
            self._free.append(slot)
