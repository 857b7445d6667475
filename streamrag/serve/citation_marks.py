"""Citations of passages in an answer: [2], or [1, 3]."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit

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
    """Return the citations that begin at `start` or later, one for each number in a mark that has a passage."""
    return [
        Mark(match.start(), match.end(), number)
        for match in _CITED.finditer(text, start)
        for number in dict.fromkeys(map(int, match[1].split(",")))
        if 1 <= number <= num_passages
    ]


def passage_annotations(text: str, passages: Sequence[Passage], base_url: str | None = None) -> list[dict[str, Any]]:
    """Return annotations of OpenAI's chat completions: the n-th is of passage n, at its first mark in `text`, or empty
    at the end of `text` if it has none. Those of further marks follow.

    Clients read [n] as the n-th source, and take sources of one address or title for one. So further passages of a
    document have their numbers in both.
    """
    marks = find_marks(text, len(passages))
    first = {mark.number: mark for mark in reversed(marks)}
    end = len(text)
    ordered = [first.get(number, Mark(end, end, number)) for number in range(1, len(passages) + 1)]
    ordered += [mark for mark in marks if mark is not first[mark.number]]
    annotations, seen = [], set[str]()
    names: dict[int, dict[str, str]] = {}
    for mark in ordered:
        annotation = encode_annotation(mark, passages, base_url)
        if mark.number not in names and annotation["type"] == "url_citation":
            url, title = annotation["url"], annotation["title"]
            names[mark.number] = {
                "url": f"{url}{'&' if '#' in url else '#'}passage={mark.number}" if url in seen else url,
                "title": f"{title} ({mark.number})" if title in seen else title,
            }
            seen |= {url, title}
        annotation |= names.get(mark.number, {})
        kind = annotation.pop("type")
        annotations.append({"type": kind, kind: annotation})
    return annotations


def encode_annotation(mark: Mark, passages: Sequence[Passage], base_url: str | None = None) -> dict[str, Any]:
    """Return a citation as an annotation of OpenAI's responses: of the document's URL, or of a file if it has none."""
    passage = passages[mark.number - 1]
    name = file_name(passage)
    if url := document_url(passage.uri, base_url):
        title = passage.title or name
        return {"type": "url_citation", "start_index": mark.start, "end_index": mark.end, "title": title, "url": url}
    return {"type": "file_citation", "index": mark.start, "file_id": file_id(passage), "filename": name}


def document_url(uri: str, base_url: str | None) -> str | None:
    """Return the address of a document: its URI if that is one of http or https, its path below `base_url`, or None."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # invalid IPv6 brackets
        return None
    if parts.scheme:
        return uri if parts.scheme in ("http", "https") and parts.hostname else None
    return f"{base_url.rstrip('/')}/{quote(uri.lstrip('/'), errors='replace')}" if base_url and uri else None


def file_id(passage: Passage) -> str:
    """Return a stable id of a passage's document."""
    return f"file-{hashlib.sha256(passage.uri.encode(errors='replace')).hexdigest()[:24]}"


def file_name(passage: Passage) -> str:
    """Return the last part of a document's path, or its title, or "document" if it has neither."""
    parts = unquote(passage.uri.rstrip("/")).rsplit("/", 1)
    return parts[-1] or passage.title or "document"
