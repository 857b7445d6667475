"""Logs of requests inside the engine, written by the scheduler."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from streamrag.engine.swapping import Comparison
from streamrag.records import ChunkRecord, Outcome, PreemptionRecord, RequestRecord, RestoreRecord


@dataclass(slots=True)
class HostClock:
    """The two clocks that request logs need. A simulated engine replaces both by its virtual clock."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds, of all records. `time.monotonic` is, on Linux, the same for all processes of a host."""
    wall: Callable[[], float] = time.time
    """Seconds, of `Request.arrival_time`, which is all that vLLM says about when a plain request was sent."""


@dataclass(slots=True)
class RequestLog:
    """Counters and events of one request that still lives. The fields are those of `RequestRecord`."""

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
    chunks: list[ChunkRecord] = field(default_factory=list)
    preemptions: list[PreemptionRecord] = field(default_factory=list)
    restores: list[RestoreRecord] = field(default_factory=list)
    holds: Counter[str] = field(default_factory=Counter)

    num_known: int = 0
    """Leading tokens of the current prompt whose KV has been there at some time."""
    num_present: int = 0
    """Leading tokens of the prompt whose KV was there, or being computed, when last looked at."""

    def on_chunk(self, chunk: ChunkRecord, num_left: int) -> None:
        """Note a chunk, after which the KV of `num_left` tokens is left."""
        self.chunks.append(chunk)
        self.num_invalidated += chunk.num_invalidated
        self.num_present = num_left
        self.num_known = min(self.num_known, chunk.num_shared)

    def on_step(self, start: int, end: int, now_s: float, num_loaded: int = 0) -> None:
        """Note that prompt tokens [start, end) are computed in this step.

        What is new below `start` was in the prefix cache, but for `num_loaded` tokens from host memory.
        """
        if self.scheduled_s is None:
            self.scheduled_s = now_s
        if start > self.num_present:
            self.num_from_cache += start - self.num_present - num_loaded
            self.num_loaded += num_loaded
            if self.first_kv_s is None:
                self.first_kv_s = now_s
        self.num_computed += end - start
        self.num_recomputed += max(min(self.num_known, end) - start, 0)
        self.num_known = max(self.num_known, end)
        self.num_present = end

    def on_later_hit(self, num_tokens: int, now_s: float) -> None:
        """Note that it has taken what it lacked of its first `num_tokens` tokens, which others have computed."""
        self.num_from_cache += num_tokens - self.num_present
        self.num_present = num_tokens
        if self.first_kv_s is None:
            self.first_kv_s = now_s

    def on_step_end(self, now_s: float, *, is_complete: bool) -> None:
        """Note the end of a step that computed prompt tokens; of the complete prompt, the last ones."""
        if self.first_kv_s is None:
            self.first_kv_s = now_s
        if is_complete and self.last_kv_s is None:
            self.last_kv_s = now_s

    def on_loss(self, num_tokens: int, comparison: Comparison, now_s: float) -> None:
        """Note that all KV was taken away, which was that of `num_tokens`, the answer's included."""
        fate, recompute_s, swap_s = comparison.choice, comparison.recompute_s, comparison.swap_s
        self.preemptions.append(PreemptionRecord(now_s, fate, num_tokens, recompute_s, swap_s))
        self.num_present = 0

    def on_saves(self, index: int, num_tokens: int, expected_s: float) -> None:
        """Note that some of what the preemption of that index took away is being copied to host memory."""
        known = self.preemptions[index]
        self.preemptions[index] = replace(
            known,
            num_tokens_saved=known.num_tokens_saved + num_tokens,
            expected_save_s=known.expected_save_s + expected_s,
        )

    def on_saved(self, index: int, seconds: float) -> None:
        """Note how long such copies took."""
        known = self.preemptions[index]
        self.preemptions[index] = replace(known, save_s=known.save_s + seconds)

    def on_restored(self, index: int, seconds: float) -> None:
        """Note how long the restore of that index took, or a part of it."""
        known = self.restores[index]
        self.restores[index] = replace(known, observed_s=(known.observed_s or 0.0) + seconds)

    def end(self, outcome: Outcome, now_s: float, num_prompt_tokens: int, num_output_tokens: int) -> RequestRecord:
        """Return the record of a request that ends now."""
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
