"""What an engine did with one request, and when. All times are seconds on one monotonic clock of the host.

`time.monotonic`, which on Linux all processes of a host share: times of the client and of the engine can be compared.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["ChunkRecord", "Outcome", "PreemptionRecord", "RequestRecord"]

Outcome: TypeAlias = Literal["finished", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """KV that was taken away to make room."""

    at_s: float
    fate: str
    """"recompute": it was dropped."""
    num_tokens_lost: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, streamed or plain, from its arrival to its end. Source of the event names: arXiv 2604.16395."""

    request_id: str
    outcome: Outcome
    is_stream: bool
    """False for a plain request, whose prompt came in one piece."""
    arrival_s: float
    """When the client submitted it."""
    queued_s: float
    """When the scheduler saw it first."""
    scheduled_s: float | None
    """When it was first taken up."""
    first_kv_s: float | None
    """When the first of its KV was on the device, computed or from the prefix cache."""
    last_kv_s: float | None
    """When the KV of its complete prompt was on the device."""
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed: int
    """Prompt tokens computed, all in all."""
    num_recomputed: int
    """Of these, tokens that had been computed before for the same prefix."""
    num_invalidated: int
    """Computed tokens that updates made useless: the sum over updates of max(0, computed - LCP)."""
    num_from_cache: int
    """Prompt tokens served by the prefix cache."""
    chunks: tuple[ChunkRecord, ...] = ()
    """In order of arrival; of a plain request none."""
    preemptions: tuple[PreemptionRecord, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RequestRecord":
        """The record that `as_dict` made."""
        chunks = tuple(ChunkRecord(**chunk) for chunk in values["chunks"])
        preemptions = tuple(PreemptionRecord(**preemption) for preemption in values["preemptions"])
        return cls(**{**values, "chunks": chunks, "preemptions": preemptions})
