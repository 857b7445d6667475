"""The rules of a step: one class for each reason to grant a request less, to let it wait, or to put off the step.

    candidate ─▶ rules that need only its tokens ─▶ measure ─▶ rules that look at memory ─▶ memory ─▶ grant
                 └── ask: the first `Wait` holds it back ┘     └── ask_measured: likewise ┘

`ask`: DraftPrice, ShortDrafts, AdapterSlots, LeanPartials, ShortBeforeReplaced, DataShare, PartialEviction, Turns,
LowWater, KvBudget, ConnectorLookup, SizedSteps, WholeUnits, GroupedPrefills. `ask_measured`: DraftMemory,
DataHighWater. LateBinding may put off the whole step.

`streamrag.backends.vllm.scheduler.step` makes the rules once and lists them in this order. To add a rule, write its
class and add a line to that list.
"""

from streamrag.engine.rules.drafts import DraftMemory as DraftMemory
from streamrag.engine.rules.drafts import DraftPrice as DraftPrice
from streamrag.engine.rules.drafts import ShortDrafts as ShortDrafts
from streamrag.engine.rules.grouped_prefills import GroupedPrefills as GroupedPrefills
from streamrag.engine.rules.grouped_prefills import NextBlock as NextBlock
from streamrag.engine.rules.memory_rules import AdapterSlots as AdapterSlots
from streamrag.engine.rules.memory_rules import ConnectorLookup as ConnectorLookup
from streamrag.engine.rules.memory_rules import DataHighWater as DataHighWater
from streamrag.engine.rules.memory_rules import KvBudget as KvBudget
from streamrag.engine.rules.memory_rules import KvBudgetLeft as KvBudgetLeft
from streamrag.engine.rules.memory_rules import LowWater as LowWater
from streamrag.engine.rules.memory_rules import PartialEviction as PartialEviction
from streamrag.engine.rules.memory_rules import Turns as Turns
from streamrag.engine.rules.rule import Rule as Rule
from streamrag.engine.rules.rule import RuleList as RuleList
from streamrag.engine.rules.sized_steps import LateBinding as LateBinding
from streamrag.engine.rules.sized_steps import SizedSteps as SizedSteps
from streamrag.engine.rules.tokens import DataShare as DataShare
from streamrag.engine.rules.tokens import LeanPartials as LeanPartials
from streamrag.engine.rules.tokens import ShortBeforeReplaced as ShortBeforeReplaced
from streamrag.engine.rules.tokens import WholeUnits as WholeUnits
