"""The rules of a step, in the order in which they are asked; each is a class in a module of its name.

    candidate ─▶ LeanPartials ─▶ ShortBeforeReplaced ─▶ ... ─▶ DataHighWater ─▶ memory ─▶ grant
                      └─────────────────┴───── the first that says "wait" holds it back

Who plans makes the rules once and lists them in this order: see `streamrag.backends.vllm.scheduler`. To add one, write
its module and a line in that list.
"""

from streamrag.engine.rules.data_high_water import DataHighWater as DataHighWater
from streamrag.engine.rules.data_share import DataShare as DataShare
from streamrag.engine.rules.grouped_prefills import GroupedPrefills as GroupedPrefills
from streamrag.engine.rules.grouped_prefills import NextBlock as NextBlock
from streamrag.engine.rules.kv_budget import Budget as Budget
from streamrag.engine.rules.kv_budget import KvBudget as KvBudget
from streamrag.engine.rules.late_binding import LateBinding as LateBinding
from streamrag.engine.rules.lean_partials import LeanPartials as LeanPartials
from streamrag.engine.rules.low_water import LowWater as LowWater
from streamrag.engine.rules.partial_eviction import PartialEviction as PartialEviction
from streamrag.engine.rules.rule import Rule as Rule
from streamrag.engine.rules.short_before_replaced import ShortBeforeReplaced as ShortBeforeReplaced
from streamrag.engine.rules.sized_steps import SizedSteps as SizedSteps
from streamrag.engine.rules.turns import Turns as Turns
