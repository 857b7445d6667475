"""Settings as TOML: all defaults with their descriptions, or the effective ones without secrets."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from streamrag.serve.config.settings import Settings

HIDDEN = "(hidden)"


def commented_defaults() -> str:
    """Return a TOML text with each setting's description and default; settings without a default are commented out."""
    lines = [
        "# A configuration for `streamrag serve --config FILE`, with every setting at its default.",
        "# Settings without a default are commented out. A setting that is left out has its default.",
    ]
    for section, values in Settings():
        lines += ["", f"# {type(values).__doc__ or ''}".rstrip(), f"[{section}]"]
        for name, field in type(values).model_fields.items():
            value = getattr(values, name)
            lines.append(f"# {field.description}")
            lines.append(f"# {name} =" if value is None else f"{name} = {toml_of(value)}")
    return "\n".join(lines)


def effective(settings: Settings) -> str:
    """Return the effective settings as a TOML text, without those that are None; secrets are `HIDDEN`."""
    lines = []
    for section, values in settings:
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {toml_of(value)}" for name, value in values if value is not None]
    return "\n".join(lines[1:])


def toml_of(value: Any) -> str:
    """Return a value as TOML on one line, a secret as `HIDDEN`; raise TypeError if it has no such form."""
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
    raise TypeError(f"{value!r:.80} has no TOML form")
