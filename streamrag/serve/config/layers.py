"""Loads settings from a file, the environment and the command line, and collects all problems.

options  ▶  environment  ▶  file  ▶  defaults          layers further left take precedence
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from streamrag.errors import ConfigurationError
from streamrag.serve.config.settings import Settings

PREFIX = "STREAMRAG__"  # prefix of environment variables, as in STREAMRAG__LIMITS__MAX_QUERIES
MAX_FILE_BYTES = 1 << 20

NAMES_OR_PATHS = frozenset(
    {("model", "name"), ("model", "tokenizer"), ("engine", "profile"), ("source", "embedder"), ("source", "rerank")}
)
"""Settings that are either a name or a path."""

SECTIONS: Mapping[str, type[BaseModel]] = {name: type(section) for name, section in Settings()}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in the configuration: its place, a description, and a remedy."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f". {self.remedy}" if self.remedy else "")


@dataclass(slots=True)
class Loaded:
    """Settings with their problems. Invalid values are left out of `sections` and listed in `wrong`."""

    sections: dict[str, BaseModel] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """The place of each value that is not a default, by name, such as "limits.max_queries", for messages."""
    wrong: set[str] = field(default_factory=set)

    def where(self, name: str) -> str:
        """Return a value's place, for a message."""
        return self.places.get(name, name)

    @property
    def settings(self) -> Settings:
        """The settings of all sections. Raises ConfigurationError with all problems, if there are any."""
        if self.problems:
            raise ConfigurationError("the configuration is wrong:\n  " + "\n  ".join(map(str, self.problems)))
        return Settings.model_validate(self.sections)

    def validate(self, section: str, values: Mapping[str, Any]) -> None:
        """Set a section to its valid values; an invalid one gets its default, a problem, and an entry in `wrong`."""
        model = SECTIONS[section]
        try:
            self.sections[section] = model.model_validate(values)
        except ValidationError as error:
            for each in error.errors(include_url=False):
                self.problems.append(_problem_of(self, section, model, each))
                self.wrong.add(f"{section}.{each['loc'][0]}")
            valid = {key: value for key, value in values.items() if f"{section}.{key}" not in self.wrong}
            self.sections[section] = model.model_validate(valid)


def load(
    file: Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    """Load settings from a file, environment and command line, later ones replacing earlier; return them with problems.

    Problems with the file or a value raise no error. Options and defaults of unknown sections are ignored.

    environment: variables, such as `os.environ`.
    options: values by name, such as "limits.max_queries"; strings are parsed as in the environment.
    defaults: values by name that replace the settings' own defaults.
    """
    loaded = Loaded()
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for layer in (
        ((name, f"default {name}", value) for name, value in defaults.items()),
        _read_file(file, loaded) if file is not None else (),
        _read_environment(environment, loaded),
        ((name, f"option --{name}", value) for name, value in options.items()),
    ):
        for name, place, value in layer:
            section, _, key = name.partition(".")
            if section in values:
                values[section][key] = value
                loaded.places[f"{section}.{key}"] = place
            else:
                remedy = _suggested(section, SECTIONS)
                loaded.problems.append(Problem(place, f"there is no section [{section}]", remedy))
    for section, section_values in values.items():
        loaded.validate(section, section_values)
    return loaded


def _problem_of(loaded: Loaded, section: str, model: type[BaseModel], error: Any) -> Problem:
    """Return pydantic's error as a problem at the value's place, with the value unless secret; suggest known keys."""
    key = str(error["loc"][0])
    place = loaded.where(f"{section}.{key}")
    if error["type"] == "extra_forbidden":
        return Problem(place, f"[{section}] has no {key}", _suggested(key, model.model_fields))
    what = error["msg"].removeprefix("Value error, ")
    inner = ".".join(map(str, error["loc"][1:]))
    is_secret = "Secret" in str(model.model_fields[key].annotation)
    value = "" if is_secret else f", and is {str(error['input'])!r:.80}"
    return Problem(place, f"{inner + ': ' if inner else ''}{what[:1].lower()}{what[1:]}{value}")


def _suggested(name: str, known: Any) -> str:
    """Return a remedy for an unknown name: the closest known one, or all."""
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}"


def _read_environment(environment: Mapping[str, str], loaded: Loaded) -> Iterator[tuple[str, str, Any]]:
    """Yield name, place and text of each variable with our prefix; add a problem for no key or an unknown section."""
    names = [f"{PREFIX}{name.upper()}__" for name in SECTIONS]
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        section, _, key = variable.removeprefix(PREFIX).lower().partition("__")
        if section in SECTIONS and key:
            yield f"{section}.{key}", f"environment {variable}", text
        else:
            remedy = _suggested(variable.rpartition("__")[0] + "__", names)
            loaded.problems.append(Problem(f"environment {variable}", "there is no such setting", remedy))


def _read_file(file: Path, loaded: Loaded) -> Iterator[tuple[str, str, Any]]:
    """Yield name, place and value of each setting, paths resolved; add a problem for an unusable file or section."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"has more than {MAX_FILE_BYTES:,} bytes")
        values = tomllib.loads(text := content.decode("utf-8-sig"))
    except OSError as error:
        loaded.problems.append(Problem(str(file), f"cannot be read: {error.strerror or error}"))
        return
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, deep arrays
        loaded.problems.append(Problem(str(file), f"is not TOML: {error}"))
        return
    lines = _lines_of(text)
    for section, table in values.items():
        if section not in SECTIONS:
            place = _place(file, lines.get((section, ""), lines.get(("", section), 0)))
            what, remedy = f"there is no section [{section}]", _suggested(section, SECTIONS)
            loaded.problems.append(Problem(place, what, remedy))
        elif not isinstance(table, dict):
            place = _place(file, lines.get(("", section), 0))
            loaded.problems.append(Problem(place, f"{section} is a section: write [{section}]"))
        else:
            for key, value in table.items():
                place = f"{_place(file, lines.get((section, key), 0))}: {section}.{key}"
                yield f"{section}.{key}", place, _resolve_path(file, section, key, value)


def _resolve_path(file: Path, section: str, key: str, value: Any) -> Any:
    """Return a value, made absolute from the file's folder if it is a path, or a name of `NAMES_OR_PATHS` that begins
    with ./ or ../."""
    field = SECTIONS[section].model_fields.get(key)
    if not isinstance(value, str) or field is None:
        return value
    is_path = Path in (field.annotation, *get_args(field.annotation))
    if is_path or ((section, key) in NAMES_OR_PATHS and value.startswith(("./", "../"))):
        return os.path.normpath(file.absolute().parent / Path(value).expanduser())
    return value


def _place(file: Path, line: int) -> str:
    return f"{file}, line {line}" if line else str(file)


_HEADER = re.compile(r"\s*\[\s*([\w-]+)(?:\.([\w-]+))?")
_KEY = re.compile(r"\s*(?:([\w-]+)\s*\.\s*)?([\w-]+)\s*=")


def _lines_of(text: str) -> dict[tuple[str, str], int]:
    """Return the first line of each section, as (section, ""), and of each (section, key). May miss unusual forms."""
    numbers: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = header[1]
            numbers.setdefault((section, header[2] or ""), number)
        elif key := _KEY.match(line):
            numbers.setdefault((section or key[1] or "", key[2]), number)
    return numbers
