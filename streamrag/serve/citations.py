"""Where an answer cites its passages: [2], or [1, 3]."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import unquote

_CITED = re.compile(r"\[(\d{1,4}(?:\s?,\s?\d{1,4}){0,15})\]", re.ASCII)

LONGEST_MARK = 112
"""Characters of the longest mark that is taken for a citation, brackets included."""


class Passage(Protocol):
    """What is cited: a `Chunk`, or a `Citation`."""

    @property
    def uri(self) -> str: ...

    @property
    def title(self) -> str: ...


P = TypeVar("P", bound=Passage)


@dataclass(frozen=True, slots=True)
class Mark:
    """Characters `start` to `end` of an answer cite the passage of this number, from 1."""

    start: int
    end: int
    number: int


def marks_in(text: str, num_passages: int, start: int = 0) -> list[Mark]:
    """The citations in `text` from `start` on; numbers that no passage has are none."""
    return [
        Mark(match.start(), match.end(), number)
        for match in _CITED.finditer(text, start)
        for number in dict.fromkeys(map(int, match[1].split(",")))
        if 1 <= number <= num_passages
    ]


def url_citations(text: str, passages: Sequence[P]) -> list[dict[str, object]]:
    """The citations in `text` as OpenAI's chat completions have them."""
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": mark.start,
                "end_index": mark.end,
                "title": passages[mark.number - 1].title,
                "url": passages[mark.number - 1].uri,
            },
        }
        for mark in marks_in(text, len(passages))
    ]


def annotation_of(mark: Mark, passages: Sequence[P]) -> dict[str, object]:
    """The citation as OpenAI's responses have it: of a page, or of a file for all that is not on the web."""
    passage = passages[mark.number - 1]
    if passage.uri.lower().startswith(("http://", "https://")):
        return {
            "type": "url_citation",
            "start_index": mark.start,
            "end_index": mark.end,
            "title": passage.title,
            "url": passage.uri,
        }
    return {
        "type": "file_citation",
        "index": mark.start,
        "file_id": file_id(passage),
        "filename": file_name(passage),
    }


def file_id(passage: Passage) -> str:
    """The same for the same document, always."""
    return f"file-{hashlib.sha256(passage.uri.encode(errors='replace')).hexdigest()[:24]}"


def file_name(passage: Passage) -> str:
    """The last part of its path, or what else there is."""
    parts = unquote(passage.uri.rstrip("/")).rsplit("/", 1)
    return parts[-1] or passage.title or "document"
