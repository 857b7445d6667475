"""Random times at which queries arrive."""

from itertools import accumulate
from random import Random


def poisson_arrivals(seed: str, num_queries: int, qps: float) -> list[float]:
    """Return the seconds at which queries of a Poisson process arrive; another rate scales the same times."""
    rng = Random(seed)
    return [arrival / qps for arrival in accumulate(rng.expovariate(1.0) for _ in range(num_queries))]
