"""Choose for each query whether, and when, to prefill during retrieval: whatever brings the first token sooner."""

from collections import Counter, OrderedDict, defaultdict, deque
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
RECENT = 16  # newest queries, of whatever way, that say how much of the next prompts will be new
BLOCK_SIZE = 64  # tokens of a prompt that count as seen before together
MAX_BLOCKS = 1 << 14  # a million tokens, about what an engine's prefix cache holds


ALWAYS = OverlapChoice("immediate", "overlap=True")
NEVER = OverlapChoice("none", "overlap=False")


@dataclass(frozen=True, slots=True)
class OverlapOutcome:
    """The times of one query that was answered, in seconds, for comparing ways."""

    way: OverlapWay
    ttft_s: float
    """Time from admission to the first token."""
    ttft_after_retrieval_s: float
    most_saved_s: float
    """Most time that an overlap can save: that from the first chunk to the end of retrieval, and that in which the head
    can be prefilled before."""
    has_forecast: bool
    """Whether the source said when it would end, without which a delay is impossible."""
    token_ids: tuple[int, ...] = ()
    """The complete prompt. Whatever an earlier prompt began with as well is probably in the engine's prefix cache."""

    @classmethod
    def of(
        cls, way: OverlapWay, timings: Timings, *, has_forecast: bool, num_head: int, token_ids: tuple[int, ...]
    ) -> Self:
        """Return the outcome of a query with these timings, without its wait for admission.

        Prefill of the head, `num_head` tokens, takes its share of the time after retrieval; with "immediate", that is
        the time for the other tokens only.
        """
        first_chunk_s = timings.retrieval_s if timings.first_chunk_s is None else timings.first_chunk_s
        head_s = timings.ttft_after_retrieval_s * num_head / max(len(token_ids) - num_head, 1)
        return cls(
            way,
            ttft_s=timings.ttft_s - timings.queued_s,
            ttft_after_retrieval_s=timings.ttft_after_retrieval_s,
            most_saved_s=timings.retrieval_s - first_chunk_s + min(first_chunk_s - timings.queued_s, head_s),
            has_forecast=has_forecast,
            token_ids=token_ids,
        )


class OverlapChooser:
    """Learns for one source and engine which way is best, separately for each level of load.

    A way is chosen as often as it is likely to be the best one (Thompson sampling): often while little is known, hardly
    ever once it is clearly worse. The answer is the same in any case.

    Ways are compared among prompts with about as many new tokens: what the prefix cache has is quick in each way. What
    is new does not come from records: many backends keep none, and a query's drafts are in the cache in one way only.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._blocks: OrderedDict[int, None] = OrderedDict()  # hashes of prompts' beginnings, the newest last

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
        self._levels[num_running.bit_length()].learn(outcome, self._size(outcome.token_ids))

    def _size(self, token_ids: tuple[int, ...]) -> int:
        """Return 0 for a prompt of which fewer than BLOCK_SIZE tokens are new, 1 for up to 4 times as many, and so on.
        Remember the prompt."""
        key, num_seen = 0, 0
        for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            key = hash((key, token_ids[end - BLOCK_SIZE : end]))
            num_seen = end if key in self._blocks else num_seen
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return (((len(token_ids) - num_seen) // BLOCK_SIZE).bit_length() + 1) // 2


class _Level:
    """A level of load, and what was learnt at it: 1 query, 2 to 3, 4 to 7 and so on."""

    def __init__(self, shares_processors: bool) -> None:
        self._shares_processors = shares_processors
        self._num_turns: dict[OverlapWay, int] = {"immediate": 0, "none": 0}
        # Logarithms of seconds, by way and by size of the prompt.
        self._logs: dict[tuple[OverlapWay, int], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # sizes, and most seconds that overlap can save
        self._prefill_s: deque[float] = deque(maxlen=WINDOW)  # from the end of retrieval, without overlap
        self._gains: deque[float] = deque(maxlen=WINDOW)  # most that overlap can save, as a share
        self._choice = NEVER
        self._num_left = 0  # queries of the current turn
        self._random = Random(0)

    def learn(self, outcome: OverlapOutcome, size: int) -> None:
        """Keep an outcome's time, gain and, of "none", prefill. "none" with a forecast makes "delayed" a way, too."""
        seconds = outcome.ttft_s if self._shares_processors else outcome.ttft_after_retrieval_s
        self._logs[outcome.way, size].append(log(max(seconds, 1e-4)))
        self._recent.append((size, outcome.most_saved_s))
        self._gains.append(outcome.most_saved_s / max(outcome.ttft_s, 1e-4))
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
        means, may_be = self._estimates()
        if not may_be:
            return rarest, "to learn which way is best"
        best = min(means, key=means.__getitem__)
        chosen = min(may_be, key=may_be.__getitem__)
        return chosen, self._advantage(means) if chosen == best else f'it may be better than "{best}"'

    def _estimates(self) -> tuple[dict[OverlapWay, float], dict[OverlapWay, float]]:
        """Return each way's mean logarithm of seconds, and a sample of what it may be, for prompts of recent sizes.

        A way without a query of a size counts as if one had taken the mean of the other ways. A way of which no query
        was answered has an infinite mean and no sample.
        """
        cells = {cell: fmean(logs) for cell, logs in self._logs.items()}
        squares = [(each - cells[cell]) ** 2 for cell, logs in self._logs.items() for each in logs]
        deviation = sqrt(sum(squares) / max(len(squares) - len(cells), 1))
        answered = {way for way, _ in cells}
        means = {way: 0.0 if way in answered else inf for way in self._num_turns}
        may_be = {way: 0.0 for way in self._num_turns if way in answered}
        for size, num in Counter(size for size, _ in self._recent).items():
            share, others = num / len(self._recent), fmean(mean for (_, of), mean in cells.items() if of == size)
            for way in may_be:
                mean, num_logs = cells.get((way, size), others), len(self._logs.get((way, size), "1"))
                means[way] += share * mean
                may_be[way] += share * self._random.gauss(mean, deviation / sqrt(num_logs))
        return means, may_be

    def _advantage(self, means: dict[OverlapWay, float]) -> str:
        """Return in words how much sooner the first token comes on average with the best way than with the second, but
        never more than an overlap can save."""
        best, second = sorted(means, key=means.__getitem__)[:2]
        most = fmean(most_saved_s for _, most_saved_s in self._recent) / exp(means[second])
        share = min(1 - exp(means[best] - means[second]), most)
        since = "the question" if self._shares_processors else "the end of retrieval"
        return f'the first token comes {share:.0%} sooner after {since} than with "{second}"'
