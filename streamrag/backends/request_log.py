"""What happened to a request inside the engine, and when. Times are in seconds on the engine's monotonic clock."""

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ChunkRecord", "PreemptionRecord", "RequestLog"]


@dataclass(slots=True)
class ChunkRecord:
    """A chunk that arrived."""

    arrival_s: float
    num_tokens: int
    """Length of the prompt that it made."""
    num_common: int
    """Leading tokens shared with the prompt before: the LCP."""
    num_computed: int
    """Tokens of the prompt before that were computed, or being computed, when it came."""

    @property
    def num_invalidated(self) -> int:
        """Computed tokens past the LCP, whose KV is of no use any more."""
        return max(self.num_computed - self.num_common, 0)


@dataclass(slots=True)
class PreemptionRecord:
    """KV that was taken away to make room."""

    at_s: float
    fate: str
    num_tokens_lost: int


@dataclass(slots=True)
class RequestLog:
    """Counters and events of one request; written by the scheduler only."""

    arrival_s: float
    queued_s: float
    """When the scheduler saw it first."""
    scheduled_s: float | None = None
    """When it was first taken up."""
    first_kv_s: float | None = None
    """When the first of its KV was on the device, computed or from the prefix cache."""
    last_kv_s: float | None = None
    """When the KV of its complete prompt was on the device."""
    finished_s: float | None = None
    num_computed: int = 0
    """Prompt tokens computed, all in all."""
    num_recomputed: int = 0
    """Of these, tokens that had been computed before for the same prefix."""
    num_invalidated: int = 0
    """Computed tokens that updates made useless: the sum over updates of max(0, computed - LCP)."""
    num_from_cache: int = 0
    """Prompt tokens served by the prefix cache."""
    chunks: list[ChunkRecord] = field(default_factory=list)
    preemptions: list[PreemptionRecord] = field(default_factory=list)

    num_known: int = 0
    """Leading tokens of the current prompt whose KV has been there at some time."""
    num_present: int = 0
    """Leading tokens whose KV was there when last looked at."""

    def computes(self, start: int, num_tokens: int, now_s: float) -> None:
        """Tokens [start, start + num_tokens) are computed in this step; what is new below `start` was in the cache."""
        end = start + num_tokens
        self.num_from_cache += max(start - self.num_present, 0)
        self.num_computed += num_tokens
        self.num_recomputed += max(min(self.num_known, end) - start, 0)
        self.num_known = max(self.num_known, end)
        self.num_present = end
        if self.scheduled_s is None:
            self.scheduled_s = now_s

    def keeps(self, num_tokens: int, num_common: int) -> None:
        """After a new chunk, the KV of `num_tokens` is left."""
        self.num_present = num_tokens
        self.num_known = min(self.num_known, num_common)

    def loses_all(self, fate: str, now_s: float) -> None:
        """Its KV was taken away."""
        self.preemptions.append(PreemptionRecord(now_s, fate, self.num_present))
        self.num_present = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they travel to the client."""
        record = asdict(self)
        del record["num_known"], record["num_present"]
        return record
