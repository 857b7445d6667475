"""Files of hardware profiles, as JSON objects. Some are shipped with the package, and have names.

{"kind": "table" or "analytic", and the fields of that class in `step_profiles`}
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from streamrag.engine.costs.step_profiles import AnalyticProfile, StepProfile, TableProfile
from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import as_dataclass, parse_json, read_bytes
from streamrag.support.files import write_atomic

MAX_NUMBER = 10**15
"""The largest integer in a profile."""


def profile_names() -> list[str]:
    """Return the sorted names of the profiles that are shipped with the package."""
    folder = resources.files(__package__) / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_profile(name_or_path: str) -> StepProfile:
    """Return the shipped profile of that name, or the one in a file.

    :raises ConfigurationError: there is no profile of that name, or the file is no profile.
    """
    if name_or_path in profile_names():
        text = (resources.files(__package__) / "profiles" / f"{name_or_path}.json").read_text()
        return _from_dict(json.loads(text))
    if not Path(name_or_path).is_file():
        raise ConfigurationError(f"no profile {name_or_path!r}: give a file, or one of {', '.join(profile_names())}")
    values = read_object(name_or_path)
    try:
        return _from_dict(values)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"{name_or_path} is not a hardware profile: {reason}") from error


def save_profile(profile: StepProfile, path: Path) -> None:
    """Write `profile` to a file that `load_profile` reads.

    :raises ConfigurationError: the file cannot be written.
    """
    kind = "analytic" if isinstance(profile, AnalyticProfile) else "table"
    write_atomic(path, json.dumps({"kind": kind, **asdict(profile)}, indent=2) + "\n")


def read_object(path: str | Path) -> dict[str, Any]:
    """Return a file's JSON object; raise ConfigurationError if the file cannot be read, or has none."""
    try:
        values = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a hardware profile: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} is not a hardware profile: it is not a JSON object")
    return values


def _from_dict(values: Mapping[str, Any]) -> StepProfile:
    """Return a profile of the class that "kind" names, checked; raise ValueError for wrong or unknown values."""
    kinds: Mapping[Any, type[StepProfile]] = {"analytic": AnalyticProfile, "table": TableProfile}
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f'its "kind" is {str(kind)[:40]!r}, not "analytic" or "table"')
    profile = as_dataclass(kinds[kind], {key: value for key, value in values.items() if key != "kind"})
    _check(profile)
    return profile


def _check(profile: StepProfile) -> None:
    """Raise ValueError for a number that no machine has: negative, 0 where it must be over 0, or too large."""
    positive: dict[str, float | None] = {
        name: getattr(profile, name) for name in ("block_size", "tensor_parallel_size", "num_layers")
    }
    counted: dict[str, float | None] = {"kv_tokens": profile.kv_tokens, "delivery_s": profile.delivery_s}
    if isinstance(profile, AnalyticProfile):
        positive |= {name: getattr(profile, name) for name in ("peak_flops", "efficiency", "bandwidth_bytes_per_s")}
        positive["host_bandwidth_bytes_per_s"] = profile.host_bandwidth_bytes_per_s
        counted |= {"overhead_s": profile.overhead_s, "host_latency_s": profile.host_latency_s}
        counted |= {f"model.{name}": value for name, value in asdict(profile.model).items() if name != "name"}
    else:
        counted |= {name: getattr(profile, name) for name in ("pair_s", "own_pair_s", "request_s")}
        counted["points"] = min(second for point in profile.points for second in point)
        counted["unsteadiness"] = min(profile.unsteadiness, default=None)
    for name, value in (positive | counted).items():
        is_wrong = value is not None and (value < 0 or (name in positive and value == 0))
        if is_wrong or (isinstance(value, int) and value > MAX_NUMBER):
            raise ValueError(f"{name}={value:g} cannot be")
