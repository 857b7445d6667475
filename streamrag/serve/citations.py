"""Citations of passages in an answer: [2], or [1, 3]."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import unquote

_CITED = re.compile(r"\[(\d{1,4}(?:\s?,\s?\d{1,4}){0,15})\]", re.ASCII)

LONGEST_MARK = 112
"""Most characters of a mark that is taken for a citation, brackets included."""


class Passage(Protocol):
    """A passage that can be cited: a `Chunk`, or a `Citation`."""

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
    """Return the citations in `text` from `start` on; numbers without a passage do not count."""
    return [
        Mark(match.start(), match.end(), number)
        for match in _CITED.finditer(text, start)
        for number in dict.fromkeys(map(int, match[1].split(",")))
        if 1 <= number <= num_passages
    ]


def url_citations(text: str, passages: Sequence[P]) -> list[dict[str, object]]:
    """Return the citations in `text` in the form of OpenAI's chat completions."""
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
    """Return a citation in the form of OpenAI's responses: of a page, or of a file for all that is not on the web."""
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
    """Return a stable id of a passage's document."""
    return f"file-{hashlib.sha256(passage.uri.encode(errors='replace')).hexdigest()[:24]}"


def file_name(passage: Passage) -> str:
    """Return the last part of a document's path, or its title."""
    parts = unquote(passage.uri.rstrip("/")).rsplit("/", 1)
    return parts[-1] or passage.title or "document"
