"""A cell: one load on one engine with one set of settings, and what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from streamrag.engine.eviction import EvictionMode
from streamrag.records import RequestRecord

Arm: TypeAlias = Literal["no-streaming", "warming", "stock-sessions", "streaming"]
ARMS: tuple[Arm, ...] = ("no-streaming", "warming", "stock-sessions", "streaming")
"""What a client may do with chunks that arrive over time: wait for all of them; warm the prefix cache; use the sessions
of vLLM's own scheduler, which can only append; stream into ours."""

CellProgress: TypeAlias = Callable[[int, int], None]
"""Called with how many requests of a cell have been answered, and of how many."""


@dataclass(frozen=True, slots=True)
class CellSettings:
    """All that a cell's result depends on, beside versions and the machine."""

    clock: Literal["virtual", "wall"]
    """Virtual time comes from a hardware profile; wall time from a real engine. No cell mixes them."""
    workload: str
    """"crawler", "anns" or "anns-last" (generated), or the path of a trace."""
    arm: Arm
    policy: str = "fcfs"
    """For the streaming arm; see `streamrag.engine.make_policy`."""
    eviction: EvictionMode = "recompute"
    """For the streaming arm; the others run vLLM's own scheduler, which recomputes."""
    host_kv_bytes: int | None = None
    """Host memory for KV, of each worker; None for the scheduler's own choice. Not with "recompute"."""
    qps: float | None = None
    """Poisson arrivals, open loop, per second; None for the trace's own arrivals."""
    delay: float = 1.0
    """Multiplies every gap between the chunks of a query."""
    kv_tokens: int | None = None
    """Capacity of the KV cache; None for the profile's, or the engine's own choice."""
    seed: int = 1
    num_queries: int | None = None
    """None for all that the trace has."""
    num_output_tokens: int = 1
    profile: str | None = None
    """Name or path of a hardware profile, in virtual time."""
    model: str | None = None
    """Folder or name of a model, in wall time."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None for the workload's published one."""
    max_num_seqs: int = 256
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further options of our scheduler, by name; see `streamrag.backends.vllm.options.SchedulerOptions`."""
    max_context_tokens: int | None = None
    """As in a pipeline: chunks that do not fit are left out. None for what the model's length has room for."""
    has_prefix_cache: bool = True
    """In virtual time only. Without, KV is only recomputed: host memory is known by the prefix cache's hashes."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One query of the load. Times are seconds on the cell's clock, which starts at 0."""

    query_id: str
    arrival_s: float
    retrieval_end_s: float
    """When its last chunk was there."""
    first_token_s: float
    finished_s: float
    num_chunks: int
    floor_s: float
    """Its `ttft_after_retrieval_s` if it were alone on the engine."""
    record: RequestRecord | None = None
    """What the engine did, on the same clock; None from engines that do not tell."""

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def ttft_after_retrieval_s(self) -> float:
        return self.first_token_s - self.retrieval_end_s


@dataclass(frozen=True, slots=True)
class StepPart:
    """What a step computed for one request."""

    query_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of the engine."""

    start_s: float
    end_s: float
    num_tokens: int
    num_requests: int
    parts: tuple[StepPart, ...] = ()
    """One a request that was in it; empty from engines that do not tell."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """KV of one request, copied between device and host in one step."""

    query_id: str
    direction: Literal["to-host", "to-device"]
    start_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CopyTotals:
    """What was copied between device and host in a cell, by all ranks together."""

    num_blocks_saved: int = 0
    num_blocks_loaded: int = 0
    num_bytes_out: int = 0
    num_bytes_in: int = 0
    out_s: float = 0.0
    """Time in which blocks were copied to the host."""
    in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellResult:
    """What came of a cell."""

    settings: CellSettings
    requests: tuple[RequestResult, ...]
    busy_s: float
    """Time in which the engine computed."""
    completion_s: float
    """When the last request ended."""
    wall_s: float
    """How long the run took, on the wall clock."""
    steps: tuple[StepResult, ...] = ()
    """Kept on request only: there are many."""
    copies: tuple[CopyResult, ...] = ()
    """Kept with the steps."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Versions, device, profile, capacity."""
    num_unfinished: int = 0
    """Queries that the engine never answered: vLLM's own sessions can stand still for ever when memory is short."""
    copy_totals: CopyTotals | None = None
    """None where there is no host memory for KV, or the engine does not tell."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
