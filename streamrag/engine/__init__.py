"""Scheduling decisions as pure functions: which request runs, which waits, and which loses its KV memory.

    RequestView ──Policy.order──▶ order ──plan──▶ grants (tokens that each request computes), evictions (lost KV)
                                            ▲
                                        rules: one small class for each reason to wait, see `streamrag.engine.rules`

The vLLM scheduler and the simulator call the same functions. Nothing here imports vLLM.
"""

from streamrag.engine.planning import Eviction as Eviction
from streamrag.engine.planning import Hold as Hold
from streamrag.engine.planning import Plan as Plan
from streamrag.engine.planning import plan as plan
from streamrag.engine.policies import POLICIES as POLICIES
from streamrag.engine.policies import Policy as Policy
from streamrag.engine.policies import make_policy as make_policy
from streamrag.engine.recompute_or_swap import Fate as Fate
from streamrag.engine.request import Memory as Memory
from streamrag.engine.request import RequestView as RequestView
from streamrag.engine.step_size import Pace as Pace
from streamrag.engine.urgency_classes import ClassPolicy as ClassPolicy
from streamrag.engine.walk import Grant as Grant
from streamrag.engine.walk import StepBudget as StepBudget
