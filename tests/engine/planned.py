"""Plans with all rules, by their parameters: what the engine's options make of them, for tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrag.engine import Fate, Memory, Plan, RequestView, StepBudget
from streamrag.engine import plan as plan_with_rules
from streamrag.engine.rules import (
    AdapterSlots,
    ConnectorLookup,
    DataHighWater,
    DataShare,
    DraftMemory,
    DraftPrice,
    GroupedPrefills,
    KvBudget,
    KvBudgetLeft,
    LateBinding,
    LeanPartials,
    LowWater,
    NextBlock,
    PartialEviction,
    Rule,
    RuleList,
    ShortBeforeReplaced,
    ShortDrafts,
    SizedSteps,
    Turns,
    WholeUnits,
)
from streamrag.engine.step_size import StepCosts


@dataclass(frozen=True)
class Limits:
    """Parameters of a step's budget and of its rules; a rule without its parameter is left out."""

    num_tokens: int
    num_seqs: int
    can_partial_evict: bool = False
    can_growing_evict: bool = False
    num_ahead: int = 0
    num_partial_tokens: int | None = None
    step_costs: StepCosts | None = None
    is_early: bool = False
    num_blocks_kept_free: int = 0
    num_blocks_kept_from_data: int | None = None
    max_data_tokens: int | None = None
    budget: KvBudgetLeft | None = None
    turn: int = 0
    draft_survival: float | None = None
    """Share of drafted tokens that hold; None for an engine that verifies no drafts."""
    max_adapters: int | None = None
    adapters_ahead: frozenset[int] = frozenset()
    prefill_unit: int = 1
    has_connector: bool = False
    """Whether a KV connector is asked about partial prompts."""

    def rules(self, next_block: NextBlock | None = None) -> list[Rule]:
        """Return them in the engine's order."""
        sized = SizedSteps(lambda: self.step_costs) if self.step_costs else None
        budget, survival = self.budget, self.draft_survival
        rules = [
            None if survival is None else DraftPrice(lambda: self.step_costs, lambda: survival),
            None if survival is None else ShortDrafts(lambda: self.num_partial_tokens),
            None if self.max_adapters is None else AdapterSlots(self.max_adapters, lambda: self.adapters_ahead),
            LeanPartials(lambda: self.num_partial_tokens, self.num_blocks_kept_free),
            ShortBeforeReplaced(),
            DataShare(self.max_data_tokens) if self.max_data_tokens else None,
            PartialEviction(self.can_partial_evict, lambda: self.can_growing_evict),
            Turns(self.turn),
            LowWater(self.num_blocks_kept_free),
            KvBudget(lambda: budget) if budget else None,
            ConnectorLookup(lambda request: None) if self.has_connector else None,
            sized,
            None if self.prefill_unit == 1 else WholeUnits(self.prefill_unit),
            GroupedPrefills(next_block) if next_block else None,
            None if survival is None else DraftMemory(self.num_blocks_kept_free),
            None if self.num_blocks_kept_from_data is None else DataHighWater(self.num_blocks_kept_from_data),
            LateBinding(lambda: self.is_early, sized),
        ]
        return [rule for rule in rules if rule]


def plan(
    order: Sequence[RequestView],
    idle: Callable[[], Sequence[RequestView]],
    limits: Limits,
    memory: Memory,
    fate: Callable[[RequestView], Fate] = lambda victim: "recompute",
    next_block: NextBlock | None = None,
    reports_holds: bool = False,
) -> Plan:
    """Plan a step with the rules of `limits`."""
    budget = StepBudget(limits.num_tokens, limits.num_seqs, limits.num_ahead)
    return plan_with_rules(order, idle, budget, memory, RuleList(limits.rules(next_block)), fate, reports_holds)
