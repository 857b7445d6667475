"""Counts over many queries of how soon a source's result is final, their file, and the probabilities they give.

    stage           num_chunks of the hint: 3 stages left ─▶ 2 left ─▶ 1 left ─▶ 0 left ─▶ end
    stable          stages before this one at which the same was there already

A stage is known by how many are left after it. A source says nothing at a stage that changes nothing, so what was there
at such a stage is what it said last.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import parse_json, read_bytes
from streamrag.support.files import write_whole
from streamrag.support.validation import describe

FORMAT = "streamrag-calibration"
VERSION = 1
MAX_STAGES = 64
MAX_LENGTH = 64
"""Most leading passages that are counted one by one; beyond, only all passages and their order are."""
MAX_STABLE = 8
"""Stands for this many stages and more."""
MAX_NUM = 1_000_000
"""Most queries."""
MAX_TIMES = 16
"""Most examples of how long a stage takes."""
MAX_COUNTS = MAX_STAGES * (MAX_LENGTH + 2) * (MAX_STABLE + 1)
MAX_VALUES = 8 * MAX_COUNTS + 6 * MAX_STAGES * MAX_TIMES

What: TypeAlias = Literal["prefix", "order", "set"]
"""Parts of a result that may be final: the first passages; all and their order; all, in any order."""

_CONFIG = ConfigDict(extra="forbid")

_Seconds = Annotated[float, Field(strict=True, ge=0, le=1e6)]
_Int = Annotated[int, Field(strict=True, ge=0, le=MAX_NUM)]


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Count:
    """Number of queries for which a part was `stable` for some stages when `left` were left; how many had it final."""

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
    """Times after a stage, for one query or a few that are alike."""

    next_s: _Seconds
    """Seconds until the next stage, or the end."""
    end_s: _Seconds
    """Seconds until the end."""

    def __post_init__(self) -> None:
        if self.next_s > self.end_s:
            raise ValueError(f"next_s={self.next_s:g} must be at most end_s={self.end_s:g}")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Stage:
    """Times from a stage on. A search that stops when it is sure has others when its result is final."""

    late_s: _Seconds
    """Seconds until the next stage: nine of ten queries took no longer."""
    when_final: Annotated[tuple[Times, ...], Field(max_length=MAX_TIMES)]
    """Times of queries whose result was final, all of it and in order; evenly spaced by `end_s`."""
    when_not: Annotated[tuple[Times, ...], Field(max_length=MAX_TIMES)]
    """Times of the other queries."""


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Calibration:
    """A record of how soon a source's result is final, which `calibrate` makes.

    A calibration is of one source with one set of options: another index, `k` or ladder wants another.
    """

    source: str
    """The source's name."""
    num_queries: Annotated[_Int, Field(ge=1)]
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=MAX_STAGES)]
    """Stages by how many are left: the last stage first."""
    counts: Annotated[tuple[Count, ...], Field(max_length=MAX_COUNTS)]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len({_key(count) for count in self.counts}) < len(self.counts):
            raise ValueError("it counts something twice")
        if any(count.left >= len(self.stages) or count.num > self.num_queries for count in self.counts):
            raise ValueError("a count is of a stage, or of more queries, than there are")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, whole or not at all.

        :raises ConfigurationError: the file cannot be written.
        """
        write_whole(Path(path), json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read a file that `write` wrote. It may be anybody's: what cannot be is refused, and its size is limited.

        :raises ConfigurationError: the file cannot be read, or is no calibration, or of another version.
        """
        try:
            values = parse_json(read_bytes(path), MAX_VALUES)
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise ValueError(f'it does not say "format": "{FORMAT}"')
            if (version := values.pop("version", None)) != VERSION:
                raise ValueError(f"its version is {str(version)[:40]}, and {VERSION} is what this streamrag reads")
            return TypeAdapter(cls).validate_python(values)
        except (OSError, ValueError) as error:
            what = describe("calibration", error) if isinstance(error, ValidationError) else error
            raise ConfigurationError(
                f"{path} is no calibration: {what}; make one with:  streamrag index calibrate INDEX --out FILE"
            ) from error


def _key(count: Count) -> tuple[Any, ...]:
    return count.what, count.length, count.left, count.stable


class Odds:
    """The probabilities that a calibration gives.

    Two steps of smoothing, so that few queries never make certain. The share of all queries whose prefix is final at
    this stage, however long it was stable, is taken with a prior of Beta(1, 1). That, with the weight of two queries,
    is the prior of those that were stable as long:

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
        """Return the probability that a part is final when `left` stages are; without `stable`, however long it was."""
        num, num_final = self._at_stage.get((what, length, left), (0, 0))
        at_stage = (num_final + 1) / (num + 2)
        if stable is None:
            return at_stage
        num, num_final = self._counts.get((what, length, left, min(stable, MAX_STABLE)), (0, 0))
        return (num_final + 2 * at_stage) / (num + 2)

    def prefixes(self, left: int, stable: list[int]) -> list[float]:
        """Return the probability that each prefix is final, by length from 1; `stable` has a number for each.

        A longer prefix is never the likelier one. Those that are too long to be known are as likely as the longest.
        """
        found: list[float] = []
        for length, num_stable in enumerate(stable, 1):
            if length <= MAX_LENGTH:
                likely = self.final("prefix", length, left, num_stable)
            found.append(min(likely, found[-1]) if found else likely)
        return found
