"""What an OpenAI-compatible server says, checked: a field is what it should be, or a `ServerError` says what it is."""

import reprlib
from collections.abc import Iterator
from typing import Any

from streamrag.backends.openai.http import clean
from streamrag.core import AnswerChunk
from streamrag.errors import ServerError
from streamrag.support.bounded_reading import without_lone_surrogates

MAX_NUMBER = 2**31 - 1
MAX_REASON_CHARS = 100
GIVEN_UP = ("abort", "cancelled", "error")
"""Reasons to finish with which servers say that the answer is not whole."""


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a list from outside."""
    return (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else iter(())


def length(value: Any, *, server: str, name: str) -> int:
    """A number of tokens."""
    if not _is_number(value) or value == 0:
        raise ServerError(f"{server} says {name} is {clean(reprlib.repr(value))}, which is no number of tokens")
    return int(value)


def token_ids(value: Any, *, server: str) -> list[int]:
    """A list of token ids; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise ServerError(f"{server} sent {clean(reprlib.repr(value))} where a list of token ids belongs")
    return value


def answer_chunk(choice: dict[str, Any], *, server: str) -> AnswerChunk:
    """The part of an answer that one choice of an event holds."""
    text, reason = choice.get("text"), choice.get("finish_reason")
    for name, value in (("text", text), ("finish_reason", reason)):
        if value is not None and not isinstance(value, str):
            raise ServerError(f"{server} sent {name}={clean(reprlib.repr(value))}, which is no text")
    if reason in GIVEN_UP:
        raise ServerError(f"{server} gave the answer up: its finish_reason is {reason!r}")
    ids = tuple(token_ids(choice.get("token_ids"), server=server))
    whole_text = without_lone_surrogates(text or "")  # JSON can hold halves of characters
    return AnswerChunk(whole_text, ids, None if not reason else clean(reason)[:MAX_REASON_CHARS])


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER
