"""Conversion of the passages that users' functions return to chunks."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from streamrag.core import Chunk
from streamrag.core.retrieval import BlankChunks
from streamrag.errors import SourceError
from streamrag.support.messages import is_number, is_whole, short_repr

WANTED = "passages: str, Chunk, (text, uri), a mapping with text, or an object with page_content and metadata"
TEXTS = ("text", "page_content", "content")
URIS = ("uri", "url", "source")  # keys of the text and the uri in mappings and metadata; the first that exists is used


class PassageReader:
    """A converter for the passages that the function `name` returns for one query.

    Passages without a number are numbered within their document; equal texts of a document get the same number.
    `skip_blank` yields an event with a `Skipped` in place of each passage without text, which may be None in a mapping.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._numbers: dict[str, dict[str, int]] = {}
        self.skip_blank = BlankChunks().skip

    def chunk(self, passage: Any) -> Chunk:
        """Convert one passage in a form of `WANTED` to a numbered chunk, or raise SourceError; a Chunk stays as is."""
        match passage:
            case Chunk():
                return passage
            case str():
                return self._number(Chunk(passage, self.name))
            case (str(text), str(uri)):
                return self._number(Chunk(text, uri))
            case Mapping() if any(key in passage for key in TEXTS):
                return self._from_fields(passage, text_of(passage))
            case object(page_content=str(text)):
                return self._from_fields(getattr(passage, "metadata", None) or {}, text)
        raise self._error(passage)

    def _from_fields(self, fields: Mapping[str, Any], text: Any) -> Chunk:
        """Make a chunk of `text`, with URI and title as str, and with score and passage number if they are valid.

        By default, the URI is the function's name, and the number that of an equal text of the document, or else the
        next one.

        :raises SourceError: `text` is no str.
        """
        if not isinstance(text, str):
            raise self._error(fields)
        uri = str(next((fields[key] for key in URIS if fields.get(key)), self.name))
        chunk = Chunk(text, uri, str(fields.get("title") or ""))
        score, passage = fields.get("score"), fields.get("passage")
        if is_number(score):
            chunk = replace(chunk, score=float(score))  # type: ignore[arg-type]
        if is_whole(passage):
            return replace(chunk, passage=int(passage))  # type: ignore[arg-type]
        return self._number(chunk)

    def _number(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the number of its text within its document, by first appearance."""
        numbers = self._numbers.setdefault(chunk.uri, {})
        return replace(chunk, passage=numbers.setdefault(chunk.text, len(numbers)))

    def _error(self, value: Any) -> SourceError:
        return SourceError(f"{self.name} returned {describe_result(value)} among its {WANTED}")


def text_of(fields: Mapping[str, Any]) -> Any:
    """Return the first value of `TEXTS` that is not None, else ""."""
    return next((fields[key] for key in TEXTS if fields.get(key) is not None), "")


def is_collection(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether `value` may hold several passages; an iterable that is a text or a passage itself does not."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Chunk)


def describe_result(value: object) -> str:
    """Return the type and the beginning of a function's result, for a message to the function's author."""
    return "None" if value is None else f"{type(value).__name__} {short_repr(value)[:80]}"
