"""The proposer of an engine whose drafts come from its clients."""

from collections.abc import Sequence
from typing import Any


class NoProposer:
    """Proposes no tokens after a step: our scheduler proposes those of drafts before the next. vLLM constructs it."""

    def __init__(self, config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return no tokens for each request of the step."""
        return [[] for _ in sampled_token_ids]
