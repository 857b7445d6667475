"""Costs of decisions about KV in host memory: what was expected, and what came true.

    resumed ─▶ on_resume ─▶ steps that recompute │ reports of copies ─▶ RestoreRecord.observed_s
    evicted ─▶ on_saves, in steps that overwrite ─▶ reports of copies ─▶ PreemptionRecord.save_s

Reports of copies tell by numbers only what has ended; copies in one direction end in the order in which they were sent.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.engine.costs.price import Price
from streamrag.engine.costs.step_profiles import Part
from streamrag.engine.swapping import Comparison
from streamrag.records import RestoreRecord


class Match(NamedTuple):
    """Blocks that host memory has of a request that could run in this step."""

    start: int
    """The first block past what the prefix cache has."""
    num_blocks: int
    """Number of blocks from there on."""
    comparison: Comparison | None
    """Compares loading them with computing them; None if there are none."""
    num_tokens: int
    """Tokens to be loaded."""


@dataclass(slots=True)
class _Entry:
    """A record in a log, which more becomes known of."""

    log: RequestLog
    index: int


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
    """Fills in the records of preemptions and of restores, of requests that live. Tells the price what is observed."""

    def __init__(self, price: Price | None, block_size: int) -> None:
        self.price = price
        """None if nothing is compared: then nothing is expected to cost anything."""
        self._block_size = block_size
        self._recomputing: dict[str, _Recomputing] = {}
        self._out, self._in = _CopyQueue(), _CopyQueue()

    def on_chunk(self, num_computed: int, num_valid: int) -> None:
        """Note that a chunk found computed tokens, of which the KV of so many is still true."""
        if self.price is not None:
            self.price.observe_chunk(num_computed, num_valid)

    def on_resume(self, request: StreamRequest, match: Match, now_s: float) -> None:
        """Note that a request runs in this step, with what was found."""
        if not request.was_evicted:
            return
        start, num_blocks, comparison, _ = match
        if comparison is None:
            num_blocks = request.log.num_known // self._block_size - start  # what is in no whole block cannot be kept
            if num_blocks <= 0:
                return
            recompute_s = self.price.recompute_s(start, num_blocks) if self.price is not None else 0.0
            record = RestoreRecord(now_s, "recompute", num_blocks * self._block_size, recompute_s, None, None)
        else:
            choice, recompute_s, swap_s = comparison.choice, comparison.recompute_s, comparison.swap_s
            record = RestoreRecord(now_s, choice, num_blocks * self._block_size, recompute_s, swap_s, None)
        entry = _Entry(request.log, len(request.log.restores))
        request.log.restores.append(record)
        if record.choice == "swap":
            self._in.sent.append((entry, num_blocks))
        else:
            first = start * self._block_size
            self._recomputing[request.request_id] = _Recomputing(entry, first, first + record.num_tokens)

    def on_saves(self, request: StreamRequest, num_blocks: int, num_together: int) -> None:
        """Note that blocks of an evicted request are sent to host memory, as some of `num_together` blocks."""
        together_s = self.price.save_s(num_together) if self.price is not None else 0.0
        entry = _Entry(request.log, len(request.log.preemptions) - 1)
        request.log.on_saves(entry.index, num_blocks * self._block_size, together_s * num_blocks / num_together)
        self._out.sent.append((entry, num_blocks))

    def on_write_through(self, num_blocks: int) -> None:
        """Note that blocks are sent to host memory that nobody has lost."""
        self._out.sent.append((None, num_blocks))

    def on_sent(self, num_out: int, num_in: int, now_s: float) -> None:
        """Note the number of all copies of a step."""
        if self.price is not None:
            self.price.observe_sent(num_out, num_in, now_s)

    def on_step_end(
        self, parts: Sequence[tuple[str, Part]], duration_s: float, copies_s: float, *, is_held_up: bool
    ) -> None:
        """Note that a step took `duration_s`, and its copies `copies_s`; for some of these it may have waited."""
        computed = [part for _, part in parts]
        compute_s = duration_s
        if self.price is not None:
            self.price.observe_step(computed, duration_s, copies_s, is_held_up=is_held_up)
            if not self.price.is_overlapped:
                compute_s -= copies_s
        for index, (request_id, (num_new, num_before)) in enumerate(parts if self._recomputing else ()):
            known = self._recomputing.get(request_id)
            if known is None:
                continue
            if num_before != known.done:  # it was evicted again, or its prompt has changed
                del self._recomputing[request_id]
                continue
            known.done = min(num_before + num_new, known.end)
            known.observed_s += self._share(computed, index, known.done - num_before) * compute_s
            if known.done == known.end:
                del self._recomputing[request_id]
                known.entry.log.on_restored(known.entry.index, known.observed_s)

    def on_copied(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None:
        """Note copies that have ended."""
        for entry, seconds in self._out.ended(num_out, out_s):
            entry.log.on_saved(entry.index, seconds)
        for entry, seconds in self._in.ended(num_in, in_s):
            entry.log.on_restored(entry.index, seconds)
        if self.price is not None:
            self.price.observe_copies(num_out, out_s, num_in, in_s)

    def on_failed_copies(self) -> None:
        """Forget the copies that were sent: numbers do not tell any more which have ended."""
        self._out.sent.clear()
        self._in.sent.clear()

    def on_finish(self, request_id: str) -> None:
        self._recomputing.pop(request_id, None)

    def _share(self, parts: Sequence[Part], index: int, num_tokens: int) -> float:
        """Share of a step's time that the first `num_tokens` tokens of part `index` add; without prices, by tokens."""
        if self.price is not None:
            return self.price.share(parts, index, num_tokens)
        return num_tokens / sum(num_new for num_new, _ in parts)
