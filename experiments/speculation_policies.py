"""Policies of speculation depth: how many tokens of each draft to verify in the next step.

    before a step    decoding requests, what each draft's last verifications gave, what a step costs  ->  a depth each

All are pure but for `SpecuStream`, whose paper gives it a memory.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from streamrag.engine.drafts import LEAST_DEPTH

CostModel: TypeAlias = Callable[[float, float], float]
"""Returns the cost of a step in any unit, by its rows and by the pairs of a row and a token that it attends to."""


class Verification(NamedTuple):
    """What one step found out about a draft."""

    num_proposed: int
    num_accepted: int
    has_left: bool
    """Whether the answer left the draft in that step."""


@dataclass(frozen=True, slots=True)
class DraftState:
    """What is known of one draft before a step."""

    num_before: int
    """Tokens of prompt and answer so far."""
    num_left: int
    """Tokens of the draft behind the place that the answer has reached."""
    history: Sequence[Verification] = ()
    """Newest last."""
    num_right: int = 0
    """How many of the next tokens are right: for `Oracle` alone."""


@dataclass(frozen=True, slots=True)
class StepState:
    """What is known before a step."""

    drafts: Sequence[DraftState]
    num_decoding: int
    """Requests that decode, with a draft or without."""
    num_pairs: float
    """Tokens that these attend to if each computes one row."""
    max_num_seqs: int
    max_depth: int
    cost: CostModel | None
    """None while it is unknown."""
    acceptance: float = 0.0
    """Share of the verified tokens that were accepted over the last half second, of all requests."""
    tokens_per_s: float = 0.0
    """Tokens of answers over the last half second."""


class DepthPolicy(Protocol):
    """How many tokens of each draft to verify."""

    def depths(self, step: StepState) -> list[int]:
        """Return the depth of each of `step.drafts`; 0 verifies nothing. What is left of a draft bounds it anyway."""


@dataclass(frozen=True)
class Fixed:
    """The same depth always."""

    depth: int

    def depths(self, step: StepState) -> list[int]:
        return [self.depth] * len(step.drafts)


@dataclass(frozen=True)
class Doubling:
    """As `AnswerDraft` does: the most at first, `LEAST_DEPTH` after the answer left the draft, then twice as many."""

    def depths(self, step: StepState) -> list[int]:
        return [self._depth(draft, step.max_depth) for draft in step.drafts]

    def _depth(self, draft: DraftState, most: int) -> int:
        depth = most
        for each in draft.history:
            if each.has_left:
                depth = min(LEAST_DEPTH, most)
            elif 0 < each.num_proposed == each.num_accepted:
                depth = min(2 * depth, most)
        return depth


@dataclass(frozen=True)
class BatchSizes:
    """vLLM's `num_speculative_tokens_per_batch_size`: a gap has the depth of the range before it.

    Source: `build_dynamic_sd_schedule_lookup`. The default is the example in vLLM's pull request 32374.
    """

    ranges: Sequence[tuple[int, int, int]] = ((1, 16, 3), (64, 128, 2), (256, 4_096, 0))

    def depths(self, step: StepState) -> list[int]:
        depth = [depth for start, _, depth in self.ranges if start <= step.num_decoding][-1]
        return [depth] * len(step.drafts)


@dataclass(frozen=True)
class ConcurrencyCap:
    """The cap of arXiv 2605.13784, section 3.7: by the number of decoders, and by what was accepted of this request.

    Its thresholds are unpublished; these are ours. 10 is what prompt lookup proposes by default.
    """

    caps: Sequence[tuple[int, int]] = ((4, 10), (16, 5), (64, 2))
    """(most decoders, cap); above the last, nothing is verified."""
    shares: Sequence[tuple[float, float]] = ((0.6, 1.0), (0.3, 0.5), (0.0, 0.25))
    """(least acceptance rate, share of the cap), rounded up: a request that is capped to 0 could never recover."""

    def depths(self, step: StepState) -> list[int]:
        cap = next((cap for most, cap in self.caps if step.num_decoding <= most), 0)
        return [-int(-cap * self._share(draft) // 1) for draft in step.drafts]

    def _share(self, draft: DraftState) -> float:
        num_proposed = sum(each.num_proposed for each in draft.history)
        rate = sum(each.num_accepted for each in draft.history) / num_proposed if num_proposed else 1.0
        return next(share for least, share in self.shares if rate >= least)


@dataclass
class SpecuStream:
    """StreamServe's algorithm 4, as published, for all requests of one engine.

    Adapted before each step; the paper adapts once a request. `b_micro`, the micro-batch, has no counterpart in vLLM.
    """

    base: float = 5.0
    gain: float = 5.0
    target: float = 400.0
    least: int = 2
    most: int = 20
    flow: list[float] = field(default_factory=lambda: [0.0] * 10)
    num_steps: int = 0

    def depths(self, step: StepState) -> list[int]:
        load = step.num_decoding / step.max_num_seqs
        return [int(self.adapt(step.acceptance, load, step.tokens_per_s))] * len(step.drafts)

    def adapt(self, acceptance: float, load: float, tokens_per_s: float) -> float:
        """Return the depth, before it is rounded down, and remember the gradient of the acceptance rate."""
        flow = self.flow
        flow[self.num_steps % len(flow)] = acceptance - sum(flow) / len(flow)
        self.num_steps += 1
        magnitude = sum(map(abs, flow)) / len(flow)
        scale = max(1.0, self.target / max(tokens_per_s, 1.0))
        depth = self.base + acceptance * magnitude * self.gain * (1 - min(load, 0.9)) * scale
        return min(max(depth, self.least), self.most)


@dataclass(frozen=True)
class ByPrice:
    """The rows that give the most tokens a second: each is worth the probability that it survives, and costs its part.

    As in vLLM's adaptive verification (its pull request 47808): rank (request, position) by survival, and admit for as
    long as tokens over cost rises. Survival at position k is a^k, with the acceptance rate a of this request.
    """

    prior: float = 0.97
    """The acceptance rate that is assumed of a draft, as if `weight` tokens had been verified: the best found for the
    recorded drafts."""
    weight: float = 4.0
    memory: float = 0.8
    """How much less each verification counts than the one after it."""

    def rate(self, history: Sequence[Verification]) -> float:
        """Return the estimated acceptance rate of one token whose predecessors were accepted."""
        num_right = num_tried = 0.0
        for each in history:
            if each.num_proposed:
                is_wrong = each.num_accepted < each.num_proposed
                num_right = self.memory * num_right + each.num_accepted
                num_tried = self.memory * num_tried + each.num_accepted + is_wrong
        return (self.prior * self.weight + num_right) / (self.weight + num_tried)

    def depths(self, step: StepState) -> list[int]:
        if step.cost is None:
            return Doubling().depths(step)
        rates = [self.rate(draft.history) for draft in step.drafts]
        depths = [0] * len(rates)
        # All costs are about equal, so that the likeliest row is the next to admit.
        best = [(-rate, i) for i, rate in enumerate(rates) if step.drafts[i].num_left]
        heapq.heapify(best)
        num_rows, num_pairs, num_tokens = step.num_decoding, step.num_pairs, float(step.num_decoding)
        cost = step.cost(num_rows, num_pairs)
        while best:
            survival, i = heapq.heappop(best)
            draft, depth = step.drafts[i], depths[i]
            pairs = num_pairs + draft.num_before + depth
            with_row = step.cost(num_rows + 1, pairs)
            if (num_tokens - survival) * cost <= num_tokens * with_row:
                break
            num_rows, num_pairs, num_tokens, cost = num_rows + 1, pairs, num_tokens - survival, with_row
            depths[i] = depth + 1
            if depths[i] < min(draft.num_left, step.max_depth):
                heapq.heappush(best, (survival * rates[i], i))
        return depths


@dataclass(frozen=True)
class CappedDoubling:
    """The smaller of doubling and the price."""

    def depths(self, step: StepState) -> list[int]:
        return list(map(min, Doubling().depths(step), ByPrice().depths(step)))


@dataclass(frozen=True)
class Oracle:
    """What is right, and no more. No policy can do that: it is a bound, where rows cost less than steps."""

    def depths(self, step: StepState) -> list[int]:
        return [draft.num_right for draft in step.drafts]


def policies() -> dict[str, Callable[[], DepthPolicy]]:
    """Return what makes each policy, by name."""
    return {
        "none": lambda: Fixed(0),
        "fixed 3": lambda: Fixed(3),
        "fixed 5": lambda: Fixed(5),
        "fixed 7": lambda: Fixed(7),
        "SpecuStream": SpecuStream,
        "concurrency cap": ConcurrencyCap,
        "by batch size": BatchSizes,
        "doubling": Doubling,
        "by price": ByPrice,
        "doubling, priced": CappedDoubling,
        "oracle": Oracle,
    }
