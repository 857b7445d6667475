"""A cell: one load on one engine with one set of settings, and its result."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from streamrag.engine.eviction import EvictionMode
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.errors import ConfigurationError
from streamrag.records import RequestRecord
from streamrag.support.validation import Count, Positive, validated

Clock: TypeAlias = Literal["virtual", "wall"]
"""Virtual time comes from a hardware profile; wall time from a real engine. No cell mixes them."""
Arm: TypeAlias = Literal["no-streaming", "warming", "stock-sessions", "streaming"]
"""A client's way to use chunks that arrive over time: wait for all of them; warm the prefix cache; use the sessions of
vLLM's own scheduler, which can only append; stream into ours."""
ARMS: tuple[Arm, ...] = get_args(Arm)

CellProgress: TypeAlias = Callable[[int, int], None]
"""Called with how many requests of a cell have been answered, and of how many."""


@validated
@dataclass(frozen=True, slots=True)
class CellSettings:
    """All that a cell's result depends on, beside versions and the machine.

    :raises ConfigurationError: a value that no cell could run with.
    """

    clock: Clock
    workload: str
    """"crawler", "anns" or "anns-last" (generated), or the path of a trace."""
    arm: Arm
    policy: str = DEFAULT_POLICY
    """For the streaming arm; see `streamrag.engine.make_policy`."""
    eviction: EvictionMode = "recompute"
    """For the streaming arm; the others run vLLM's own scheduler, which recomputes."""
    host_kv_bytes: Count | None = None
    """Host memory for KV, of each worker; None for the scheduler's own choice. Not with "recompute"."""
    qps: Positive | None = None
    """Poisson arrivals, open loop, per second; None for the trace's own arrivals."""
    delay: Positive = 1.0
    """Factor of every gap between the chunks of a query."""
    kv_tokens: Count | None = None
    """Capacity of the KV cache; None for the profile's, or the engine's own choice."""
    seed: int = 1
    num_queries: Count | None = None
    """None for all that the trace has."""
    num_output_tokens: Count = 1
    profile: str | None = None
    """Name or path of a hardware profile, in virtual time."""
    model: str | None = None
    """Folder or name of a model, in wall time."""
    max_num_batched_tokens: Count | None = None
    """Token budget of a step; None for the workload's published one."""
    max_num_seqs: Count = 256
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further options of our scheduler, by name; see `streamrag.backends.vllm.options.SchedulerOptions`."""
    max_context_tokens: Count | None = None
    """Budget of a context, as in a pipeline: chunks that do not fit are left out. None for what the model's length has
    room for."""
    has_prefix_cache: bool = True
    """Whether the engine has a prefix cache; False in virtual time only. Without, KV is only recomputed: host memory is
    known by the prefix cache's hashes."""

    def __post_init__(self) -> None:
        check_clock(self.clock, self.profile, self.model)


def check_clock(clock: Clock, profile: str | None, model: str | None) -> None:
    """Look at whether a profile or a model is given for the other clock.

    :raises ConfigurationError: it is.
    """
    if clock == "virtual" and model is not None:
        raise ConfigurationError(f"model={model!r} is for wall time; virtual time takes a hardware profile")
    if clock == "wall" and profile is not None:
        raise ConfigurationError(f"profile={profile!r} is for virtual time; wall time takes a model")


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of a query of the load. Times are seconds on the cell's clock, which starts at 0."""

    query_id: str
    arrival_s: float
    retrieval_end_s: float
    """When the last chunk was there."""
    first_token_s: float
    finished_s: float
    num_chunks: int
    floor_s: float
    """The `ttft_after_retrieval_s` of the query if it were alone on the engine."""
    record: RequestRecord | None = None
    """The engine's record, on the same clock; None from engines that keep none."""

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
    """A step of the engine."""

    start_s: float
    end_s: float
    num_tokens: int
    num_requests: int
    parts: tuple[StepPart, ...] = ()
    """Parts of the step, a request each; empty from engines that do not tell."""


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
    """Totals of what was copied between device and host in a cell, by all ranks together."""

    num_blocks_saved: int = 0
    num_blocks_loaded: int = 0
    num_bytes_out: int = 0
    num_bytes_in: int = 0
    out_s: float = 0.0
    """Time in which blocks were copied to the host."""
    in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell."""

    settings: CellSettings
    requests: tuple[RequestResult, ...]
    busy_s: float
    """Time in which the engine computed."""
    completion_s: float
    """When the last request ended."""
    wall_s: float
    """Seconds that the run took, on the wall clock."""
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
