"""Separate engines for prompts and for answers.

pipeline ──▶ backend ──▶ prefill lane  our scheduler: the prompt grows, is replaced, is evicted
                │             │ KV, over NIXL
                └──────▶ decode lane   vLLM's scheduler: the answer
                │
            lane_choice ──▶ streamrag.routing
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrag.backends.lanes.backend import LanesBackend as LanesBackend


def __getattr__(name: str) -> Any:
    """Import the backend on first use, as that of vLLM."""
    if name != "LanesBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamrag.backends.lanes.backend import LanesBackend

    return LanesBackend
