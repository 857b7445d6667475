"""Separate engines for prompts and for answers.

pipeline ──▶ backend ──▶ prefill lane  our scheduler: the prompt grows, is replaced, is evicted
                │             │ KV, over NIXL
                └──────▶ decode lane   vLLM's scheduler: the answer
                │
            lane_choice ──▶ streamrag.routing
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import attributes

if TYPE_CHECKING:
    from streamrag.backends.lanes.backend import DisaggregatedBackend as DisaggregatedBackend
else:  # imported on first use, as that of vLLM
    __getattr__ = attributes(__name__, {"DisaggregatedBackend": "streamrag.backends.lanes.backend"})
