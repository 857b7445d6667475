"""Records of what an engine did with each request, and when.

Times are those of `time.monotonic`, which on Linux all processes of a host share, so that times of the client and the
engine compare.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import DecompressedFile, as_dataclass, parse_json, split_lines

RequestOutcome: TypeAlias = Literal["finished", "aborted", "failed"]
"""The end of a request. Aborted: the client cancelled it or went away. Failed: the engine rejected it or gave it up."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk that the engine accepted. A rejected chunk has no record, because it failed the request."""

    arrival_s: float
    num_tokens: int
    """Length of the prompt with this chunk."""
    num_shared: int
    """Leading tokens shared with the previous prompt (LCP)."""
    num_computed: int
    """Tokens of the previous prompt that were computed or being computed when the chunk arrived."""

    @property
    def num_invalidated(self) -> int:
        """Computed tokens past the LCP, whose KV is no longer valid."""
        return max(self.num_computed - self.num_shared, 0)


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """An eviction of the request's KV."""

    at_s: float
    """Time of the eviction."""
    fate: str
    """"recompute": the KV was dropped; "swap": it is copied to host memory before it is overwritten."""
    num_tokens_lost: int
    """Tokens of prompt and answer whose KV was lost. The prefix cache may still have blocks that were not
    overwritten."""
    recompute_s: float = 0.0
    """Expected seconds to recompute the KV; 0 if the two ways were not compared."""
    swap_s: float = 0.0
    """Expected seconds to copy the KV out and back."""
    num_tokens_saved: int = 0
    """Lost tokens that were copied to host memory before they were overwritten."""
    expected_save_s: float = 0.0
    """Expected seconds of these copies when they were sent."""
    save_s: float = 0.0
    """Measured seconds of these copies; 0 if they were not measured."""


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """A restore of evicted KV, when the request runs again."""

    at_s: float
    """Time at which the request was scheduled again."""
    choice: str
    """"swap": the KV is copied back from host memory; "recompute": it is computed again."""
    num_tokens: int
    """Tokens that could be restored in either way: those in host memory, past what the prefix cache still has. If host
    memory has none, the lost tokens in whole blocks."""
    recompute_s: float
    """Expected seconds to recompute them."""
    swap_s: float | None
    """Expected seconds to copy them; None if host memory has none."""
    observed_s: float | None
    """Measured seconds of the copies, or of the share that recomputation had in its steps. None if not measured, or if
    the request was evicted again, changed or ended before."""

    @property
    def expected_s(self) -> float:
        """Expected seconds of the chosen way."""
        return self.swap_s if self.choice == "swap" and self.swap_s is not None else self.recompute_s


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of a request, streamed or plain, from arrival to end. Source of the event names: arXiv 2604.16395."""

    request_id: str
    """The engine's id: the client's id and a few random characters."""
    outcome: RequestOutcome
    """"finished"; "aborted" by its client; or "failed": the engine rejected it or gave it up."""
    is_stream: bool
    """False for a plain request, whose prompt arrives at once."""
    arrival_s: float
    """When the client submitted it. For a plain request it is converted from vLLM's wall clock."""
    queued_s: float
    """When the scheduler saw it first."""
    scheduled_s: float | None
    """When the first step with tokens of it was planned. This and the next two are None if that never happened."""
    first_kv_s: float | None
    """When its first KV was on the device, computed or from the prefix cache."""
    last_kv_s: float | None
    """When the KV of its complete prompt was on the device for the first time."""
    finished_s: float
    """Time of its end, however it ended."""
    num_prompt_tokens: int
    """Tokens of the last prompt that the engine accepted."""
    num_output_tokens: int
    """Tokens of the answer."""
    num_computed: int
    """Prompt tokens computed in total."""
    num_recomputed: int
    """Tokens computed again although no update had invalidated their KV: it was lost to a preemption, or was in the
    block that an update cut."""
    num_invalidated: int
    """Computed tokens that updates invalidated: the sum over the chunks."""
    num_from_cache: int
    """Prompt tokens served by the prefix cache."""
    chunks: tuple[ChunkRecord, ...] = ()
    """Chunks in order of arrival; empty for a plain request."""
    preemptions: tuple[PreemptionRecord, ...] = ()
    """Evictions in order of time."""
    num_loaded: int = 0
    """Prompt tokens loaded from host memory."""
    num_written_through: int = 0
    """Prompt tokens copied to host memory while the request still held them, in idle copy time. Copies after an
    eviction are in `preemptions`."""
    restores: tuple[RestoreRecord, ...] = ()
    """Restores in order of time; only from engines with host memory."""
    num_verified: int = 0
    """Tokens of drafts that were computed to verify them."""
    num_accepted: int = 0
    """Verified tokens that were right: so many steps were saved. Those behind the end of the answer count too."""
    num_copies_verified: int = 0
    """Tokens from the prompt that were computed to verify them, where the answer followed no draft."""
    num_copied: int = 0
    """Copied tokens that became part of the answer: so many steps were saved."""
    holds: Mapping[str, int] = field(default_factory=dict)
    """Steps in which it got nothing, by the scheduling rule that held it back. Counted only if the scheduler's
    `records` option names a file."""

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RequestRecord":
        """Return the record that `as_dict` made `values` from, its chunks, preemptions and restores included."""
        return as_dataclass(cls, dict(values))


@dataclass(frozen=True, slots=True)
class KvHeld:
    """The KV on the device that the requests in one state hold."""

    num_requests: int
    num_tokens: int
    """Tokens whose KV is on the device. KV that several requests share counts once for each."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """The use of an engine's KV memory at the end of a step."""

    running: KvHeld
    waiting: KvHeld
    idle: KvHeld
    """Streams that wait for their next chunk."""
    num_capacity: int
    """Capacity of the device, in tokens."""
    num_host: int
    """Tokens whose KV is in host memory or being copied there."""
    num_host_capacity: int
    """Capacity of host memory, in tokens."""

    @property
    def by_state(self) -> dict[str, KvHeld]:
        """KV held, by the state of the requests."""
        return {"running": self.running, "waiting": self.waiting, "idle": self.idle}


def read_records(path: str | Path) -> list[RequestRecord]:
    """Return the records in a file that an engine writes, in the order in which the requests ended.

    The file may still be growing: an incomplete last line is left out.

    :raises ConfigurationError: there is no such file, or a line of it is no record.
    """
    records: list[RequestRecord] = []
    try:
        lines = (line for line in split_lines(DecompressedFile(Path(path))) if line.endswith(b"\n"))
        records.extend(as_dataclass(RequestRecord, parse_json(line)) for line in lines)
    except OSError as error:
        raise ConfigurationError(f"records of requests cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}, line {len(records) + 1} is no record of a request: {error}") from error
    return records
