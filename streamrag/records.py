"""What an engine did with one request, and when. All times are seconds on one monotonic clock of the host.

`time.monotonic`, which on Linux all processes of a host share: times of the client and of the engine can be compared.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import Unpacked, as_dataclass, lines_of, parse_json

Outcome: TypeAlias = Literal["finished", "aborted", "failed"]
"""Aborted: the client had enough, or went away. Failed: the engine refused it, or gave it up."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk that was taken in. One that the engine refused has no record: it failed the request."""

    arrival_s: float
    num_tokens: int
    """Length of the prompt that it made."""
    num_shared: int
    """Leading tokens shared with the prompt before: the LCP."""
    num_computed: int
    """Tokens of the prompt before that were computed, or being computed, when it came."""

    @property
    def num_invalidated(self) -> int:
        """Computed tokens past the LCP, whose KV is no longer valid."""
        return max(self.num_computed - self.num_shared, 0)


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """KV that was taken away to make room."""

    at_s: float
    fate: str
    """"recompute": it was dropped; "swap": what others overwrite of it is copied to host memory."""
    num_tokens_lost: int
    """Tokens of prompt and answer whose KV was lost. What nobody has overwritten is found again."""
    recompute_s: float = 0.0
    """Seconds that computing it again was expected to take; 0 if nothing was compared."""
    swap_s: float = 0.0
    """Seconds that copying it out and back was expected to take."""
    num_tokens_saved: int = 0
    """Lost tokens that others were about to overwrite, and that were copied to host memory before."""
    expected_save_s: float = 0.0
    """Seconds that these copies were expected to take when they were sent."""
    save_s: float = 0.0
    """Seconds that they took; also 0 if nobody has measured it."""


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """A request that had lost KV runs again, and gets it back one way or the other."""

    at_s: float
    choice: str
    """"swap": it is copied back from host memory; "recompute": it is computed again."""
    num_tokens: int
    """Tokens that there was a choice for: those that host memory has, past what the prefix cache still has. If it has
    none, all that were lost in whole blocks."""
    recompute_s: float
    """Seconds that computing them again was expected to take."""
    swap_s: float | None
    """Seconds that copying them was expected to take; None if host memory had nothing."""
    observed_s: float | None
    """Seconds that it took: to copy them, or the share that computing them had in their steps. None if not measured, or
    if the request was evicted again, changed or ended before."""

    @property
    def expected_s(self) -> float:
        """Seconds that the chosen way was expected to take."""
        return self.swap_s if self.choice == "swap" and self.swap_s is not None else self.recompute_s


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of a request, streamed or plain, from arrival to end. Source of the event names: arXiv 2604.16395."""

    request_id: str
    """The engine's id for it: the client's and a few random characters."""
    outcome: Outcome
    is_stream: bool
    """False for a plain request, whose prompt came in one piece."""
    arrival_s: float
    """When the client submitted it. For a plain request vLLM knows it only on the wall clock, so it is converted."""
    queued_s: float
    """When the scheduler saw it first."""
    scheduled_s: float | None
    """When the first step that computes some of it was planned. None if there was none; the next two likewise."""
    first_kv_s: float | None
    """When the first of its KV was on the device, computed or from the prefix cache."""
    last_kv_s: float | None
    """When the KV of its complete prompt was on the device, for the first time."""
    finished_s: float
    num_prompt_tokens: int
    """Tokens of the last prompt that was taken in."""
    num_output_tokens: int
    num_computed: int
    """Prompt tokens computed, all in all."""
    num_recomputed: int
    """Computed tokens whose KV had been there before, and which no update had invalidated: lost to a preemption, or
    beyond the last block that an update could keep."""
    num_invalidated: int
    """Computed tokens that updates made useless: the sum over the chunks."""
    num_from_cache: int
    """Prompt tokens served by the prefix cache."""
    chunks: tuple[ChunkRecord, ...] = ()
    """Chunks in order of arrival; empty for a plain request."""
    preemptions: tuple[PreemptionRecord, ...] = ()
    num_loaded: int = 0
    """Prompt tokens that came back from host memory."""
    num_written_through: int = 0
    """Prompt tokens that were copied to host memory while the request held them, in idle copy time. What was copied
    when it had lost them is in `preemptions`."""
    restores: tuple[RestoreRecord, ...] = ()
    """Restores in order of time; only from engines with host memory."""
    holds: Mapping[str, int] = field(default_factory=dict)
    """Steps in which it got nothing, by the name of the scheduling rule that held it back. Counted where the
    scheduler's `records` option names a file."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RequestRecord":
        """The record that `as_dict` made."""
        chunks = tuple(ChunkRecord(**chunk) for chunk in values["chunks"])
        preemptions = tuple(PreemptionRecord(**preemption) for preemption in values["preemptions"])
        restores = tuple(RestoreRecord(**restore) for restore in values.get("restores", ()))
        return cls(**{**values, "chunks": chunks, "preemptions": preemptions, "restores": restores})


@dataclass(frozen=True, slots=True)
class KvHeld:
    """The KV on the device that some of an engine's requests hold."""

    num_requests: int
    num_tokens: int
    """Tokens whose KV is on the device. What several requests share counts for each of them."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """The use of an engine's KV memory at the end of a step."""

    running: KvHeld
    waiting: KvHeld
    idle: KvHeld
    """Streams that wait for their next chunk."""
    num_capacity: int
    """Tokens whose KV the device has room for."""
    num_host: int
    """Tokens whose KV is in host memory, or is being copied there."""
    num_host_capacity: int
    """Tokens whose KV host memory has room for."""

    @property
    def by_state(self) -> dict[str, KvHeld]:
        """KV held, by the name of the requests' state."""
        return {"running": self.running, "waiting": self.waiting, "idle": self.idle}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "KvUse":
        """Return the object that `asdict` made `values` from."""
        held = {name: KvHeld(**values[name]) for name in ("running", "waiting", "idle")}
        return cls(**{**values, **held})


def read_records(path: str | Path) -> list[RequestRecord]:
    """The records in a file that an engine writes, in the order in which the requests ended.

    The file may still be written: a last line that is not complete is left out.

    :raises ConfigurationError: there is no such file, or a line of it is no record.
    """
    records: list[RequestRecord] = []
    try:
        lines = (line for line in lines_of(iter(Unpacked(Path(path)))) if line.endswith(b"\n"))
        records.extend(as_dataclass(RequestRecord, parse_json(line)) for line in lines)
    except OSError as error:
        raise ConfigurationError(f"records of requests cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}, line {len(records) + 1} is no record of a request: {error}") from error
    return records
