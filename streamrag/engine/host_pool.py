"""Which KV blocks host memory holds, and for whom. Only the bookkeeping: slots are numbers.

             reserve                    saved                    find, slots
    (free) ─────────▶ being saved ─────────────▶ valid ─────────────────────▶ loaded
       ▲                   │ failed                │ its last owner is gone, or it is the least useful of a full pool
       └───────────────────┴───────────────────────┘

A spare is a block that the device has as well: written through, or loaded. It takes only room that is free, and is the
first to go when that is needed. Of spares the newest goes first: the device loses those that nobody has used for long.

Each block is stored once, by its key, which stands for its content and all before it. Owners are requests that want it
back; a block that nobody owns is of no use, because whoever may need it owns it.
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
    """A bounded pool of `num_slots` blocks."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blocks: dict[Hashable, _Block] = {}
        # Those that can be given up, the longest unused first.
        self._spare: OrderedDict[Hashable, None] = OrderedDict()
        self._sole: OrderedDict[Hashable, None] = OrderedDict()
        self._keys_of: dict[str, set[Hashable]] = {}
        self._free = list(reversed(range(num_slots)))
        self._saving: dict[int, Hashable] = {}  # of each slot under way; the block may be given up in the meantime
        self._pinned: dict[Hashable, None] = {}  # in order, so that the same calls always give up the same blocks

    @property
    def num_used(self) -> int:
        """Slots that are not free, also those that wait only for the end of their copy."""
        return self.num_slots - len(self._free)

    def owned(self, owner: str) -> Collection[Hashable]:
        return self._keys_of.get(owner, ())

    def claim(self, owner: str, key: Hashable, *, is_spare: bool = False) -> bool:
        """Whether the block is there, or on its way; if so `owner` wants it too, and the device has it or loses it."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self._own(owner, key, block)
        self._forget_use(key, block)
        block.is_spare = is_spare
        if block.is_valid and key not in self._pinned:
            self._note_use(key, block)
        return True

    def reserve(self, owner: str, key: Hashable, *, is_spare: bool = False) -> int | None:
        """A slot into which the block, which is not there, is to be copied; None if there is no room."""
        if not self._free and not is_spare:
            self._give_up_one()
        if not self._free:
            return None
        slot = self._free.pop()
        block = self._blocks[key] = _Block(slot, is_spare)
        self._saving[slot] = key
        self._own(owner, key, block)
        return slot

    def on_saved(self, slot: int, *, is_valid: bool) -> None:
        """The copy into `slot` has ended, well or not."""
        key = self._saving.pop(slot)
        block = self._blocks.get(key)
        if block is None or block.slot != slot:  # nobody wants it any more
            self._give_back(slot)
        elif is_valid:
            block.is_valid = True
            self._note_use(key, block)
        else:
            self._remove(key)

    def limit(self, num_slots: int) -> None:
        """Reduce the pool to its first `num_slots` slots; no block was saved in any of the others."""
        self.num_slots = min(self.num_slots, num_slots)
        self._free = [slot for slot in self._free if slot < self.num_slots]

    def num_valid(self, keys: Iterable[Hashable]) -> int:
        """Return how many of `keys`, from the first on, can be loaded."""
        num_valid = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.is_valid:
                break
            num_valid += 1
        return num_valid

    def pin(self, keys: Sequence[Hashable]) -> list[int]:
        """The slots of valid blocks, which are loaded, and stay where they are until `unpin`."""
        for key in keys:
            self._forget_use(key, self._blocks[key])
        self._pinned.update(dict.fromkeys(keys))
        return [self._blocks[key].slot for key in keys]

    def unpin(self) -> None:
        """The loads have been sent: what is copied into their slots from now on comes later."""
        pinned, self._pinned = self._pinned, {}
        for key in pinned:
            block = self._blocks.get(key)
            if block and block.is_valid:
                block.is_spare = True
                self._note_use(key, block)
                if not block.owners:
                    self._remove(key)

    def release(self, owner: str, *, but: Collection[Hashable] = ()) -> None:
        """`owner` has no use for its blocks any more, but for some."""
        keys = self._keys_of.get(owner)
        if keys is None:
            return
        for key in [key for key in keys if key not in but]:
            keys.discard(key)
            self._disown(owner, key)
        if not keys:
            del self._keys_of[owner]

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget the blocks of `keys`, which cannot be loaded."""
        for key in keys:
            if key in self._blocks:
                self._remove(key)

    def clear(self) -> None:
        """Forget the blocks of all requests. A slot that is being copied into becomes free when the copy has ended."""
        self.drop(list(self._blocks))

    def _own(self, owner: str, key: Hashable, block: _Block) -> None:
        block.owners.add(owner)
        self._keys_of.setdefault(owner, set()).add(key)

    def _disown(self, owner: str, key: Hashable) -> None:
        block = self._blocks[key]
        block.owners.discard(owner)
        if not block.owners and key not in self._pinned:
            self._remove(key)

    def _give_up_one(self) -> None:
        key = next(chain(reversed(self._spare), self._sole), None)
        if key is not None:
            self._remove(key)

    def _note_use(self, key: Hashable, block: _Block) -> None:
        (self._spare if block.is_spare else self._sole)[key] = None

    def _forget_use(self, key: Hashable, block: _Block) -> None:
        (self._spare if block.is_spare else self._sole).pop(key, None)

    def _remove(self, key: Hashable) -> None:
        block = self._blocks.pop(key)
        self._forget_use(key, block)
        for owner in block.owners:
            keys = self._keys_of[owner]
            keys.discard(key)
            if not keys:
                del self._keys_of[owner]
        if self._saving.get(block.slot) != key:
            self._give_back(block.slot)

    def _give_back(self, slot: int) -> None:
        if slot < self.num_slots:
            self._free.append(slot)
