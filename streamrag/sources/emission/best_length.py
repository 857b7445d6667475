"""The value of sending an update now: what it saves, what it may lose, and what it may waste of the engine's time.

A context with passages 1..n replaces what was sent, of which it keeps the first tokens. Times are counted from now: d
is when the next stage comes, D when retrieval ends. The work of prefilling the context is laid out in time:

    | kept, not yet computed | passage i | passage i + 1 | ...   |
    0                                 d                 b       W              D
                                      next stage        end of the engine's step that runs then

p_i is the probability that the first i passages are final, and |i [x, y]| are the seconds of work on passage i from x
to y. With m requests of others at the same time, the engine does a share of 1 / (1 + m) of this work before the prompt
is complete, when it comes first; d, D and b are in seconds of this work. Sending the first j passages now, and not at
the next stage,

    saves    min( sum p_i |i [0, d]|,  (W - (D - d))+ )         a lead, if there would be no time for it later
    loses    ( sum (1 - p_i) |i [d, b]|  -  ((D - d) - W)+ )+   the next context waits for a step that runs in vain
    wastes   price * sum (1 - p_i) |i [0, b]|                   the engine's time

seconds of waiting, where (x)+ is x or 0 if that is more, and a second of the engine's is worth `price` of them. These
are expected values: over examples of d and D, of queries whose result was final at this stage, as often as it is now
(p_n; all p_i are 1 then), and of those whose was not (each p_i is (p_i - p_n) / (1 - p_n) then). What is best is sent,
if it is better than sending nothing: then what was sent before goes on to be computed, and wastes and loses in the same
way if the new context does not have it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamrag.engine.costs.step_profiles import StepProfile, recompute_s

TIE_S = 1e-9
MIN_GAIN_S = 0.002
"""Least gain for which an update is sent: it takes time of its own, to be tokenised and planned."""

MAX_STEPS = 32
"""Most steps that are considered; they are taken to be larger where there would be more. The event loop waits."""
MAX_LENGTHS = 48
"""Most lengths that are considered, the whole included. The event loop waits."""
UNKNOWN_S = 3600.0

MAX_TOKENS = 1 << 17
"""Tokens from which on contexts are taken to cost no more."""


@dataclass(frozen=True, slots=True)
class Held:
    """A context that might be sent."""

    num_kept: int
    """Number of leading passages that what was sent begins with too."""
    tokens: tuple[int, ...]
    """Number of tokens of each passage."""
    futures: tuple["Future", ...]
    others: float
    """Number of other requests at the same time."""
    price: float
    """Seconds of waiting that a second of the engine's time is worth."""


@dataclass(frozen=True, slots=True)
class Future:
    """A way in which retrieval may go on."""

    weight: float
    """Probability of this future; those of all are 1 together."""
    next_s: float
    end_s: float
    p_final: tuple[float, ...]
    """Probability that each prefix is final, by its length from 1."""


class EngineGuess:
    """An estimate of what an engine has computed of a context that was sent, if it had nothing else to do."""

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
        return max(self._budget, num_tokens // MAX_STEPS + 1)

    def sent(self, num_kept: int, num_tokens: int, now_s: float) -> None:
        """Note that a context of `num_tokens` was sent, which keeps `num_kept` tokens of the one before."""
        self.pass_until(now_s)
        self.num_computed = min(self.num_computed, num_kept)
        self.num_sent = num_tokens

    def pass_until(self, now_s: float) -> None:
        """Let time pass, in which tokens are computed."""
        passed_s, self._now_s = now_s - self._now_s, now_s
        low, high = self.num_computed, min(self.num_sent, MAX_TOKENS)
        if low >= high or passed_s <= 0:
            return
        start = low
        if self.work_s(start, high) <= passed_s:
            low = high
        while high - low > 1:  # [start, low) has been computed, [start, high) has not
            middle = (low + high) // 2
            low, high = (middle, high) if self.work_s(start, middle) <= passed_s else (low, middle)
        self.num_computed = low

    def step_ends_s(self, start: int, end: int) -> list[float]:
        """Return when the steps end that compute tokens [start, end) from now on."""
        size = self._step_tokens(min(end, MAX_TOKENS) - start)
        ends = [*range(start + size, min(end, MAX_TOKENS), size), end]
        return [self.work_s(start, each) for each in ends]


def futures(
    when_final: Sequence[tuple[float, float]], when_not: Sequence[tuple[float, float]], p_final: Sequence[float]
) -> tuple[Future, ...]:
    """Return a future for each example of (d, D). Without examples of a kind, those of the other stand for both."""
    p_all = p_final[-1] if p_final else 1.0
    if not when_final and not when_not:  # later than ever: waiting for more promises nothing
        return (Future(1.0, UNKNOWN_S, 0.0, (1.0,) * len(p_final)),)
    of_others = tuple((p - p_all) / (1 - p_all) if p_all < 1 else 1.0 for p in p_final)
    found = []
    for share, times, p_each in (
        (p_all, when_final or when_not, (1.0,) * len(p_final)),
        (1 - p_all, when_not or when_final, of_others),
    ):
        found += [Future(share / len(times), next_s, end_s, p_each) for next_s, end_s in times]
    return tuple(found)


def best_length(held: Held, guess: EngineGuess, *, whole_only: bool = False) -> int | None:
    """Return how many passages of `held` to send now; None to send nothing yet. With `whole_only`, all or none.

    It may be `num_kept`: then nothing new is worth sending, but what is being computed is not worth it either.
    """
    ends = [0]
    for num in held.tokens:
        ends.append(ends[-1] + num)
    lengths = [*range(held.num_kept, len(held.tokens) + 1)]
    if len(lengths) > MAX_LENGTHS:
        lengths = [*lengths[: MAX_LENGTHS - 1], lengths[-1]]
    num_kept_tokens = ends[held.num_kept]
    start = min(guess.num_computed, num_kept_tokens)
    done_s = [guess.work_s(start, ends[length]) for length in lengths]
    is_dropping = guess.num_sent > num_kept_tokens
    least = 0.0
    if is_dropping and guess.num_computed < guess.num_sent:  # what was sent goes on to be computed
        steps = guess.step_ends_s(guess.num_computed, guess.num_sent)
        in_vain = [done_s[0], max(steps[-1], done_s[0])]
        least = sum(
            future.weight * _costs(in_vain, [0.0], steps, done_s[-1], future, held)[-1] for future in held.futures
        )
    steps = guess.step_ends_s(start, ends[-1])
    costs = [0.0] * len(lengths)
    for future in held.futures:
        likely = [future.p_final[length - 1] for length in lengths[1:]]
        for number, cost in enumerate(_costs(done_s, likely, steps, done_s[-1], future, held)):
            costs[number] += future.weight * cost
    best = None
    for length, cost in zip(lengths, costs, strict=True):
        if (length == held.num_kept and not is_dropping) or (whole_only and length < len(held.tokens)):
            continue
        if cost < least - MIN_GAIN_S or (best is not None and cost <= least + TIE_S):  # of those alike, the longest
            best, least = length, min(cost, least)
    return best


def _costs(
    done_s: Sequence[float],
    p_final: Sequence[float],
    steps: Sequence[float],
    total_s: float,
    future: Future,
    held: Held,
) -> list[float]:
    """Return the waiting that sending adds, for what is kept alone and for each length; below zero if it saves.

    `done_s` is when the work on what is kept is done, and then on each passage; `steps`, when steps of the engine are.
    """
    next_s, end_s = (each / (1 + held.others) for each in (future.next_s, max(future.end_s, future.next_s)))
    busy_s = steps[min(bisect_right(steps, next_s), len(steps) - 1)]  # when the step that runs then ends
    slack_s = (end_s - next_s) - total_s
    lead = in_the_way = wasted = 0.0
    costs = [0.0]
    for (from_s, to_s), p in zip(pairwise(done_s), p_final, strict=True):
        lead += p * _overlap(from_s, to_s, 0.0, next_s)
        in_the_way += (1 - p) * _overlap(from_s, to_s, next_s, busy_s)
        wasted += (1 - p) * _overlap(from_s, to_s, 0.0, max(next_s, busy_s))
        saved = min(lead, max(-slack_s, 0.0))
        lost = max(in_the_way - max(slack_s, 0.0), 0.0)
        costs.append(lost + held.price * wasted - saved)
    return costs


def _overlap(start: float, end: float, low: float, high: float) -> float:
    return max(min(end, high) - max(start, low), 0.0)
