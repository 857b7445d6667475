"""Citations of passages in an answer: [2], or [1, 3]."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

from streamrag.core import Chunk
from streamrag.telemetry import Citation

_CITED = re.compile(r"\[(\d{1,4}(?:\s?,\s?\d{1,4}){0,15})\]", re.ASCII)

LONGEST_MARK = 112  # maximum characters of a citation mark, brackets included


Passage: TypeAlias = Chunk | Citation


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of a citation: characters `start` to `end` of an answer cite passage `number`, counted from 1."""

    start: int
    end: int
    number: int


def find_marks(text: str, num_passages: int, start: int = 0) -> list[Mark]:
    """Return the citations in `text[start:]`, one for each number in a mark, without numbers that have no passage."""
    return [
        Mark(match.start(), match.end(), number)
        for match in _CITED.finditer(text, start)
        for number in dict.fromkeys(map(int, match[1].split(",")))
        if 1 <= number <= num_passages
    ]


def url_citations(text: str, passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """Return the citations in `text` as annotations of OpenAI's chat completions."""
    marks = find_marks(text, len(passages))
    return [{"type": "url_citation", "url_citation": _url_citation(mark, passages[mark.number - 1])} for mark in marks]


def encode_annotation(mark: Mark, passages: Sequence[Passage]) -> dict[str, Any]:
    """Return a citation as an annotation of OpenAI's responses: of a URL for web pages, else of a file."""
    passage = passages[mark.number - 1]
    if passage.uri.lower().startswith(("http://", "https://")):
        return {"type": "url_citation", **_url_citation(mark, passage)}
    name, id = file_name(passage), file_id(passage)
    return {"type": "file_citation", "index": mark.start, "file_id": id, "filename": name}


def _url_citation(mark: Mark, passage: Passage) -> dict[str, Any]:
    return {"start_index": mark.start, "end_index": mark.end, "title": passage.title, "url": passage.uri}


def file_id(passage: Passage) -> str:
    """Return a stable id of a passage's document."""
    return f"file-{hashlib.sha256(passage.uri.encode(errors='replace')).hexdigest()[:24]}"


def file_name(passage: Passage) -> str:
    """Return the last part of a document's path, or its title, or "document" if it has neither."""
    parts = unquote(passage.uri.rstrip("/")).rsplit("/", 1)
    return parts[-1] or passage.title or "document"
