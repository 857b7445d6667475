"""The seconds of a step, from a profile of the engine's hardware.

parts of a step      (512 new tokens after 3,000), (1 after 900), ...
analytic profile     max(FLOPs / (peak x efficiency), bytes / bandwidth) + overhead
table profile        measured: piecewise linear in the new tokens, plus the cost of attention, plus a cost per request

A pair of two new tokens can cost less attention than a pair with an older token, because its KV need not be read.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from streamrag.engine.costs.copy_costs import CopyCosts, linear_copies
from streamrag.errors import ConfigurationError

StepPart: TypeAlias = tuple[int, int]
"""The share of one request in a step: its new tokens, and the tokens before them whose KV exists already."""


def context_pairs(parts: Sequence[StepPart]) -> float:
    """Return the number of pairs of a new token and a token before the step that it attends to."""
    return sum(num_new * num_context for num_new, num_context in parts)


def own_pairs(parts: Sequence[StepPart]) -> float:
    """Return the number of pairs of two new tokens of the same request."""
    return sum(num_new * num_new / 2 for num_new, _ in parts)


DEFAULT_BUDGET = 2_048
"""Tokens per step, by default."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine its FLOPs and bytes."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    head_dim: int
    weight_bytes: float
    """All weights."""
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class AnalyticProfile:
    """A profile by the roofline model.

    Matrix products take 2 FLOPs per parameter and token, attention 4 per pair, layer, head and dimension.
    """

    name: str
    device: str
    tensor_parallel_size: int
    model: ModelShape
    peak_flops: float
    """FLOPs per second of one device, dense."""
    efficiency: float
    """Share of the peak that a compute-bound step reaches."""
    bandwidth_bytes_per_s: float
    """Bandwidth of one device's memory."""
    overhead_s: float
    """Overhead of each step: launches, sampling, and scheduling that is not hidden."""
    kv_tokens: int
    """Capacity of the KV cache, in tokens; 0 if it is unknown."""
    block_size: int = 16
    """Tokens per KV block."""
    is_async: bool = True
    """Whether vLLM schedules a step while another one computes."""
    delivery_s: float = 0.0
    """Seconds that an answer takes in addition to its steps: from the client to the engine and back."""
    host_bandwidth_bytes_per_s: float | None = None
    """Bandwidth of one device's link to host memory, in each direction; None if the costs of copies are unknown."""
    host_latency_s: float = 0.0
    """Latency of each copy."""
    is_overlapped: bool = True
    """Whether the device computes while copies run."""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def copies(self) -> CopyCosts | None:
        """The costs of copies by bandwidth and latency, for one rank's share of a block; None without a bandwidth."""
        if self.host_bandwidth_bytes_per_s is None:
            return None
        # Each rank copies its share of a block over its own link, in parallel with the others.
        block_bytes = self.model.kv_bytes_per_token * self.block_size // self.tensor_parallel_size
        return linear_copies(
            block_bytes, self.host_bandwidth_bytes_per_s, self.host_latency_s, is_overlapped=self.is_overlapped
        )

    def step_s(self, parts: Sequence[StepPart]) -> float:
        """Return the seconds of a step with these parts, at least one: overhead and the longer of compute and reads."""
        model, num_devices = self.model, self.tensor_parallel_size
        num_new = sum(new for new, _ in parts)
        num_read = sum(context + new for new, context in parts)
        per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
        flops = 2 * model.num_params * num_new + per_pair * (context_pairs(parts) + own_pairs(parts))
        num_bytes = model.weight_bytes + model.kv_bytes_per_token * num_read
        compute_s = flops / (num_devices * self.peak_flops * self.efficiency)
        memory_s = num_bytes / (num_devices * self.bandwidth_bytes_per_s)
        return max(compute_s, memory_s) + self.overhead_s


@dataclass(frozen=True, slots=True)
class TableProfile:
    """A profile from measured steps: linear between two points, and extrapolated beyond the last."""

    name: str
    device: str
    points: tuple[tuple[float, float], ...]
    """(new tokens, seconds) of steps without context; at least two, ascending."""
    pair_s: float
    """Seconds for one pair of a new token and one before the step that it attends to."""
    request_s: float
    """Seconds for each request in a step."""
    kv_tokens: int
    block_size: int = 32
    is_async: bool = False
    delivery_s: float = 0.0
    own_pair_s: float | None = None
    """Seconds for one pair of new tokens; None if it is `pair_s`."""
    tensor_parallel_size: int = 1
    num_layers: int = 1
    copies: CopyCosts | None = None
    unsteadiness: tuple[float, ...] = ()
    """Factors by which each measured step took longer than others like it, in the order in which they ran: on a machine
    of varying speed, slow steps come in runs. Empty if unknown."""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = [num for num, _ in self.points]
        if len(tokens) < 2 or any(a >= b for a, b in pairwise(tokens)):
            raise ConfigurationError(f"profile {self.name!r}: points must be two or more, ascending; got {tokens}")

    def step_s(self, parts: Sequence[StepPart]) -> float:
        """Return the seconds of a step with these parts, at least one: for new tokens, pairs and requests."""
        num_new = sum(new for new, _ in parts)
        own_pair_s = self.pair_s if self.own_pair_s is None else self.own_pair_s
        attention_s = self.pair_s * context_pairs(parts) + own_pair_s * own_pairs(parts)
        return self._base_s(num_new) + attention_s + self.request_s * len(parts)

    def _base_s(self, num_new: int) -> float:
        """Return the seconds of `num_new` tokens without context, on the line through the two nearest points."""
        points = self.points
        right = min(max(bisect_left(points, (num_new,)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (num_new - x0) / (x1 - x0)


StepProfile: TypeAlias = AnalyticProfile | TableProfile
"""The costs of steps and copies on an engine's hardware."""


def recompute_s(
    profile: StepProfile, start: int, end: int, budget: int = DEFAULT_BUDGET, beside: Sequence[StepPart] = ()
) -> float:
    """Return the seconds that computing tokens [start, end) of one request adds to steps of at most `budget` tokens.

    beside: parts that each of these steps has anyway, such as a running batch. Without them a step would only compute
        the request's next token.

    :raises ConfigurationError: the parts beside leave no room in a step.
    """
    room = budget - sum(num_new for num_new, _ in beside)
    if room < 1:
        raise ConfigurationError(f"budget={budget}: {len(beside)} requests beside leave no room in a step")
    if end <= start:
        return 0.0
    if beside:
        without_s = profile.step_s(beside)
        return sum(profile.step_s([part, *beside]) - without_s for part in _chunks(start, end, room))
    return sum(profile.step_s([part]) for part in _chunks(start, end + 1, room)) - profile.step_s([(1, end)])


def _chunks(start: int, end: int, size: int) -> Iterator[StepPart]:
    for num_before in range(start, end, size):
        yield min(size, end - num_before), num_before
