"""Which request runs next, which waits, and which gives up its memory: pure decisions, without any engine.

    RequestView ──Policy.order──▶ order ──plan──▶ grants (who computes how many tokens), evictions (who loses its KV)

The vLLM scheduler and any simulator call the same functions; nothing here imports vLLM.
"""

from streamrag.engine.eviction import Fate
from streamrag.engine.pace import Pace
from streamrag.engine.planning import Eviction, Grant, Limits, Memory, Plan, plan
from streamrag.engine.policies import POLICIES, Policy, make_policy
from streamrag.engine.request import RequestView

__all__ = [
    "POLICIES",
    "Eviction",
    "Fate",
    "Grant",
    "Limits",
    "Memory",
    "Pace",
    "Plan",
    "Policy",
    "RequestView",
    "make_policy",
    "plan",
]
