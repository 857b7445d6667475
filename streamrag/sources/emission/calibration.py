"""How soon a source's result is final: counts over many queries, their file, and the probabilities that they give.

    stage           num_chunks of the hint: 3 stages left ─▶ 2 left ─▶ 1 left ─▶ 0 left ─▶ end
    stable          stages before this one at which the same was there already

A stage is known by how many are left after it. A source says nothing at a stage that changes nothing, so what was there
at such a stage is what it said last.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import as_dataclass, parse_json, read_bytes
from streamrag.support.files import write_whole

FORMAT = "streamrag-calibration"
VERSION = 1
MAX_STAGES = 64
MAX_LENGTH = 64
"""Leading passages that are looked at one by one; of more, it is known whether all are final, and in order."""
MAX_STABLE = 8
"""Stands for so many stages and more."""
MAX_NUM = 1_000_000
"""Queries, at most."""
MAX_SECONDS = 1e6
MAX_TIMES = 16
"""Examples of how long a stage takes."""
MAX_COUNTS = MAX_STAGES * (MAX_LENGTH + 2) * (MAX_STABLE + 1)
MAX_VALUES = 8 * MAX_COUNTS + 6 * MAX_STAGES * MAX_TIMES

What: TypeAlias = Literal["prefix", "order", "set"]
"""Of what it is asked whether it is final: the first passages; all of them and their order; all of them, in any."""


@dataclass(frozen=True, slots=True)
class Count:
    """Of the queries for which this was `stable` for so many stages when so many were `left`, how many had it final."""

    what: What
    length: int
    """Passages of the prefix; 0 for what is not about one."""
    left: int
    stable: int
    num: int
    num_final: int

    def __post_init__(self) -> None:
        most = {"length": MAX_LENGTH, "left": MAX_STAGES - 1, "stable": MAX_STABLE, "num": MAX_NUM}
        for name, limit in most.items():
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to {limit:,}")
        if not 0 <= self.num_final <= self.num or (self.what == "prefix") != (self.length > 0):
            raise ValueError(f"a count of {self.what} {self.length} has {self.num_final} final of {self.num}")


@dataclass(frozen=True, slots=True)
class Times:
    """How time went on after a stage, for one query or a few that are alike."""

    next_s: float
    """Seconds until the next stage, or the end."""
    end_s: float
    """Seconds until the end."""

    def __post_init__(self) -> None:
        if not 0 <= self.next_s <= self.end_s <= MAX_SECONDS:
            raise ValueError(f"next_s={self.next_s:g}, end_s={self.end_s:g} must be seconds, the first no more")


@dataclass(frozen=True, slots=True)
class Stage:
    """Times from a stage on. A search that stops when it is sure has others when its result is final."""

    late_s: float
    """Seconds until the next stage: nine of ten queries took no longer."""
    when_final: tuple[Times, ...]
    """Of queries whose result was final, all of it and in order; evenly spaced by `end_s`."""
    when_not: tuple[Times, ...]
    """Of the others."""

    def __post_init__(self) -> None:
        num_times = max(len(self.when_final), len(self.when_not))
        if not 0 <= self.late_s <= MAX_SECONDS or num_times > MAX_TIMES:
            raise ValueError(f"late_s={self.late_s:g} must be seconds, and {num_times} times at most {MAX_TIMES}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """How soon the result of a source is final, as `calibrate` found it.

    It is of one source with one set of options: another index, `k` or ladder wants another.
    """

    source: str
    """The source's name."""
    num_queries: int
    stages: tuple[Stage, ...]
    """By how many stages are left: the last stage first."""
    counts: tuple[Count, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= len(self.stages) <= MAX_STAGES or not 1 <= self.num_queries <= MAX_NUM:
            raise ValueError(f"{len(self.stages)} stages and {self.num_queries} queries cannot be")
        if len(self.counts) > MAX_COUNTS or len({_key(count) for count in self.counts}) < len(self.counts):
            raise ValueError("it counts something twice")
        if any(count.left >= len(self.stages) or count.num > self.num_queries for count in self.counts):
            raise ValueError("a count is of a stage, or of more queries, than there are")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all.

        :raises ConfigurationError: the file cannot be written.
        """
        write_whole(Path(path), json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Calibration":
        """What `write` wrote. The file may be anybody's: what cannot be is refused, and its size is limited.

        :raises ConfigurationError: the file cannot be read, or is no calibration, or of another version.
        """
        try:
            values = parse_json(read_bytes(path), MAX_VALUES)
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise ValueError(f'it does not say "format": "{FORMAT}"')
            if (version := values.pop("version", None)) != VERSION:
                raise ValueError(f"its version is {str(version)[:40]}, and {VERSION} is what this streamrag reads")
            return as_dataclass(cls, values)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} is no calibration: {error}; make one with:  streamrag index calibrate INDEX --out FILE"
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
        """The probability that this is final, when so many stages are left. Without `stable`, however long it was."""
        num, num_final = self._at_stage.get((what, length, left), (0, 0))
        at_stage = (num_final + 1) / (num + 2)
        if stable is None:
            return at_stage
        num, num_final = self._counts.get((what, length, left, min(stable, MAX_STABLE)), (0, 0))
        return (num_final + 2 * at_stage) / (num + 2)

    def prefixes(self, left: int, stable: list[int]) -> list[float]:
        """For each length of prefix, from 1, the probability that it is final; `stable` has one number for each.

        A longer prefix is never the likelier one. Those that are too long to be known are as likely as the longest.
        """
        found: list[float] = []
        for length, num_stable in enumerate(stable, 1):
            if length <= MAX_LENGTH:
                likely = self.final("prefix", length, left, num_stable)
            found.append(min(likely, found[-1]) if found else likely)
        return found
