"""A cell: one load, replayed on one engine with one set of settings; and its result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.engine.recompute_or_swap import EvictionMode
from streamrag.errors import ConfigurationError
from streamrag.records import RequestRecord
from streamrag.support.validation import Count, Positive, validated

CellClock: TypeAlias = Literal["virtual", "wall"]
"""Virtual time is predicted by a hardware profile; wall time is measured on a real engine."""
Arm: TypeAlias = Literal["no-streaming", "warming", "stock-sessions", "streaming"]
"""A client's strategy for chunks that arrive over time; see `streamrag_bench.arms`."""
ARMS: tuple[Arm, ...] = get_args(Arm)

CellProgress: TypeAlias = Callable[[int, int], None]
"""Called with the number of answered requests of a cell, and the number of all its requests."""


@validated
@dataclass(frozen=True, slots=True)
class CellSettings:
    """The settings of a cell. Its result depends on them, on the package versions, and in wall time on the machine.

    :raises ConfigurationError: a value is invalid.
    """

    clock: CellClock
    workload: str
    """"crawler", "anns" or "anns-last" (generated), or the path of a trace."""
    arm: Arm
    policy: str = DEFAULT_POLICY
    """Scheduling policy of the streaming arm; see `streamrag.engine.make_policy`."""
    eviction: EvictionMode = "recompute"
    """Eviction of the streaming arm; the other arms run vLLM's own scheduler, which recomputes."""
    host_kv_bytes: Count | None = None
    """Host memory for KV per worker; None for the scheduler's default. Not with "recompute"."""
    qps: Positive | None = None
    """Rate of Poisson arrivals (open loop), per second; None for the trace's own arrivals."""
    delay: Positive = 1.0
    """Factor that multiplies each gap between the chunks of a query."""
    kv_tokens: Count | None = None
    """Capacity of the KV cache; None for the profile's capacity, or the engine's default."""
    seed: int = 1
    num_queries: Count | None = None
    """Number of queries to replay; None for all queries of the trace."""
    num_output_tokens: Count = 1
    profile: str | None = None
    """Name or path of a hardware profile, in virtual time."""
    model: str | None = None
    """Folder or name of a model, in wall time."""
    max_num_batched_tokens: Count | None = None
    """Token budget of a step; None for the workload's published budget."""
    max_num_seqs: Count = 256
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More options of our scheduler, by name; see `streamrag.backends.vllm.scheduler_options.EngineOptions`."""
    max_context_tokens: Count | None = None
    """Token budget of a context, as in a pipeline: chunks that do not fit are left out. None for the most that the
    model's length allows."""
    has_prefix_cache: bool = True
    """Whether the engine has a prefix cache; False in virtual time only, and only with eviction "recompute"."""

    def __post_init__(self) -> None:
        check_clock(self.clock, self.profile, self.model)


def check_clock(clock: CellClock, profile: str | None, model: str | None) -> None:
    """Raise ConfigurationError if a model is given for virtual time, or a profile for wall time."""
    if clock == "virtual" and model is not None:
        raise ConfigurationError(f"model={model!r} is for wall time; virtual time takes a hardware profile")
    if clock == "wall" and profile is not None:
        raise ConfigurationError(f"profile={profile!r} is for virtual time; wall time takes a model")


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of one query. Times are seconds on the cell's clock, which starts at 0."""

    query_id: str
    arrival_s: float
    retrieval_end_s: float
    """Time at which retrieval ended and the complete prompt arrived."""
    first_token_s: float
    finished_s: float
    num_chunks: int
    floor_s: float
    """The query's `ttft_after_retrieval_s` on an otherwise idle engine."""
    record: RequestRecord | None = None
    """The engine's record, on the same clock; None if the engine keeps no records."""

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def ttft_after_retrieval_s(self) -> float:
        return self.first_token_s - self.retrieval_end_s


@dataclass(frozen=True, slots=True)
class StepPart:
    """The tokens that a step computed for one request."""

    query_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    start_s: float
    end_s: float
    num_tokens: int
    num_requests: int
    parts: tuple[StepPart, ...] = ()
    """Tokens per request; empty if the engine does not report them."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A copy of one request's KV between device and host, within one step."""

    query_id: str
    direction: Literal["to-host", "to-device"]
    start_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CopyTotals:
    """Totals of the copies between device and host in a cell, summed over all ranks."""

    num_blocks_saved: int = 0
    num_blocks_loaded: int = 0
    num_bytes_out: int = 0
    num_bytes_in: int = 0
    out_s: float = 0.0
    """Seconds spent on copies to the host."""
    in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellResult:
    settings: CellSettings
    requests: tuple[RequestResult, ...]
    busy_s: float
    """Seconds during which the engine computed."""
    completion_s: float
    """Time at which the last request ended."""
    wall_s: float
    """Duration of the run on the wall clock, in seconds."""
    steps: tuple[StepResult, ...] = ()
    """Steps of the engine; empty unless requested, because there are many."""
    copies: tuple[CopyResult, ...] = ()
    """Copies of KV; empty unless steps were requested."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Versions, device, profile and KV capacity."""
    num_unfinished: int = 0
    """Number of unanswered queries: vLLM's own sessions can deadlock when KV memory is short."""
    copy_totals: CopyTotals | None = None
    """Totals of the copies; None without host memory for KV, or if the engine does not report them."""
