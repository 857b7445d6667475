"""Names for the fate of evicted KV, for clients and engines."""

from typing import Literal, TypeAlias, get_args

Fate: TypeAlias = Literal["recompute", "swap"]
"""Whether a victim's KV is dropped, or copied to host memory."""
FATES: tuple[Fate, ...] = get_args(Fate)

EvictionMode: TypeAlias = Literal[Fate, "cost"]
"""A fixed fate, or "cost" to choose the cheaper one for each victim."""
EVICTIONS: tuple[EvictionMode, ...] = get_args(EvictionMode)
