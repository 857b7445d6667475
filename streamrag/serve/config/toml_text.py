"""Settings as TOML: all defaults with their meaning, or those in effect, without secrets."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from streamrag.serve.config.settings import Settings

HIDDEN = "(hidden)"


def commented_defaults() -> str:
    """Return a file with every setting, its meaning and its default; a setting without one is commented out."""
    lines = [
        "# What `streamrag serve --config FILE` reads. Everything is at its default; a line that begins with #",
        "# and has a name has none. What is left out keeps its default.",
    ]
    for section, values in Settings():
        lines += ["", f"# {type(values).__doc__ or ''}".rstrip(), f"[{section}]"]
        for name, field in type(values).model_fields.items():
            value = getattr(values, name)
            lines.append(f"# {field.description}")
            lines.append(f"# {name} =" if value is None else f"{name} = {toml_of(value)}")
    return "\n".join(lines)


def effective(settings: Settings) -> str:
    """Return the settings in effect as a file; secrets are hidden."""
    lines = []
    for section, values in settings:
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {toml_of(value)}" for name, value in values if value is not None]
    return "\n".join(lines[1:])


def toml_of(value: Any) -> str:
    """Return a value in TOML."""
    match value:
        case SecretStr():
            return toml_of(HIDDEN)
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            return "{" + ", ".join(f"{toml_of(str(key))} = {toml_of(each)}" for key, each in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(toml_of, value)) + "]"
        case BaseModel():
            return toml_of(dict(value))
    raise TypeError(f"{value!r:.80} has no form in TOML")
