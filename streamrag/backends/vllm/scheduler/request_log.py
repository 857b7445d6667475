"""Logs of unfinished requests, written by the scheduler."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from streamrag.engine.recompute_or_swap import CostComparison
from streamrag.records import ChunkRecord, PreemptionRecord, RequestOutcome, RequestRecord, RestoreRecord


@dataclass(slots=True)
class HostClock:
    """The two clocks that request logs need. A simulated engine replaces both by a virtual clock."""

    monotonic: Callable[[], float] = time.monotonic
    """Returns seconds, for all records. On Linux, `time.monotonic` is the same for all processes of a host."""
    wall: Callable[[], float] = time.time
    """Returns seconds since the epoch, the unit of `Request.arrival_time`: vLLM's only send time of a plain request."""


@dataclass(slots=True)
class RequestLog:
    """Counters and events of one unfinished request. The public fields are those of `RequestRecord`."""

    request_id: str
    is_stream: bool
    arrival_s: float
    queued_s: float
    scheduled_s: float | None = None
    first_kv_s: float | None = None
    last_kv_s: float | None = None
    num_computed: int = 0
    num_recomputed: int = 0
    num_invalidated: int = 0
    num_from_cache: int = 0
    num_loaded: int = 0
    num_written_through: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_copies_verified: int = 0
    num_copied: int = 0
    chunks: list[ChunkRecord] = field(default_factory=list)
    preemptions: list[PreemptionRecord] = field(default_factory=list)
    restores: list[RestoreRecord] = field(default_factory=list)
    holds: Counter[str] = field(default_factory=Counter)

    num_ever_computed: int = 0  # leading tokens of the current prompt whose KV has been computed at any time
    num_present: int = 0  # leading tokens of the prompt whose KV was computed, or being computed, at the last event

    def on_chunk(self, chunk: ChunkRecord, num_left: int) -> None:
        """Log a chunk, after which the KV of `num_left` leading tokens remains valid."""
        self.chunks.append(chunk)
        self.num_invalidated += chunk.num_invalidated
        self.num_present = num_left
        self.num_ever_computed = min(self.num_ever_computed, chunk.num_shared)

    def on_step(self, start: int, end: int, now_s: float, num_loaded: int = 0) -> None:
        """Log a step that computes prompt tokens [start, end), with the times of the first step and the first hit.

        Tokens before `start` whose KV was not present at the last event were prefix hits, except for `num_loaded`
        tokens from host memory. Computed tokens that were also computed at any time before count as recomputed, too.
        """
        if self.scheduled_s is None:
            self.scheduled_s = now_s
        if start > self.num_present:
            self.num_from_cache += start - self.num_present - num_loaded
            self.num_loaded += num_loaded
            if self.first_kv_s is None:
                self.first_kv_s = now_s
        self.num_computed += end - start
        self.num_recomputed += max(min(self.num_ever_computed, end) - start, 0)
        self.num_ever_computed = max(self.num_ever_computed, end)
        self.num_present = end

    def on_later_hit(self, num_tokens: int, now_s: float) -> None:
        """Log that the KV of the first `num_tokens` tokens is now present, taken from the prefix cache."""
        self.num_from_cache += num_tokens - self.num_present
        self.num_present = num_tokens
        if self.first_kv_s is None:
            self.first_kv_s = now_s

    def on_step_end(self, now_s: float, *, is_complete: bool) -> None:
        """Log a step's end as the time of the first KV, and with `is_complete` of the last, unless these are set."""
        if self.first_kv_s is None:
            self.first_kv_s = now_s
        if is_complete and self.last_kv_s is None:
            self.last_kv_s = now_s

    def on_verified(self, num_tokens: int, num_accepted: int, *, are_copies: bool) -> None:
        """Add verified tokens, the first `num_accepted` of which were right; copies from the prompt count apart."""
        if are_copies:
            self.num_copies_verified += num_tokens
            self.num_copied += num_accepted
        else:
            self.num_verified += num_tokens
            self.num_accepted += num_accepted

    def on_loss(self, num_tokens: int, comparison: CostComparison, now_s: float) -> None:
        """Log that the request lost the KV of all `num_tokens` computed tokens, including those of the answer."""
        fate, recompute_s, swap_s = comparison.choice, comparison.recompute_s, comparison.swap_s
        self.preemptions.append(PreemptionRecord(now_s, fate, num_tokens, recompute_s, swap_s))
        self.num_present = 0

    def on_saves_sent(self, index: int, num_tokens: int, expected_s: float) -> None:
        """Add tokens that are being copied to host memory, and the expected seconds, to the preemption at `index`."""
        known = self.preemptions[index]
        self.preemptions[index] = replace(
            known,
            num_tokens_saved=known.num_tokens_saved + num_tokens,
            expected_save_s=known.expected_save_s + expected_s,
        )

    def on_saves_ended(self, index: int, seconds: float) -> None:
        """Add the duration of copies to the preemption at `index`."""
        known = self.preemptions[index]
        self.preemptions[index] = replace(known, save_s=known.save_s + seconds)

    def on_restored(self, index: int, seconds: float) -> None:
        """Add the duration of a restore, or of a part of it, to the restore at `index`."""
        known = self.restores[index]
        self.restores[index] = replace(known, observed_s=(known.observed_s or 0.0) + seconds)

    def end(
        self, outcome: RequestOutcome, now_s: float, num_prompt_tokens: int, num_output_tokens: int
    ) -> RequestRecord:
        """Return the record of the request: the public fields, with lists as tuples, and these values."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _RECORDED}
        values["holds"] = dict(self.holds)
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return RequestRecord(
            outcome=outcome,
            finished_s=now_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            **values,
        )


_RECORDED = {field.name for field in fields(RequestLog)} & {field.name for field in fields(RequestRecord)}
