"""Fit the costs of steps and copies to measurements, as monotone and piecewise linear functions. Needs scipy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from streamrag.engine.costs.copy_costs import CopyPoint
from streamrag.engine.costs.step_profiles import StepPart, context_pairs, own_pairs
from streamrag.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """The costs of steps that a `TableProfile` is made from."""

    points: tuple[tuple[float, float], ...]
    pair_s: float
    own_pair_s: float
    request_s: float


def fit_table(measured: Sequence[tuple[Sequence[StepPart], float]], knots: Sequence[int]) -> FittedCosts:
    """Return the non-negative costs that fit the steps best, by least squares of relative errors.

    measured: the parts of each step, and its seconds.
    knots: two or more numbers of new tokens at which the base line may bend. Costs that the measurements do not tell
        apart, such as those of a request where all steps have one, go to the base line.
    """
    import numpy as np
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    ascending = sorted(set(knots))
    if len(ascending) < 2:
        raise ConfigurationError(f"fit_table: {len(ascending)} knots given; a line needs two or more")
    tells_requests = len({len(parts) for parts, _ in measured}) > 1
    rows, seconds = [], []
    for parts, step_s in measured:
        num_new = sum(new for new, _ in parts)
        # The base line is a start and ramps, all non-negative, so that more tokens never take less time.
        widths = [min(max(num_new - a, 0), b - a) for a, b in pairwise(ascending)]
        widths[-1] += max(num_new - ascending[-1], 0)
        rows.append([1.0, *widths, context_pairs(parts), own_pairs(parts), len(parts) * tells_requests])
        seconds.append(step_s)
    weights = 1 / np.asarray(seconds)
    matrix = np.asarray(rows, dtype=float) * weights[:, None]
    scales = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    solution = nnls(matrix / scales, np.ones(len(seconds)))[0] / scales
    start_s, *slopes, pair_s, own_pair_s, request_s = (float(v) for v in solution)
    points = [(float(ascending[0]), start_s)]
    for slope, (a, b) in zip(slopes, pairwise(ascending), strict=True):
        points.append((float(b), points[-1][1] + slope * (b - a)))
    return FittedCosts(tuple(points), pair_s, own_pair_s, request_s)


def fit_copies(measured: Mapping[int, Sequence[float]]) -> tuple[CopyPoint, ...]:
    """Return a point for each number of blocks, ascending: its median seconds, fitted so that they never fall."""
    from scipy.optimize import isotonic_regression

    blocks = sorted(measured)
    medians = [median(measured[num]) for num in blocks]
    weights = [1 / max(seconds, 1e-9) ** 2 for seconds in medians]
    fitted = isotonic_regression(medians, weights=weights).x
    return tuple((num, float(seconds)) for num, seconds in zip(blocks, fitted, strict=True))
