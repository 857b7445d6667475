"""Validates the fields of an OpenAI-compatible server's responses. An invalid field raises a `ServerError`."""

import reprlib
from typing import Any

from streamrag.backends.openai.messages import clean
from streamrag.core import AnswerChunk, TokenUsage
from streamrag.errors import ServerError
from streamrag.support.bounded_reading import without_lone_surrogates

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
