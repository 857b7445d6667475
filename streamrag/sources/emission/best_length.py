"""Choose how many passages of an update to send now, by the expected time that this saves, loses and wastes.

A context with passages 1..n replaces the sent one, and keeps its first tokens. Times are relative to now: the next
stage comes at d, and retrieval ends at D. The work of prefilling the context is laid out in time:

    | kept, not yet computed | passage i | passage i + 1 | ...   |
    0                                 d                 b       W              D
                                      next stage        end of the engine step that runs then

p_i is the probability that the first i passages are final, and |i [x, y]| are the seconds of work on passage i from x
to y. With m concurrent requests of others, the engine does a share of 1 / (1 + m) of this work before the prompt is
complete, and gives it priority afterwards; d, D and b are in seconds of this work. Sending the first j passages now
instead of at the next stage

    saves    min( sum p_i |i [0, d]|,  (W - (D - d))+ )         a head start, if there is no time for it later
    loses    ( sum (1 - p_i) |i [d, b]|  -  ((D - d) - W)+ )+   the next context waits for a useless step to end
    wastes   price * sum (1 - p_i) |i [0, b]|                   time of the engine

where (x)+ is max(x, 0), and a second of the engine is worth `price` seconds of waiting. These are expected values over
example times (d, D): those of queries whose result was final at this stage, with probability p_n and all p_i = 1, and
those of the others, where each p_i is (p_i - p_n) / (1 - p_n). The best length is sent if it beats sending nothing. If
nothing is sent, the engine continues with the sent context, which loses and wastes by the same formulas if the new
context does not keep it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from streamrag.engine.costs.step_profiles import StepProfile, recompute_s

TIE_S = 1e-9
MIN_GAIN_S = 0.002  # least gain for which an update is sent, because tokenising and planning it takes time too
MAX_STEPS = 32
"""Most steps that are considered, to bound the time on the event loop; longer work is split into larger steps."""
MAX_LENGTHS = 48  # most lengths that are considered, including the whole context, to bound the time on the event loop
UNKNOWN_S = 3600.0
MAX_TOKENS = 1 << 17  # tokens beyond this length are taken to cost nothing


@dataclass(frozen=True, slots=True)
class Scenario:
    """A possible continuation of the retrieval."""

    weight: float
    """Probability of this scenario; the weights of all sum to 1."""
    next_s: float
    """Seconds until the next stage."""
    end_s: float
    """Seconds until the end of retrieval."""
    p_final: tuple[float, ...]
    """Probability that each prefix is final, by its length from 1."""


@dataclass(frozen=True, slots=True)
class HeldContext:
    """A context that has not been sent yet."""

    num_kept: int
    """Number of leading passages that it shares with the sent context."""
    tokens: tuple[int, ...]
    """Number of tokens of each passage."""
    scenarios: tuple[Scenario, ...]
    others: float
    """Number of other concurrent requests."""
    price: float
    """Seconds of waiting that a second of the engine is worth."""


class EngineEstimate:
    """An estimate of how much of the sent context an otherwise idle engine has computed."""

    def __init__(self, profile: StepProfile, budget: int) -> None:
        self._profile = profile
        self._budget = budget
        self._now_s = 0.0
        self.num_computed = 0
        self.num_sent = 0

    def work_s(self, start: int, end: int) -> float:
        """Return the seconds to compute tokens [start, end)."""
        start, end = min(start, MAX_TOKENS), min(end, MAX_TOKENS)
        return recompute_s(self._profile, start, end, self._step_tokens(end - start)) if start < end else 0.0

    def _step_tokens(self, num_tokens: int) -> int:
        """Return the tokens of a step: the engine's budget, or more where work would have over `MAX_STEPS` steps."""
        return max(self._budget, num_tokens // MAX_STEPS + 1)

    def send(self, num_kept: int, num_tokens: int, now_s: float) -> None:
        """Record a sent context of `num_tokens`, which keeps `num_kept` tokens of the one before."""
        self.advance(now_s)
        self.num_computed = min(self.num_computed, num_kept)
        self.num_sent = num_tokens

    def advance(self, now_s: float) -> None:
        """Compute tokens of the sent context until `now_s`."""
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        ends = range(self.num_computed, min(self.num_sent, MAX_TOKENS) + 1)
        if len(ends) > 1 and elapsed_s > 0:
            self.num_computed = ends[bisect_right(ends, elapsed_s, key=partial(self.work_s, ends[0])) - 1]

    def step_ends_s(self, start: int, end: int) -> list[float]:
        """Return when each step ends if tokens [start, end) are computed from now on."""
        size = self._step_tokens(min(end, MAX_TOKENS) - start)
        ends = [*range(start + size, min(end, MAX_TOKENS), size), end]
        return [self.work_s(start, each) for each in ends]


def scenarios(
    when_final: Sequence[tuple[float, float]], when_not: Sequence[tuple[float, float]], p_final: Sequence[float]
) -> tuple[Scenario, ...]:
    """Return a scenario for each example, a pair of seconds until the next stage and until the end.

    Without examples of one kind, those of the other stand for both; without any, waiting gains nothing.

    p_final: by length from 1, the probability that a prefix is final.
    """
    p_all = p_final[-1] if p_final else 1.0
    certain = (1.0,) * len(p_final)
    if not when_final and not when_not:  # later than any example: waiting gains nothing
        return (Scenario(1.0, UNKNOWN_S, 0.0, certain),)
    p_otherwise = tuple((p - p_all) / (1 - p_all) if p_all < 1 else 1.0 for p in p_final)
    return tuple(
        Scenario(share / len(times), next_s, end_s, p_each)
        for share, times, p_each in (
            (p_all, when_final or when_not, certain),
            (1 - p_all, when_not or when_final, p_otherwise),
        )
        for next_s, end_s in times
    )


def best_length(held: HeldContext, engine: EngineEstimate, *, whole_only: bool = False) -> int | None:
    """Return how many passages of `held` to send now; None to send nothing yet. With `whole_only`, all or none.

    The result may be `num_kept`: no new passage is worth sending, but the engine should stop computing the old ones.
    """
    ends = [*accumulate(held.tokens, initial=0)]
    lengths = [*range(held.num_kept, len(held.tokens) + 1)]
    if len(lengths) > MAX_LENGTHS:
        lengths = [*lengths[: MAX_LENGTHS - 1], lengths[-1]]
    num_kept_tokens = ends[held.num_kept]
    start = min(engine.num_computed, num_kept_tokens)
    done_s = [engine.work_s(start, ends[length]) for length in lengths]
    is_dropping = engine.num_sent > num_kept_tokens
    least = 0.0
    if is_dropping and engine.num_computed < engine.num_sent:  # the engine would continue with the sent context
        steps = engine.step_ends_s(engine.num_computed, engine.num_sent)
        useless_s = [done_s[0], max(steps[-1], done_s[0])]
        least = sum(
            scenario.weight * _costs(useless_s, [0.0], steps, done_s[-1], scenario, held)[-1]
            for scenario in held.scenarios
        )
    steps = engine.step_ends_s(start, ends[-1])
    costs = [0.0] * len(lengths)
    for scenario in held.scenarios:
        p_final = [scenario.p_final[length - 1] for length in lengths[1:]]
        for number, cost in enumerate(_costs(done_s, p_final, steps, done_s[-1], scenario, held)):
            costs[number] += scenario.weight * cost
    best = None
    for length, cost in zip(lengths, costs, strict=True):
        if (length == held.num_kept and not is_dropping) or (whole_only and length < len(held.tokens)):
            continue
        if cost < least - MIN_GAIN_S or (best is not None and cost <= least + TIE_S):  # of equal costs, the longest
            best, least = length, min(cost, least)
    return best


def _costs(
    done_s: Sequence[float],
    p_final: Sequence[float],
    steps: Sequence[float],
    total_s: float,
    scenario: Scenario,
    held: HeldContext,
) -> list[float]:
    """Return the waiting time that sending adds, for the kept passages alone and for each length; negative if it saves.

    done_s: when the work on the kept passages is done, and then on each further passage.
    steps: when the engine's steps end.
    """
    next_s, end_s = (each / (1 + held.others) for each in (scenario.next_s, max(scenario.end_s, scenario.next_s)))
    busy_s = steps[min(bisect_right(steps, next_s), len(steps) - 1)]  # the end of the step that runs at `next_s`
    slack_s = (end_s - next_s) - total_s
    lead = useless = wasted = 0.0
    costs = [0.0]
    for (from_s, to_s), p in zip(pairwise(done_s), p_final, strict=True):
        lead += p * _overlap(from_s, to_s, 0.0, next_s)
        useless += (1 - p) * _overlap(from_s, to_s, next_s, busy_s)
        wasted += (1 - p) * _overlap(from_s, to_s, 0.0, max(next_s, busy_s))
        saved = min(lead, max(-slack_s, 0.0))
        lost = max(useless - max(slack_s, 0.0), 0.0)
        costs.append(lost + held.price * wasted - saved)
    return costs


def _overlap(start: float, end: float, low: float, high: float) -> float:
    return max(min(end, high) - max(start, low), 0.0)
