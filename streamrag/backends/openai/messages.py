"""Reads the fields of a server's answers, and what it says about an error, in the formats of many servers."""

import html
import re
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from streamrag.core import AnswerChunk, TokenUsage
from streamrag.errors import ServerError
from streamrag.support.bounded_reading import parse_json, without_lone_surrogates

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


MAX_NUMBER = 2**31 - 1
MAX_REASON_CHARS = 100
GIVEN_UP = ("abort", "cancelled", "error")  # finish reasons with which servers report an incomplete answer


def length(value: Any, *, server: str, name: str) -> int:
    """Return a positive number of tokens; raise ServerError for anything else."""
    if not _is_number(value) or value == 0:
        raise ServerError(f"{server} sent {name}={clean(reprlib.repr(value))}, which is not a number of tokens")
    return int(value)


def token_ids(value: Any, *, server: str) -> list[int]:
    """Return a list of token ids, which is empty for None; raise ServerError for anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise ServerError(f"{server} sent {clean(reprlib.repr(value))} instead of a list of token ids")
    return value


def answer_chunk(choice: dict[str, Any], *, server: str, n: int) -> AnswerChunk:
    """Return the chunk of one of `n` answers in a choice of an event; raise ServerError if malformed or aborted."""
    text, reason = choice.get("text"), choice.get("finish_reason")
    for name, value in (("text", text), ("finish_reason", reason)):
        if value is not None and not isinstance(value, str):
            raise ServerError(f"{server} sent {name}={clean(reprlib.repr(value))}, which is not text")
    if reason in GIVEN_UP:
        raise ServerError(f"{server} aborted the answer: its finish_reason is {reason!r}")
    index = choice.get("index") or 0
    if not _is_number(index) or index >= n:
        raise ServerError(f"{server} sent index={clean(reprlib.repr(index))}, but n={n} answers were requested")
    ids = tuple(token_ids(choice.get("token_ids"), server=server))
    whole_text = without_lone_surrogates(text or "")  # JSON may contain halves of characters
    return AnswerChunk(whole_text, ids, None if not reason else clean(reason)[:MAX_REASON_CHARS], index=index)


def token_usage(value: Any) -> TokenUsage:
    """Return the counts in the `usage` of a response. What is missing or malformed is unknown."""
    counts = value if isinstance(value, dict) else {}
    found = [counts.get(name) for name in ("prompt_tokens", "completion_tokens")]
    return TokenUsage(*(count if _is_number(count) else None for count in found))


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER
