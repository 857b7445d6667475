"""Engines of lanes in virtual time, with speculative decoding: `routing/lean.py`, and what that lacks.

    prefill lane, or an engine that does both     complete prompts first, the shortest of them; then partial ones
    decode lane                                   a prompt's KV is there; the step after it samples its first token

A step verifies `depth` drafted tokens of each answer that has begun. Before its first token, which a decode lane
samples in a step of its own, there is nothing to draft from. Each drafted token is right with the probability
`acceptance` if all before it were; the first wrong one ends them, and one more token is sampled behind them.
Verifying costs what the profile says of a step with so many more tokens. Drafting costs `DRAFT_SHARE` of a step with
one token for each drafted position, as one layer of 32 with the output matrix reads: all requests are drafted for
together.

`tests/experiments/test_lanes_simulated.py` holds it to vLLM's schedulers.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from routing.lean import MOST_OPEN, LeanEngine, LeanStream
from routing.loads import BLOCK
from speculation_policies import SpecuStream

from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.routing import Report

DRAFT_SHARE = 0.05
METRICS_S = 0.5
"""Seconds over which acceptance and throughput are taken, as in StreamServe."""
AGEING = 0.1
"""Of our scheduler's default policy, `srpf`."""


class DepthRule(Protocol):
    """Chooses how many tokens to draft for a request in each step, once for each request, as StreamServe does."""

    def adapt(self, acceptance: float, load: float, tokens_per_s: float) -> float:
        """Return the depth, before it is rounded down."""


@dataclass(frozen=True)
class FixedDepth:
    """The same depth always."""

    depth: int

    def adapt(self, acceptance: float, load: float, tokens_per_s: float) -> float:
        return self.depth


DEPTH_RULES: dict[str, Callable[[], DepthRule]] = {
    "none": lambda: FixedDepth(0),
    **{f"fixed {depth}": lambda depth=depth: FixedDepth(depth) for depth in (3, 5, 7, 20)},  # type: ignore[misc]
    "SpecuStream": SpecuStream,
}


@dataclass
class Acceptance:
    """Counts what an engine's drafts gave, and what its answers got, over the last full period of `METRICS_S`."""

    share: float = 0.0
    """Share of the drafted tokens that were right."""
    tokens_per_s: float = 0.0
    _since_s: float = 0.0
    _num_drafted: int = 0
    _num_right: int = 0
    _num_tokens: int = 0

    def add(self, num_drafted: int, num_right: int, num_tokens: int) -> None:
        self._num_drafted += num_drafted
        self._num_right += num_right
        self._num_tokens += num_tokens

    def roll(self, now_s: float) -> None:
        """End the period if it is over. A period without drafts leaves the share as it was."""
        if now_s - self._since_s < METRICS_S:
            return
        if self._num_drafted:
            self.share = self._num_right / self._num_drafted
        self.tokens_per_s = self._num_tokens / (now_s - self._since_s)
        self._since_s, self._num_drafted, self._num_right, self._num_tokens = now_s, 0, 0, 0


@dataclass(eq=False, slots=True)
class LaneStream(LeanStream):
    """A prompt that may grow, and its answer, with drafts."""

    changed_s: float = 0.0
    """Time of the prompt's last change."""
    depth: int | None = None
    """Tokens to draft in each step; None before the first."""
    num_drafted: int = 0
    """Tokens that the step in progress verifies."""


@dataclass(frozen=True)
class LaneOptions:
    """What all engines of a simulation have in common.

    rule: a name of `DEPTH_RULES`.
    most_open: requests that a load of 1 stands for, in FlowGuard's queues and in SpecuStream's load.
    block_size: tokens of a block. With 1, prompts have their exact lengths, and a long load takes long.
    """

    profile: StepProfile
    budget: int
    rule: str = "none"
    acceptance: float = 0.0
    most_open: int = MOST_OPEN
    seed: int = 1
    block_size: int = BLOCK


@dataclass
class _Counts:
    """Totals of an engine."""

    num_drafted: int = 0
    num_right: int = 0


class LaneEngine(LeanEngine):
    """One engine. `decodes`: whether it is a decode lane, to which prompts come with their KV."""

    stream_class = LaneStream
    _running: dict[LaneStream, None]  # type: ignore[assignment]
    _waiting: dict[LaneStream, None]  # type: ignore[assignment]
    _step: tuple[float, float, int, list[tuple[LaneStream, int]]] | None  # type: ignore[assignment]

    def __init__(self, options: LaneOptions, name: str, *, decodes: bool = False) -> None:
        profile = options.profile
        super().__init__(profile, profile.kv_tokens, budget=options.budget, block_size=options.block_size)
        self.options, self.decodes = options, decodes
        self.link = asyncio.Lock()
        self._keys_of = _keys
        self.counts = _Counts()
        self._rule, self._metrics = DEPTH_RULES[options.rule](), Acceptance()
        self._rng = random.Random(f"{options.seed} {name}")
        self._draft_s = DRAFT_SHARE * profile.step_s([(1, 0)])
        self._block_s = profile.step_s([(options.budget, 0)]) * options.block_size / options.budget

    def update(self, stream: LeanStream, token_ids: Sequence[int], is_complete: bool) -> None:
        assert isinstance(stream, LaneStream)  # all are
        stream.changed_s = asyncio.get_running_loop().time()
        super().update(stream, token_ids, is_complete)

    def num_found(self, token_ids: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a prompt are there."""
        return self._num_there(self._keys_of(token_ids))

    def report(self) -> Report:
        return replace(super().report(), max_open=self.options.most_open)

    # --------------------------------------------------------------------------------------------------------- steps

    def _begin(self, now_s: float) -> None:
        if self.decodes:
            self._admit()
        decoding = [stream for stream in self._running if stream.is_decoding]
        self._draft(decoding)
        num_tokens = len(decoding) + sum(stream.num_drafted for stream in decoding)
        size = self._block_size
        prefilling = [] if self.decodes else self._plan(self._budget - math.ceil(num_tokens / size))
        parts = [(1 + stream.num_drafted, stream.num_blocks * size + stream.num_shown) for stream in decoding]
        parts += [(num * size, stream.num_computed * size) for stream, num in prefilling]
        if not parts:
            self._step = None
            return
        most_drafted = max((stream.num_drafted for stream in decoding), default=0)
        step_s = self._profile.step_s(parts) + most_drafted * self._draft_s
        # Only the first and the last token of an answer are reported, so several steps at once must not have a first.
        is_single = prefilling or most_drafted or any(not stream.num_shown for stream in decoding)
        num_steps = 1 if is_single else min(stream.num_output - stream.num_shown for stream in decoding)
        for stream, num in prefilling:
            stream.num_in_flight = num
            stream.num_spent += num
            self._computed.update(stream.keys[: stream.num_computed + num])
        self._step = now_s, step_s, num_steps, prefilling + [(stream, 0) for stream in decoding]
        self._end = asyncio.get_running_loop().call_at(now_s + num_steps * step_s, self._on_end)

    def _end_step(self, now_s: float) -> None:
        super()._end_step(now_s)
        self._metrics.roll(now_s)

    def _end_decode(self, stream: LeanStream, num_steps: int, now_s: float) -> None:
        assert isinstance(stream, LaneStream)  # all are
        num_drafted = stream.num_drafted
        num_right = accepted(num_drafted, self.options.acceptance, self._rng.random()) if num_drafted else 0
        num_new = num_steps + num_right
        self.counts.num_drafted += num_drafted
        self.counts.num_right += num_right
        self._metrics.add(num_drafted, num_right, num_new)
        stream.show(num_new)

    def _draft(self, decoding: Sequence[LaneStream]) -> None:
        """Set how many tokens the next step verifies of each answer: never more than it still needs, less one, and none
        before its first token. A decode lane drafts behind that token only once it has sampled it."""
        for stream in decoding:
            if stream.depth is None:
                load = len(self._running) / self.options.most_open
                stream.depth = int(self._rule.adapt(self._metrics.share, load, self._metrics.tokens_per_s))
            num_needed = stream.num_output - stream.num_shown - 1
            stream.num_drafted = min(stream.depth, num_needed) if stream.num_shown else 0

    def _plan(self, budget: int) -> list[tuple[LaneStream, int]]:  # type: ignore[override]
        """Return the blocks of each prompt to compute in the next step, in the order of the policy `srpf`."""
        parts = []
        pending = [stream for stream in self._running if stream.num_left] + list(self._waiting)
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

    def _admit(self) -> None:
        """Start the prompts that came with their KV, in order, while they fit."""
        for stream in list(self._waiting):
            if len(self._running) >= MOST_OPEN or not self._starts(stream):
                break
            stream.num_computed = stream.num_blocks
            self._computed.update(stream.keys)


def _keys(token_ids: Sequence[int]) -> list[int]:
    """Return a key for each block and all before it, as `PrefixIndex.keys` does with blocks of one, but sooner."""
    return list(accumulate(token_ids, lambda key, block: hash((key, block)), initial=0))[1:]


def accepted(num_drafted: int, acceptance: float, draw: float) -> int:
    """Return how many drafted tokens are right before the first wrong one, for a uniform draw from [0, 1)."""
    if acceptance >= 1:
        return num_drafted
    if acceptance <= 0 or draw <= 0:
        return 0 if acceptance <= 0 else num_drafted
    return min(int(math.log(draw) / math.log(acceptance)), num_drafted)
