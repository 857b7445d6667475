"""The events that sources yield: chunks of retrieved text, and changes of the context."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage of retrieved text, and where it came from.

    Two chunks with the same `uri` and `passage` are from the same place; two equal chunks also have the same text.
    """

    text: str
    uri: str
    """URL or path of the document."""
    title: str = ""
    passage: int = 0
    """Number of the passage within its document, from 0."""
    score: float | None = None
    """The retriever's own score; larger is better."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A retriever's forecast of the chunks still to come. It only affects scheduling, never the answer."""

    num_chunks: int | None = None
    """Chunk events still to come after this one."""
    end_s: float | None = None
    """Seconds from this event until retrieval is expected to end."""


@dataclass(frozen=True, slots=True)
class Append:
    """The context grows by one chunk, at its end."""

    chunk: Chunk
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """The context is replaced by these chunks, in prompt order."""

    chunks: tuple[Chunk, ...]
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A result that retrieval could not use: an unreachable page, a wrong type, a limit that was reached."""

    uri: str
    reason: str


@dataclass(frozen=True, slots=True)
class CutShort:
    """Retrieval ends early: its time is up, or a resource that it needs is busy.

    The chunks so far are usable, but relevant ones may be missing.
    """

    reason: str


SourceEvent: TypeAlias = Append | Update | Skipped | CutShort
