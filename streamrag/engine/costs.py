"""How long a step of an engine takes, from a profile of its hardware: a JSON file that says where it comes from.

parts of a step      (512 new tokens after 3,000), (1 after 900), ...
analytic profile     max(FLOPs / (peak x efficiency), bytes / bandwidth) + overhead
table profile        measured: piecewise linear in the tokens, plus what attention costs, plus so much a request

Attention of new tokens to each other can cost less a pair than to what was there before: its KV is at hand.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from streamrag.errors import ConfigurationError, MissingDependencyError

__all__ = [
    "AnalyticProfile",
    "FittedCosts",
    "ModelShape",
    "Part",
    "StepProfile",
    "TableProfile",
    "fit_table",
    "load_profile",
    "profile_names",
    "save_profile",
]

Part: TypeAlias = tuple[int, int]
"""What one request computes in a step: its new tokens, and the tokens before them whose KV is there already."""


class StepProfile(Protocol):
    """What a simulated engine knows of its hardware."""

    @property
    def name(self) -> str: ...
    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    @property
    def is_async(self) -> bool:
        """Whether vLLM schedules one step while another computes there."""

    @property
    def delivery_s(self) -> float:
        """What an answer takes beside the steps: from the client to the engine and back."""

    @property
    def provenance(self) -> Mapping[str, Any]: ...
    def step_s(self, parts: Sequence[Part]) -> float:
        """Seconds of a step with these parts, of which there is at least one."""


def context_pairs(parts: Sequence[Part]) -> float:
    """Pairs of a new token and one before the step that it attends to, in all parts."""
    return sum(num_new * num_context for num_new, num_context in parts)


def own_pairs(parts: Sequence[Part]) -> float:
    """Pairs of two new tokens, of which the later attends to the earlier, in all parts."""
    return sum(num_new * num_new / 2 for num_new, _ in parts)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model costs: FLOPs and bytes."""

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
    """A roofline. Matrix products take 2 FLOPs a parameter and token; attention 4 a pair, layer, head and dimension."""

    name: str
    device: str
    tensor_parallel_size: int
    model: ModelShape
    peak_flops: float
    """Of one device, dense, per second."""
    efficiency: float
    """Share of the peak that a step reaches when it is bound by compute."""
    bandwidth_bytes_per_s: float
    """Of one device's memory."""
    overhead_s: float
    """Of each step: launches, sampling, what the scheduler does not hide."""
    kv_tokens: int
    block_size: int = 16
    is_async: bool = True
    delivery_s: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def step_s(self, parts: Sequence[Part]) -> float:
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
    """Measured steps. Between two points the time is linear in the tokens; beyond the last it goes on as it was."""

    name: str
    device: str
    points: tuple[tuple[float, float], ...]
    """(new tokens in the step, seconds) of steps without context, at least two, ascending."""
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
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = [num for num, _ in self.points]
        if len(tokens) < 2 or any(a >= b for a, b in pairwise(tokens)):
            raise ConfigurationError(f"profile {self.name!r}: points must be two or more, ascending; got {tokens}")

    def step_s(self, parts: Sequence[Part]) -> float:
        num_new = sum(new for new, _ in parts)
        own_pair_s = self.pair_s if self.own_pair_s is None else self.own_pair_s
        attention_s = self.pair_s * context_pairs(parts) + own_pair_s * own_pairs(parts)
        return self._base_s(num_new) + attention_s + self.request_s * len(parts)

    def _base_s(self, num_new: int) -> float:
        points = self.points
        right = min(max(bisect_left(points, (num_new,)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (num_new - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """What a `TableProfile` says of steps."""

    points: tuple[tuple[float, float], ...]
    pair_s: float
    own_pair_s: float
    request_s: float


def fit_table(measured: Sequence[tuple[Sequence[Part], float]], knots: Sequence[int]) -> FittedCosts:
    """The costs that fit best: least squares of relative errors, no cost below zero.

    `measured` holds steps with their seconds, `knots` the tokens at which the line may bend. Costs that the
    measurements do not tell apart (all steps with one request, say) go to the base line. Needs scipy.
    """
    try:
        import numpy as np
        from scipy.optimize import nnls  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError("scipy", "pip install scipy") from error
    ascending = sorted(set(knots))
    if len(ascending) < 2:
        raise ConfigurationError(f"fit_table: {len(ascending)} knots given; a line needs two or more")
    rows, seconds = [], []
    for parts, step_s in measured:
        num_new = sum(new for new, _ in parts)
        # The line as a start and ramps, each non-negative: more tokens never take less time.
        widths = [min(max(num_new - a, 0), b - a) for a, b in pairwise(ascending)]
        widths[-1] += max(num_new - ascending[-1], 0)
        rows.append([1.0, *widths, context_pairs(parts), own_pairs(parts), len(parts) - 1])
        seconds.append(step_s)
    weights = 1 / np.asarray(seconds)
    matrix = np.asarray(rows, dtype=float) * weights[:, None]
    scales = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found = nnls(matrix / scales, np.ones(len(seconds)))[0] / scales
    start_s, *slopes = (float(v) for v in found[:-3])
    pair_s, own_pair_s, request_s = (float(v) for v in found[-3:])
    points = [(float(ascending[0]), start_s - request_s)]
    for slope, (a, b) in zip(slopes, pairwise(ascending), strict=True):
        points.append((float(b), points[-1][1] + slope * (b - a)))
    return FittedCosts(tuple(points), pair_s, own_pair_s, request_s)


def profile_names() -> list[str]:
    """The shipped profiles."""
    folder = resources.files("streamrag.engine") / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_profile(name_or_path: str) -> StepProfile:
    """A shipped profile by its name, or one from a file.

    :raises ConfigurationError: there is none of that name, or the file is no profile.
    """
    if name_or_path in profile_names():
        text = (resources.files("streamrag.engine") / "profiles" / f"{name_or_path}.json").read_text()
    elif Path(name_or_path).is_file():
        text = Path(name_or_path).read_text()
    else:
        raise ConfigurationError(f"no profile {name_or_path!r}: give a file, or one of {', '.join(profile_names())}")
    try:
        return _from_dict(json.loads(text))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{name_or_path} is no hardware profile: {error}") from error


def save_profile(profile: AnalyticProfile | TableProfile, path: Path) -> None:
    """Write `profile` so that `load_profile` reads it."""
    kind = "analytic" if isinstance(profile, AnalyticProfile) else "table"
    path.write_text(json.dumps({"kind": kind, **asdict(profile)}, indent=2) + "\n")


def _from_dict(values: Any) -> StepProfile:
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    kind = values.get("kind")
    rest = {key: value for key, value in values.items() if key != "kind"}
    if kind == "analytic":
        return AnalyticProfile(**{**rest, "model": ModelShape(**values["model"])})
    if kind == "table":
        return TableProfile(**{**rest, "points": tuple((x, y) for x, y in values["points"])})
    raise ValueError(f'its "kind" is {kind!r}, not "analytic" or "table"')
