"""Finds what a server says about an error, in the formats of many servers."""

import html
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from streamrag.support.bounded_reading import parse_json

MAX_MESSAGE_CHARS = 500
MAX_ERROR_BYTES = 1 << 16
ERROR_FIELDS = ("error", "errors", "error_message", "error_msg")
MESSAGE_FIELDS = ("loc", *ERROR_FIELDS, "message", "msg", "detail", "details", "choices")
_CODE = re.compile(r"</?(?:script|style)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[a-z/!?][^<>]*>", re.IGNORECASE)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the objects in an untrusted list."""
    return (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else iter(())


def clean(text: str) -> str:
    """Return untrusted text short, on one line, and without control or direction characters."""
    text = text.strip()[: 4 * MAX_MESSAGE_CHARS]
    text = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(text.split())[:MAX_MESSAGE_CHARS]


def is_error(value: dict[str, Any]) -> bool:
    """Whether an object of a server, or one of its choices, reports an error. An error without content is none."""
    places = [value, *objects(value.get("choices"))]
    return "error" in [value.get(name) for name in ("object", "type", "status")] or any(
        _has_content(place.get(name)) for place in places for name in ERROR_FIELDS
    )


def server_words(text: str) -> str:
    """Return the message in a body, which may be JSON or a page, or else the whole text, clean and short."""
    text = text.strip("\ufeff \t\r\n")[:MAX_ERROR_BYTES]
    if _TAG.match(text) and "</" in text:  # not "<model> was not found"
        text = html.unescape(_TAG.sub(" ", " ".join(_CODE.split(text)[::2])))  # every other part is code
    with suppress(ValueError):
        text = _message_in(parse_json(text)) or text
    return clean(text)


def _has_content(value: Any) -> bool:
    """Whether a JSON value has anything but null, false, zero and blank text, at any depth."""
    if isinstance(value, dict | list):
        return any(map(_has_content, value.values() if isinstance(value, dict) else value))
    return bool(value.strip() if isinstance(value, str) else value)


def _message_in(value: Any) -> str:
    """Return the messages in a JSON value of bounded depth; "" if there is none."""
    if isinstance(value, list):
        return "; ".join(filter(None, map(_message_in, value[:5])))
    if not isinstance(value, dict):
        return value.strip() if isinstance(value, str) else ""
    found = (_message_in(value.get(name)) for name in MESSAGE_FIELDS)
    return ": ".join(dict.fromkeys(filter(None, found)))
