"""The lines of a session's log: what they say, written and read. Blocking.

{"format": "streamrag-session", "version": 1, "system": "...", "window_tokens": 32000, "num_appended": 16, ...}
{"number": 17, "text": "...", "uri": "..."}
{"dropped": 17}
{"watch": "alarm", "question": "Any reading over 90?", "answers": ["yes", "no"], "priority": 1, ...}
{"unwatched": "alarm"}
{"num_events": 2048}
{"frozen": 18, "system": "..."}
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from streamrag.core import Chunk, SamplingParams
from streamrag.errors import ConfigurationError, SessionLogError
from streamrag.retrieving import MAX_COUNT
from streamrag.sessions.asking import Asked, asked
from streamrag.sessions.buffer import Numbered
from streamrag.sessions.choosing import DECISIVE_GAP
from streamrag.support.bounded_reading import as_dataclass, lines_of, parse_json
from streamrag.support.messages import message_of

FORMAT = "streamrag-session"
VERSION = 1

MAX_CHARACTERS = 1_000_000
"""Of one chunk's texts: a line of it is one that is read again."""
MAX_LINE_BYTES = 16_000_000
"""A character that is no ASCII takes up to twelve."""

MAX_NUMBER = 1 << 52
"""Above all numbers that a session counts to, and far below what JSON has room for: a log that has more is damaged."""

Count = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]


@dataclass(frozen=True, slots=True)
class Header:
    """How a session is made again, and what it had counted when its log was last written anew."""

    system: str
    window_tokens: Annotated[int, Field(ge=1)]
    slide_share: Annotated[float, Field(gt=0, lt=1)]
    owner: str = ""
    num_appended: Count = 0
    num_dropped: Count = 0
    num_slid: Count = 0
    num_events: Count = 0
    frozen: str | None = None
    """The system text that took the place of `system`, if one did."""
    format: Literal["streamrag-session"] = "streamrag-session"
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class KeptWatch:
    """A watched question as it is registered again. Its fields are those of `Session.watch`."""

    watch: Annotated[str, Field(min_length=1)]
    """Its name."""
    question: str
    answers: tuple[str, ...] = ()
    every_s: Annotated[float, Field(ge=0)] = 0.0
    priority: int = 0
    with_gap: bool = False
    decisive_gap: float = DECISIVE_GAP
    params: SamplingParams = field(default_factory=SamplingParams)

    def asked(self) -> Asked:
        """The question.

        :raises ConfigurationError: it cannot work.
        """
        return asked(self.question, self.answers, self.params, self.with_gap, self.decisive_gap)


@dataclass(frozen=True, slots=True)
class Dropped:
    """The chunk of this number was, before it came into the window."""

    dropped: Annotated[int, Field(ge=1, lt=MAX_NUMBER)]


@dataclass(frozen=True, slots=True)
class Unwatched:
    """The watch of this name has ended."""

    unwatched: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """Events up to this number may have been told."""

    num_events: Count


@dataclass(frozen=True, slots=True)
class Frozen:
    """The version of this number has another system text."""

    frozen: Annotated[int, Field(ge=1, lt=MAX_NUMBER)]
    system: str


Entry: TypeAlias = Numbered | Dropped | KeptWatch | Unwatched | Reserved | Frozen


@dataclass(frozen=True, slots=True)
class Logged:
    """What a log holds."""

    header: Header
    chunks: list[Numbered]
    watches: dict[str, KeptWatch]
    system: str
    """The newest."""
    num_appended: int
    num_dropped: int
    num_events: int
    is_torn: bool
    """Whether its last line was not finished; that is left out."""


@dataclass(frozen=True, slots=True)
class _Appended:
    number: Annotated[int, Field(ge=1, lt=MAX_NUMBER)]
    text: str
    uri: str = ""
    title: str = ""
    passage: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    score: float | None = None


def read(path: Path, blocks: Iterator[bytes]) -> Logged | None:
    """What the blocks of this file hold; None if that is nothing.

    :raises SessionLogError: they are damaged, or no log.
    """
    chunks: dict[int, Chunk] = {}
    watches: dict[str, KeptWatch] = {}
    header: Header | None = None
    is_torn, frozen = False, None
    num_lines = newest = num_dropped = num_events = 0
    try:
        for line in lines_of(blocks, MAX_LINE_BYTES):
            num_lines += 1
            if header is None:
                header = header_of(path, line)
                num_dropped, num_events, frozen = header.num_dropped, header.num_events, header.frozen
                continue
            if not line.endswith(b"\n"):
                is_torn = True
                break
            match _entry(line):
                case Dropped(number):
                    num_dropped += 1
                    chunks.pop(number, None)
                case KeptWatch() as kept:
                    kept.asked()
                    watches[kept.watch] = kept
                case Unwatched(name):
                    watches.pop(name, None)
                case Reserved(num_events):
                    pass
                case Frozen(number, frozen):
                    newest = _later(number, newest)
                case entry:
                    newest = _later(entry.number, newest)
                    chunks[entry.number] = Chunk(entry.text, entry.uri, entry.title, entry.passage, entry.score)
    except SessionLogError:
        raise
    except ValueError as error:
        raise SessionLogError(
            f"{path}, line {num_lines}, is damaged: {error}. Nothing was changed. Move the file away to begin anew, or "
            "take that line out"
        ) from error
    if header is None:
        return None
    numbered = [Numbered(number, chunk) for number, chunk in chunks.items()]
    system = header.system if frozen is None else frozen
    newest = max(header.num_appended, newest)
    return Logged(header, numbered, watches, system, newest, num_dropped, num_events, is_torn)


def _later(number: int, newest: int) -> int:
    if number <= newest:
        raise ValueError(f"version {number} stands behind version {newest}")
    return number


def header_of(path: Path, line: bytes) -> Header:
    """What the first line of this file says.

    :raises SessionLogError: it is damaged, or no log.
    """
    try:
        values = parse_json(line)
        if not line.endswith(b"\n") or not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("its first line does not say so")
        if isinstance(version := values.get("version"), int) and version > VERSION:
            raise SessionLogError(f"{path} was written by a newer streamrag: update this one")
        return as_dataclass(Header, values)
    except SessionLogError:
        raise
    except ValueError as error:
        raise SessionLogError(f"{path} is no log of a session: {error}. Nothing was changed") from error


_Read: TypeAlias = _Appended | Dropped | KeptWatch | Unwatched | Reserved | Frozen

_KINDS: Mapping[str, type[_Read]] = {
    "dropped": Dropped,
    "watch": KeptWatch,
    "unwatched": Unwatched,
    "num_events": Reserved,
    "frozen": Frozen,
}
"""What an entry is, by the field that only its kind has; else it is a chunk."""


def _entry(line: bytes) -> _Read:
    values = parse_json(line)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return as_dataclass(next((_KINDS[name] for name in _KINDS if name in values), _Appended), values)


def line_of(entry: Header | Entry) -> bytes:
    """As it is written."""
    if isinstance(entry, Numbered):
        values = {name: getattr(entry.chunk, name) for name in ("uri", "title", "passage", "score")}
        given = {
            name: value for name, value in values.items() if value not in ("", None) and (name, value) != ("passage", 0)
        }
        fields = {"number": entry.number, "text": entry.chunk.text, **given}
    else:
        fields = asdict(entry)
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def num_characters_of(watch: KeptWatch) -> int:
    """As a line of the log.

    :raises ConfigurationError: its parameters cannot be one.
    """
    try:
        line = line_of(watch)
        as_dataclass(KeptWatch, parse_json(line))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the watch {watch.watch!r:.80} cannot be kept in the session's log: {message_of(error):.300}. Leave its "
            "parameters plain, or watch without a name"
        ) from error
    return len(line)
