"""Engines of lanes in virtual time: `routing/lean.py`, and what that lacks.

prefill lane, or an engine that does both     complete prompts first, the shortest of them; then partial ones
decode lane                                   a prompt's KV is there; the step after it samples its first token
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from streamrag.engine.costs.step_profiles import StepProfile
from studies.routing.lean import MOST_OPEN, LeanEngine, LeanStream
from studies.routing.loads import BLOCK

AGEING = 0.1
"""Of our scheduler's default policy, `srpf`."""


@dataclass(eq=False, slots=True)
class LaneStream(LeanStream):
    """A prompt that may grow, and its answer."""

    changed_s: float = 0.0
    """Time of the prompt's last change."""


class LaneEngine(LeanEngine):
    """One engine. `decodes`: whether it is a decode lane, to which prompts come with their KV."""

    stream_class = LaneStream
    _running: dict[LaneStream, None]  # type: ignore[assignment]
    _waiting: dict[LaneStream, None]  # type: ignore[assignment]

    def __init__(self, profile: StepProfile, budget: int, *, decodes: bool = False) -> None:
        super().__init__(profile, profile.kv_tokens, budget=budget)
        self.decodes = decodes
        self.link = asyncio.Lock()
        self._keys_of = _keys
        self._block_s = profile.step_s([(budget, 0)]) * BLOCK / budget

    def update(self, stream: LeanStream, token_ids: Sequence[int], is_complete: bool) -> None:
        assert isinstance(stream, LaneStream)  # all are
        stream.changed_s = asyncio.get_running_loop().time()
        super().update(stream, token_ids, is_complete)

    def num_found(self, token_ids: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a prompt are there."""
        return self._num_there(self._keys_of(token_ids))

    def _begin(self, now_s: float) -> None:
        if self.decodes:
            self._admit()
        super()._begin(now_s)

    def _admit(self) -> None:
        """Start the prompts that came with their KV, in order, while they fit."""
        for stream in list(self._waiting):
            if len(self._running) >= MOST_OPEN or not self._starts(stream):
                break
            stream.num_computed = stream.num_blocks
            self._computed.update(stream.keys)

    def _plan(self, budget: int) -> list[tuple[LaneStream, int]]:  # type: ignore[override]
        """Return the blocks of each prompt to compute in the next step, in the order of the policy `srpf`."""
        parts: list[tuple[LaneStream, int]] = []
        pending = [] if self.decodes else [s for s in self._running if s.num_left] + list(self._waiting)
        for stream in sorted(pending, key=self._place):
            if budget <= 0:
                break
            if not stream.is_running and (len(self._running) >= MOST_OPEN or not self._starts(stream)):
                break
            parts.append((stream, min(stream.num_left, budget)))
            budget -= parts[-1][1]
        return parts

    def _place(self, stream: LaneStream) -> tuple[bool, float]:
        """Return a key that orders prompts: complete ones by what is left of them, with ageing; others as they came."""
        if not stream.is_complete:
            return True, 0.0  # a stable sort leaves running ones, which are older, first
        return False, stream.num_left * self._block_s + AGEING * stream.changed_s


def _keys(token_ids: Sequence[int]) -> list[int]:
    """Return a key for each block and all before it, as `PrefixIndex.keys` does with blocks of one, but sooner."""
    return list(accumulate(token_ids, lambda key, block: hash((key, block)), initial=0))[1:]
