"""Summaries of cell results: percentiles, service-level objectives, and the figures that reports need."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from streamrag.engine.recompute_or_swap import FATES
from streamrag.errors import ConfigurationError
from streamrag_bench.cell import CellResult, CellSettings, CopyTotals, RequestResult

PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

LIMITS = ("ttft_after_retrieval_s", "ttft_s", "total_s")
"""Times of a request that a service-level objective may limit; `total_s` is from arrival to the last token."""

Slos: TypeAlias = Mapping[str, float]
"""Service-level objectives: the maximum in seconds of each named time."""


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the `fraction` quantile (0 to 1) of `values`, with linear interpolation; NaN without values.

    Source: method 7 of Hyndman and Fan 1996, numpy's default.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    if position == below:  # also if the next value is infinite
        return ordered[below]
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (position - below)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return P50, P95 and P99 of the values, by name."""
    ordered = sorted(values)
    return {name: percentile(ordered, fraction) for name, fraction in PERCENTILES.items()}


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def parse_slos(text: str) -> dict[str, float]:
    """Parse service-level objectives, such as `"ttft_after_retrieval_s=0.5,total_s=30"` or `""`, to seconds by name.

    :raises ConfigurationError: a name is unknown or given twice, or a limit is not a positive, finite number.
    """
    slos: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, limit = part.partition("=")
        if name in slos:
            raise ConfigurationError(f"SLO {part!r}: {name} has a limit already, {slos[name]:g} seconds; give it once")
        with suppress(ValueError):
            slos[name] = float(limit)
        if name not in LIMITS or not 0 < slos.get(name, 0.0) < math.inf:
            raise ConfigurationError(
                f"SLO {part!r} must be NAME=SECONDS, with a finite number above 0 and a name of {', '.join(LIMITS)}"
            )
    return slos


@dataclass(frozen=True, slots=True)
class Digest:
    """The part of a result that a report needs. Tuples have one value per request unless documented otherwise."""

    settings: CellSettings
    query_ids: tuple[str, ...]
    ttft_after_retrieval_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    total_s: tuple[float, ...]
    floor_s: tuple[float, ...]
    retrieval_s: tuple[float, ...]
    num_chunks: tuple[int, ...]
    gaps_s: tuple[float, ...]
    """Seconds between consecutive chunks of a request, for all requests; empty without engine records."""
    num_tokens: tuple[int, ...]
    """Tokens of the complete prompts; empty without engine records, as are the next two."""
    num_invalidated: tuple[int, ...]
    num_recomputed: tuple[int, ...]
    num_preemptions: Mapping[str, int] | None
    """Number of preemptions, by the fate of the KV; None without engine records."""
    num_tokens_lost: int
    """Number of tokens whose KV was lost in preemptions."""
    num_computed: int
    """Number of computed prompt tokens."""
    num_taxed: int
    """Number of prompt tokens that were recomputed because of preemption."""
    num_loaded: int
    """Number of prompt tokens whose KV was loaded from host memory."""
    busy_s: float
    completion_s: float
    wall_s: float
    num_unfinished: int = 0
    """Number of unanswered queries, which the other figures exclude."""
    copy_totals: CopyTotals | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recompute_tax(self) -> float:
        """Share of the computed tokens that were recomputed because of preemption."""
        return self.num_taxed / self.num_computed if self.num_computed else math.nan

    @property
    def speed(self) -> float:
        """Seconds of the cell's clock per second of the wall clock."""
        return self.completion_s / self.wall_s if self.wall_s > 0 else math.nan

    def goodput(self, slos: Slos) -> float | None:
        """Return how many requests per second of the cell's time met every objective; None without objectives."""
        if not slos:
            return None
        met = zip(*([v <= limit for v in getattr(self, name)] for name, limit in slos.items()), strict=True)
        return sum(map(all, met)) / self.completion_s if self.completion_s > 0 else 0.0


def digest(result: CellResult) -> Digest:
    """Return a result's values per request and its totals, without steps. Sums are 0 without engine records."""
    requests = result.requests
    records = [r.record for r in requests if r.record is not None]
    preemptions = [p for record in records for p in record.preemptions]
    return Digest(
        settings=result.settings,
        query_ids=tuple(r.query_id for r in requests),
        ttft_after_retrieval_s=tuple(r.ttft_after_retrieval_s for r in requests),
        ttft_s=tuple(r.ttft_s for r in requests),
        total_s=tuple(r.finished_s - r.arrival_s for r in requests),
        floor_s=tuple(r.floor_s for r in requests),
        retrieval_s=tuple(r.retrieval_end_s - r.arrival_s for r in requests),
        num_chunks=tuple(r.num_chunks for r in requests),
        gaps_s=tuple(gap for r in requests for gap in _gaps(r)),
        num_tokens=tuple(record.num_prompt_tokens for record in records),
        num_invalidated=tuple(record.num_invalidated for record in records),
        num_recomputed=tuple(record.num_recomputed for record in records),
        num_preemptions=(
            {**dict.fromkeys(reversed(FATES), 0), **Counter(p.fate for p in preemptions)} if records else None
        ),
        num_tokens_lost=sum(p.num_tokens_lost for p in preemptions),
        num_computed=sum(record.num_computed for record in records),
        # Without preemption, recomputed tokens are the rest of a block that an update invalidated in part.
        num_taxed=sum(record.num_recomputed for record in records if record.preemptions),
        num_loaded=sum(record.num_loaded for record in records),
        busy_s=result.busy_s,
        completion_s=result.completion_s,
        wall_s=result.wall_s,
        num_unfinished=result.num_unfinished,
        copy_totals=result.copy_totals,
        provenance=result.provenance,
    )


def _gaps(request: RequestResult) -> list[float]:
    """Return the seconds between the request's chunks; none without an engine record."""
    if request.record is None:
        return []
    # The record's last entry may be the end of the prompt, without a chunk.
    arrivals = [chunk.arrival_s for chunk in request.record.chunks][: request.num_chunks]
    return [later - earlier for earlier, later in pairwise(arrivals)]


def summarise(digest: Digest, slos: Slos) -> dict[str, Any]:
    """Return a cell's settings, TTFTs, totals, goodput and provenance for `--json`; None stands for unknown figures."""
    after, floor = spread(digest.ttft_after_retrieval_s), spread(digest.floor_s)
    has_records = digest.num_preemptions is not None
    return {
        "settings": asdict(digest.settings),
        "is_simulated": digest.settings.clock == "virtual",
        "num_requests": len(digest.ttft_s),
        "num_unfinished": digest.num_unfinished,
        "ttft_after_retrieval_s": _finite({**after, **_max_and_mean(digest.ttft_after_retrieval_s)}),
        "ttft_s": _finite({**spread(digest.ttft_s), **_max_and_mean(digest.ttft_s)}),
        "floor_s": _finite(floor),
        "ratio_to_floor": _finite({name: ratio(after[name], floor[name]) for name in PERCENTILES}),
        "num_preemptions": digest.num_preemptions,
        "num_tokens_invalidated": sum(digest.num_invalidated) if has_records else None,
        "num_tokens_recomputed": sum(digest.num_recomputed) if has_records else None,
        "recompute_tax": _or_none(digest.recompute_tax) if has_records else None,
        "num_tokens_loaded": digest.num_loaded if has_records else None,
        "copies": asdict(digest.copy_totals) if digest.copy_totals else None,
        "busy_s": digest.busy_s,
        "completion_s": digest.completion_s,
        "wall_s": digest.wall_s,
        "simulated_s_per_wall_s": _or_none(digest.speed) if digest.settings.clock == "virtual" else None,
        "goodput": digest.goodput(slos),
        "provenance": dict(digest.provenance),
    }


def _max_and_mean(values: Sequence[float]) -> dict[str, float]:
    return {"max": max(values, default=math.nan), "mean": mean(values)}


def ratio(value: float, reference: float) -> float:
    """Return `value / reference`; NaN unless the reference is positive."""
    return value / reference if reference > 0 else math.nan


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _or_none(value) for name, value in values.items()}


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
