"""Passages as other people's functions give them, as chunks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamrag.core import Chunk
from streamrag.errors import SourceError
from streamrag.support.messages import is_number, is_whole, short

WANTED = "passages: str, Chunk, (text, uri), a mapping with text, or an object with page_content and metadata"
TEXTS = ("text", "page_content", "content")
URIS = ("uri", "url", "source")
"""In mappings and metadata, what a text and a document's address may be called; the first that is there counts."""


class PassageReader:
    """Makes chunks for one query of the function `name`.

    Passages without a number are counted within their document; the same text of a document is the same passage.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._numbers: dict[str, dict[str, int]] = {}

    def chunk(self, passage: Any) -> Chunk:
        """The passage as a chunk.

        :raises SourceError: it is none.
        """
        match passage:
            case Chunk():
                return passage
            case str():
                return self._numbered(Chunk(passage, self.name))
            case (str(text), str(uri)):
                return self._numbered(Chunk(text, uri))
            case Mapping():
                return self._of_fields(passage, next((passage[key] for key in TEXTS if key in passage), None))
            case object(page_content=str(text)):
                return self._of_fields(getattr(passage, "metadata", None) or {}, text)
        raise self._error(passage)

    def _of_fields(self, fields: Mapping[str, Any], text: Any) -> Chunk:
        if not isinstance(text, str):
            raise self._error(fields)
        uri = str(next((fields[key] for key in URIS if fields.get(key)), self.name))
        chunk = Chunk(text, uri, str(fields.get("title") or ""))
        score, passage = fields.get("score"), fields.get("passage")
        if is_number(score):
            chunk = replace(chunk, score=float(score))  # type: ignore[arg-type]
        if is_whole(passage):
            return replace(chunk, passage=int(passage))  # type: ignore[arg-type]
        return self._numbered(chunk)

    def _numbered(self, chunk: Chunk) -> Chunk:
        numbers = self._numbers.setdefault(chunk.uri, {})
        return replace(chunk, passage=numbers.setdefault(chunk.text, len(numbers)))

    def _error(self, found: Any) -> SourceError:
        return SourceError(f"{self.name} returned {described(found)} among its {WANTED}")


def described(value: object) -> str:
    """What a function returned, for its author."""
    return "None" if value is None else f"{type(value).__name__} {short(value)[:80]}"
