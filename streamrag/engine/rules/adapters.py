"""Bound the LoRA adapters of a step."""

from collections.abc import Callable, Set

from streamrag.engine.rules.rule import Rule
from streamrag.engine.walk import Candidate, Wait, Walk


class AdapterSlots(Rule):
    """Lets at most `max_adapters` LoRA adapters into one step: vLLM's engine ends if a step has more.

    adapters_ahead: returns the adapters of the requests that run before the plan.
    """

    def __init__(self, max_adapters: int, adapters_ahead: Callable[[], Set[int]]) -> None:
        self._max_adapters = max_adapters
        self._adapters_ahead = adapters_ahead
        self._adapters: set[int] = set()

    def start(self, walk: Walk) -> None:
        self._adapters = set(self._adapters_ahead())

    def ask(self, candidate: Candidate) -> Wait | None:
        adapter = candidate.request.adapter_id
        is_new = adapter is not None and adapter not in self._adapters
        return Wait.SKIP if is_new and len(self._adapters) >= self._max_adapters else None

    def on_grant(self, candidate: Candidate) -> None:
        if candidate.request.adapter_id is not None:
            self._adapters.add(candidate.request.adapter_id)
