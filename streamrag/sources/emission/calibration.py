"""A calibration counts over many queries at which stage results become final, and yields probabilities.

    left            number of stages left, `num_chunks` of the hint: 3 ─▶ 2 ─▶ 1 ─▶ 0 ─▶ end
    stable          number of earlier stages for which this part of the result has been the same

A source sends no event at a stage that changes nothing: the result at such a stage is that of the last event.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import parse_json, read_bytes
from streamrag.support.files import write_atomic
from streamrag.support.validation import describe

FORMAT = "streamrag-calibration"
VERSION = 1
MAX_STAGES = 64
MAX_LENGTH = 64
"""Length of the longest prefix that is counted; beyond it, only the set of all passages and their order are."""
MAX_STABLE = 8  # largest number of stable stages; it stands for all larger ones
MAX_NUM = 1_000_000  # largest number of queries
MAX_TIMES = 16  # most example times of a stage
MAX_COUNTS = MAX_STAGES * (MAX_LENGTH + 2) * (MAX_STABLE + 1)
MAX_VALUES = 8 * MAX_COUNTS + 6 * MAX_STAGES * MAX_TIMES
What: TypeAlias = Literal["prefix", "order", "set"]
"""A part of a result: its first passages; all passages in order; or all passages in any order."""
_CONFIG = ConfigDict(extra="forbid")
_Seconds = Annotated[float, Field(strict=True, ge=0, le=1e6)]
_Int = Annotated[int, Field(strict=True, ge=0, le=MAX_NUM)]


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Count:
    """The number of queries whose part had been the same for `stable` stages at a stage, and how many were final."""

    what: What
    length: Annotated[_Int, Field(le=MAX_LENGTH)]
    """Number of passages of the prefix; 0 for other parts."""
    left: Annotated[_Int, Field(lt=MAX_STAGES)]
    stable: Annotated[_Int, Field(le=MAX_STABLE)]
    num: _Int
    num_final: _Int

    def __post_init__(self) -> None:
        if self.num_final > self.num or (self.what == "prefix") != (self.length > 0):
            raise ValueError(f"a count of {self.what} {self.length} has {self.num_final} final of {self.num}")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Times:
    """Example times after a stage."""

    next_s: _Seconds
    """Seconds until the next stage, or the end."""
    end_s: _Seconds
    """Seconds until the end."""

    def __post_init__(self) -> None:
        if self.next_s > self.end_s:
            raise ValueError(f"next_s={self.next_s:g} must be at most end_s={self.end_s:g}")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Stage:
    """Times after a stage, separately for final results: a search may stop early when it is certain."""

    late_s: _Seconds
    """Seconds until the next stage, 90th percentile."""
    when_final: Annotated[tuple[Times, ...], Field(max_length=MAX_TIMES)]
    """Example times of queries whose result was final, evenly spaced by `end_s`."""
    when_not: Annotated[tuple[Times, ...], Field(max_length=MAX_TIMES)]
    """Example times of the other queries."""


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Calibration:
    """A record of how soon a source's results become final, made by `calibrate`.

    It applies to one source with one set of options: calibrate again for another index, `k` or ladder.
    """

    source: str
    """The source's name."""
    num_queries: Annotated[_Int, Field(ge=1)]
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=MAX_STAGES)]
    """Stages by the number of stages left: the last stage first."""
    counts: Annotated[tuple[Count, ...], Field(max_length=MAX_COUNTS)]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len({_key(count) for count in self.counts}) < len(self.counts):
            raise ValueError("it counts the same part twice")
        if any(count.left >= len(self.stages) or count.num > self.num_queries for count in self.counts):
            raise ValueError("a count names a stage that does not exist, or more queries than there are")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as a JSON file, atomically.

        :raises ConfigurationError: the file cannot be written.
        """
        write_atomic(Path(path), json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read a file made by `write`. The file is untrusted: its values are checked, and its size is limited.

        :raises ConfigurationError: the file cannot be read, is no calibration, or is of another version.
        """
        try:
            values = parse_json(read_bytes(path), MAX_VALUES)
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise ValueError(f'it does not say "format": "{FORMAT}"')
            if (version := values.pop("version", None)) != VERSION:
                raise ValueError(f"its version is {str(version)[:40]}, and {VERSION} is what this streamrag reads")
            return TypeAdapter(cls).validate_python(values)
        except (OSError, ValueError) as error:
            problem = describe("calibration", error) if isinstance(error, ValidationError) else error
            raise ConfigurationError(
                f"{path} is no calibration: {problem}; make one with:  streamrag index calibrate INDEX --out FILE"
            ) from error


def _key(count: Count) -> tuple[Any, ...]:
    return count.what, count.length, count.left, count.stable


class Odds:
    """The probabilities by a calibration that parts of a result are final.

    They are smoothed twice, so that few queries never yield certainty. The share of final results at a stage, over all
    `stable`, has the prior Beta(1, 1). With the weight of two queries, it is the prior for each `stable`:

        p(left)         = (final + 1) / (num + 2)                       over all `stable`
        p(left, stable) = (final + 2 p(left)) / (num + 2)
    """

    def __init__(self, calibration: Calibration) -> None:
        self._counts = {_key(count): (count.num, count.num_final) for count in calibration.counts}
        self._at_stage: dict[tuple[str, int, int], tuple[int, int]] = {}
        for count in calibration.counts:
            key = count.what, count.length, count.left
            num, num_final = self._at_stage.get(key, (0, 0))
            self._at_stage[key] = num + count.num, num_final + count.num_final
        self.num_stages = len(calibration.stages)

    def final(self, what: What, length: int, left: int, stable: int | None = None) -> float:
        """Return the probability that a part is final with `left` stages left. Without `stable`, the overall one."""
        num, num_final = self._at_stage.get((what, length, left), (0, 0))
        at_stage = (num_final + 1) / (num + 2)
        if stable is None:
            return at_stage
        num, num_final = self._counts.get((what, length, left, min(stable, MAX_STABLE)), (0, 0))
        return (num_final + 2 * at_stage) / (num + 2)

    def prefixes(self, left: int, stable: list[int]) -> list[float]:
        """Return the probability that each prefix is final, by length from 1. They never increase.

        stable: for each prefix the number of stages for which it has been the same. Prefixes beyond `MAX_LENGTH` are
            as likely as the longest one.
        """
        known = (self.final("prefix", length, left, num) for length, num in enumerate(stable[:MAX_LENGTH], 1))
        probabilities = [*accumulate(known, min)]
        return probabilities + probabilities[-1:] * (len(stable) - len(probabilities))
