"""What decisions about KV in host memory were expected to cost, and what they did cost.

    resumed ─▶ considers ─▶ begins ─▶ steps that recompute │ reports of copies ─▶ RestoreRecord.observed_s
    evicted ─▶ saves, in steps that overwrite ─▶ reports of copies ─▶ PreemptionRecord.save_s

Reports of copies tell by numbers only what has ended; copies in one direction end in the order in which they were sent.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.engine.costs import Part
from streamrag.engine.swapping import Comparison, SwapChoice
from streamrag.records import RestoreRecord

__all__ = ["HostCosts"]


@dataclass(slots=True)
class _Entry:
    """A record in a log, which more becomes known of."""

    log: RequestLog
    index: int


class _Considered(NamedTuple):
    """How a request would run again. It may be asked in many steps before it does."""

    start: int
    num_blocks: int
    comparison: Comparison | None
    """None if host memory has nothing of it."""
    at_s: float


@dataclass(slots=True)
class _Recomputing:
    entry: _Entry
    done: int
    """Tokens up to here are computed."""
    end: int
    observed_s: float = 0.0


@dataclass(slots=True)
class _CopyQueue:
    """Copies that were sent, and for which record."""

    sent: deque[tuple[_Entry | None, int]] = field(default_factory=deque)

    def ended(self, num_blocks: int, seconds: float) -> Iterator[tuple[_Entry, float]]:
        """The records that `num_blocks` blocks in `seconds` were for, each with its share of the time."""
        num_left = num_blocks
        while num_left > 0 and self.sent:
            entry, num = self.sent.popleft()
            if num > num_left:
                self.sent.appendleft((entry, num - num_left))
                num = num_left
            num_left -= num
            if entry is not None:
                yield entry, seconds * num / num_blocks


class HostCosts:
    """Fills in the records of preemptions and of restores, of requests that live."""

    def __init__(self, choice: SwapChoice, block_size: int) -> None:
        self._choice = choice
        self._block_size = block_size
        self._considered: dict[str, _Considered] = {}
        self._recomputing: dict[str, _Recomputing] = {}
        self._out, self._in = _CopyQueue(), _CopyQueue()

    def end_step(self) -> None:
        """Nobody is asked any more how it would run."""
        self._considered.clear()

    def considers(self, request: StreamRequest, start: int, num_blocks: int, now_s: float) -> bool:
        """Whether `request` is to load blocks [start, start + num_blocks), which are all that host memory has of it."""
        comparison = self._choice.resume(start, num_blocks, now_s) if num_blocks else None
        self._considered[request.request_id] = _Considered(start, num_blocks, comparison, now_s)
        return comparison is not None and comparison.choice == "swap"

    def begins(self, request: StreamRequest) -> None:
        """It has blocks, and runs in this step as it was considered last."""
        considered = self._considered.pop(request.request_id, None)
        if considered is None or not request.was_evicted:
            return
        start, num_blocks, comparison, at_s = considered
        if comparison is None:
            num_blocks = request.log.num_known // self._block_size - start  # what is in no whole block cannot be kept
            if num_blocks <= 0:
                return
            recompute_s, swap_s = self._choice.recompute_s(start, num_blocks), None
        else:
            recompute_s, swap_s = comparison.recompute_s, comparison.swap_s
        choice = "recompute" if comparison is None else comparison.choice
        record = RestoreRecord(at_s, choice, num_blocks * self._block_size, recompute_s, swap_s, None)
        entry = _Entry(request.log, len(request.log.restores))
        request.log.restores.append(record)
        if record.choice == "swap":
            self._in.sent.append((entry, num_blocks))
        else:
            first = start * self._block_size
            self._recomputing[request.request_id] = _Recomputing(entry, first, first + record.num_tokens)

    def saves(self, request: StreamRequest, num_blocks: int, num_together: int) -> None:
        """Blocks of an evicted request are sent to host memory, as some of `num_together` blocks."""
        expected_s = self._choice.save_s(num_together) * num_blocks / num_together
        entry = _Entry(request.log, len(request.log.preemptions) - 1)
        request.log.saves(entry.index, num_blocks * self._block_size, expected_s)
        self._out.sent.append((entry, num_blocks))

    def writes_through(self, num_blocks: int) -> None:
        """Blocks are sent to host memory that nobody has lost."""
        self._out.sent.append((None, num_blocks))

    def has_run(self, parts: Sequence[tuple[str, Part]], compute_s: float) -> None:
        """A step has ended, which took `compute_s` without its copies."""
        if not self._recomputing:
            return
        computed = [part for _, part in parts]
        for index, (request_id, (num_new, num_before)) in enumerate(parts):
            known = self._recomputing.get(request_id)
            if known is None:
                continue
            if num_before != known.done:  # it was evicted again, or its prompt has changed
                del self._recomputing[request_id]
                continue
            known.done = min(num_before + num_new, known.end)
            share = self._choice.share(computed, index, known.done - num_before)
            known.observed_s += share * compute_s
            if known.done == known.end:
                del self._recomputing[request_id]
                known.entry.log.restored(known.entry.index, known.observed_s)

    def copied(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None:
        """Copies have ended."""
        for entry, seconds in self._out.ended(num_out, out_s):
            entry.log.has_saved(entry.index, seconds)
        for entry, seconds in self._in.ended(num_in, in_s):
            entry.log.restored(entry.index, seconds)

    def lost_count(self) -> None:
        """Some copies failed, so that numbers do not tell any more which have ended: nothing is said of those sent."""
        self._out.sent.clear()
        self._in.sent.clear()

    def finished(self, request_id: str) -> None:
        self._recomputing.pop(request_id, None)
