"""Choose for each query whether, and when, to prefill during retrieval: whatever brings the first token sooner."""

from collections import defaultdict, deque
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from random import Random
from statistics import fmean, median
from typing import Self

from streamrag.telemetry import OverlapChoice, OverlapWay, Timings

MIN_TURNS = 3
"""Turns that each way gets before any of them is judged. A turn is as many queries as run at once: queries slow each
other down, so that a way shows its worth only if the others use it as well."""
WINDOW = 128  # newest queries that a way is judged by
RECHECK_EVERY = 100
"""A worse way is tried again once in so many turns. With 1 % of the queries, P95 becomes what P96 was; with 2.5 %, it
was 4 % longer in a simulation."""
TRY_EVERY = 8
"""The same before MIN_TURNS, where model and retrieval share no processors: waiting for retrieval rarely helps then."""
NEGLIGIBLE = 0.03  # share of the time to the first token that is not worth any work


ALWAYS = OverlapChoice("immediate", "overlap=True")
NEVER = OverlapChoice("none", "overlap=False")


@dataclass(frozen=True, slots=True)
class OverlapOutcome:
    """The times of one query that was answered, in seconds, for comparing ways."""

    way: OverlapWay
    ttft_s: float
    """Time from admission to the first token."""
    ttft_after_retrieval_s: float
    streaming_s: float
    """Time from the first chunk to the end of retrieval: no way to overlap saves more."""
    has_forecast: bool
    """Whether the source said when it would end, without which a delay is impossible."""

    @classmethod
    def of(cls, way: OverlapWay, timings: Timings, *, has_forecast: bool) -> Self:
        """Return the outcome of a query with these timings, without its wait for admission."""
        return cls(
            way,
            ttft_s=timings.ttft_s - timings.queued_s,
            ttft_after_retrieval_s=timings.ttft_after_retrieval_s,
            streaming_s=0.0 if timings.first_chunk_s is None else timings.retrieval_s - timings.first_chunk_s,
            has_forecast=has_forecast,
        )


class OverlapChooser:
    """Learns for one source and engine which way is best, separately for each level of load.

    A way is chosen as often as it is likely to be the best one (Thompson sampling): often while little is known, hardly
    ever once it is clearly worse. The answer is the same in any case.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def choose(self, num_running: int, *, shares_processors: bool) -> OverlapChoice:
        """Return the way of the next query.

        num_running: number of admitted queries, including this one.
        shares_processors: whether the model computes on the processors that retrieval uses. If so, prefill may slow
            retrieval down, and the time from admission to the first token is compared. Otherwise the time after
            retrieval is, which varies less.
        """
        level = self._levels.setdefault(num_running.bit_length(), _Level(shares_processors))
        return level.choose(num_running)

    def learn(self, outcome: OverlapOutcome, num_running: int) -> None:
        """Take the outcome of a query into account; `num_running` as it was given to `choose`."""
        self._levels[num_running.bit_length()].learn(outcome)


class _Level:
    """A level of load, and what was learnt at it: 1 query, 2 to 3, 4 to 7 and so on."""

    def __init__(self, shares_processors: bool) -> None:
        self._shares_processors = shares_processors
        self._num_turns: dict[OverlapWay, int] = {"immediate": 0, "none": 0}
        self._logs: dict[OverlapWay, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))  # of seconds
        self._prefill_s: deque[float] = deque(maxlen=WINDOW)  # from the end of retrieval, without overlap
        self._gains: deque[float] = deque(maxlen=WINDOW)  # most that overlap can save, as a share
        self._choice = NEVER
        self._num_left = 0  # queries of the current turn
        self._random = Random(0)

    def learn(self, outcome: OverlapOutcome) -> None:
        """Keep an outcome's time, gain and, of "none", prefill. "none" with a forecast makes "delayed" a way, too."""
        seconds = outcome.ttft_s if self._shares_processors else outcome.ttft_after_retrieval_s
        self._logs[outcome.way].append(log(max(seconds, 1e-4)))
        self._gains.append(outcome.streaming_s / max(outcome.ttft_s, 1e-4))
        if outcome.way == "none":
            self._prefill_s.append(outcome.ttft_after_retrieval_s)
            if outcome.has_forecast:
                self._num_turns.setdefault("delayed", 0)

    def choose(self, num_running: int) -> OverlapChoice:
        """Return a turn's choice, for `num_running` queries in a row; the lead of "delayed" is the median prefill."""
        if self._num_left == 0:
            way, reason = self._next()
            self._num_turns[way] += 1
            self._num_left = num_running
            self._choice = OverlapChoice(way, reason, median(self._prefill_s) if way == "delayed" else None)
        self._num_left -= 1
        return self._choice

    def _next(self) -> tuple[OverlapWay, str]:
        """Return the next turn's way and the reason in words: "none" if overlap hardly gains, else the best way.

        Until each way had MIN_TURNS, and in each `RECHECK_EVERY`-th turn, it is the rarest; later the one whose sampled
        time is the shortest. Without shared processors, only each `TRY_EVERY`-th turn before MIN_TURNS tries others.
        """
        if len(self._gains) >= MIN_TURNS and max(self._gains) < NEGLIGIBLE:
            return "none", "retrieval ends right after its first result"
        num_turns = sum(self._num_turns.values())
        rarest = min(self._num_turns, key=self._num_turns.__getitem__)
        if self._num_turns[rarest] < MIN_TURNS:
            may_try = self._shares_processors or num_turns % TRY_EVERY == TRY_EVERY - 1
            return (rarest, "to learn which way is best") if may_try else ("immediate", "until others were tried")
        if num_turns % RECHECK_EVERY == RECHECK_EVERY - 1:
            return rarest, "to check whether it is still worse"
        best = min(self._num_turns, key=self._mean)
        deviation = self._deviation()
        may_be = {
            way: self._random.gauss(self._mean(way), deviation / sqrt(len(self._logs[way])))
            for way in self._num_turns
            if self._logs[way]
        }
        chosen = min(may_be, key=may_be.__getitem__, default=best)
        return chosen, self._advantage(best) if chosen == best else f'it may be better than "{best}"'

    def _mean(self, way: OverlapWay) -> float:
        """Return the mean logarithm of a way's seconds; infinity if no query of it was answered."""
        return fmean(logs) if (logs := self._logs[way]) else inf

    def _deviation(self) -> float:
        """Return the standard deviation of one way's logarithms, from those of all ways."""
        means = {way: self._mean(way) for way in self._logs}
        squares = [(each - means[way]) ** 2 for way, logs in self._logs.items() for each in logs]
        return sqrt(sum(squares) / max(len(squares) - len(means), 1))

    def _advantage(self, best: OverlapWay) -> str:
        """Return in words how much sooner the first token comes on average with the best way than with the second."""
        second = min((way for way in self._num_turns if way != best), key=self._mean)
        share = 1 - exp(self._mean(best) - self._mean(second))
        since = "the question" if self._shares_processors else "the end of retrieval"
        return f'the first token comes {share:.0%} sooner after {since} than with "{second}"'
