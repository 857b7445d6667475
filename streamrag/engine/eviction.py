"""What can be asked to become of KV that is taken away, and what becomes of it: the names, for clients and engines."""

from typing import Literal, TypeAlias, get_args

Fate: TypeAlias = Literal["recompute", "swap"]
"""The fate of a victim's KV: forgotten, or copied to host memory."""
FATES: tuple[Fate, ...] = get_args(Fate)

EvictionMode: TypeAlias = Literal[Fate, "cost"]
"""Always the one, always the other, or each time what is expected to cost less."""
EVICTIONS: tuple[EvictionMode, ...] = get_args(EvictionMode)
