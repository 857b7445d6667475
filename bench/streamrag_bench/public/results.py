"""The result of the public benchmark on one engine: a versioned JSON file, which docs/public-benchmark.md describes."""

import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from streamrag.display_text import json_text
from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import parse_json, read_bytes
from streamrag.support.files import write_atomic
from streamrag.trace.events import LineError
from streamrag_bench.public.workload import PublicLoad
from streamrag_bench.summary import spread

BENCHMARK: Final = "streamrag-public"
FORMAT: Final = 1

EngineName: TypeAlias = Literal["streamrag", "vllm", "vllm-sessions", "server"]
"""Our engine; vLLM without streaming; vLLM's own streaming sessions; any server. The last one waits for retrieval."""
ShortText: TypeAlias = Annotated[str, Field(max_length=1_000)]
Time = Annotated[float, Field(ge=0, lt=1e9)]


class QueryTimes(BaseModel):
    """The times of one counted query, in seconds from its question; or, if it failed, the reason."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    id: ShortText
    seed: int
    retrieval_end_s: Time | None = None
    first_token_s: Time | None = None
    last_token_s: Time | None = None
    error: Annotated[str, Field(max_length=2_000)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "QueryTimes":
        """Raise ValueError unless there are either an error or all times, in order."""
        times = (self.retrieval_end_s, self.first_token_s, self.last_token_s)
        known = [time for time in times if time is not None]
        if len(known) != (3 if self.error is None else 0) or sorted(known[1:]) != known[1:]:
            raise ValueError(f"query {self.id!r} must have either an error or all three times, the last token last")
        return self


METRICS = {
    "first_token_after_retrieval_s": "first token, from the end of retrieval",
    "last_token_after_retrieval_s": "last token, from the end of retrieval",
    "first_token_s": "first token, from the question",
    "last_token_s": "last token, from the question",
}
"""The benchmark's metrics, in words."""


class PublicResult(BaseModel):
    """A result on one engine, with all seeds; docs/public-benchmark.md has the meaning of each field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: Literal["streamrag-public"] = BENCHMARK
    format: Literal[1] = FORMAT
    name: ShortText
    engine: EngineName
    is_simulated: bool
    hardware: ShortText
    """The hardware that ran the model, or that was simulated."""
    model: ShortText
    load: PublicLoad
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    num_contexts_cut: Annotated[int, Field(ge=0)] = 0
    num_short_answers: Annotated[int, Field(ge=0)] | None = 0
    provenance: dict[str, Any]
    queries: Annotated[tuple[QueryTimes, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> "PublicResult":
        """Raise ValueError unless there is each counted query of each seed, once."""
        num = self.load.num_queries - self.load.num_warm_up
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds {self.seeds!r} must be different")
        found = Counter(seed for seed, _ in {(query.seed, query.id) for query in self.queries})
        if len(self.queries) != num * len(self.seeds) or found != Counter(dict.fromkeys(self.seeds, num)):
            raise ValueError(f"{len(self.queries):,} queries; there must be {num:,} of each seed, with different ids")
        return self

    @property
    def num_failed(self) -> int:
        return sum(query.error is not None for query in self.queries)

    @property
    def kind(self) -> str:
        return "simulated" if self.is_simulated else "measured"

    def values(self, metric: str) -> list[float]:
        """Return a metric of all answered queries of all seeds."""
        token, after, _ = metric.partition("_after_retrieval")
        pairs = (
            (getattr(q, f"{token.removesuffix('_s')}_s"), q.retrieval_end_s if after else 0.0) for q in self.queries
        )
        return [token_s - start_s for token_s, start_s in pairs if token_s is not None and start_s is not None]

    def percentiles(self, metric: str) -> dict[str, float]:
        """Return P50, P95 and P99 of a metric, without those that fall on a failure, which counts as infinite."""
        found = spread([*self.values(metric), *[math.inf] * self.num_failed])
        return {name: value for name, value in found.items() if math.isfinite(value)}


def write_result(result: PublicResult, path: Path) -> None:
    """Write the result, with counts and percentiles for other readers, which `read_result` computes anew."""
    values = result.model_dump(mode="json")
    queries = values.pop("queries")
    summary = {metric: result.percentiles(metric) for metric in METRICS}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**values, "num_failed": result.num_failed, "summary": summary, "queries": queries}
    write_atomic(path, json_text(whole) + "\n")


def read_result(path: Path) -> PublicResult:
    """Read a result.

    :raises ConfigurationError: the file cannot be read, is no result of this benchmark, or has an unknown format.
    """
    try:
        values = parse_json(read_bytes(path))
        if not isinstance(values, dict) or values.get("benchmark") != BENCHMARK:
            raise ValueError(f'it has no "benchmark": "{BENCHMARK}"')
        if values.get("format") != FORMAT:
            found = str(values.get("format"))[:40]
            raise ValueError(f"it has format {found}, and this version reads only format {FORMAT}; run it again")
        return PublicResult.model_validate({k: v for k, v in values.items() if k not in ("num_failed", "summary")})
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise ConfigurationError(f"{path} is a broken result: {LineError(error, is_tagged=False)}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a result of `streamrag bench public`: {error}") from error
