"""The tables of a session's log. Functions here block.

meta       one row for each field of `SessionHeader`
chunks     chunks in the window and in the buffer
watches    options of named watches, as JSON
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pydantic import Field

from streamrag.core import Chunk
from streamrag.core.retrieval import checked_chunk
from streamrag.errors import ConfigurationError
from streamrag.sessions.question_options import WatchOptions
from streamrag.support.bounded_reading import as_dataclass, parse_json, without_lone_surrogates
from streamrag.support.messages import message_of

SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value)",
    "CREATE TABLE chunks (number INTEGER PRIMARY KEY, text, uri, title, passage, score)",
    "CREATE TABLE watches (name TEXT PRIMARY KEY, options)",
)

CHUNK_COLUMNS = ("text", "uri", "title", "passage", "score")

MAX_NUMBER = 1 << 52
"""Bound on all counts, below SQLite's limit. A log with a larger number is damaged."""

LoggedCount = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """The options and counts from which a session resumes."""

    system: str
    window_tokens: Annotated[int, Field(ge=1)]
    slide_share: Annotated[float, Field(gt=0, lt=1)]
    owner: str = ""
    num_appended: LoggedCount = 0
    num_dropped: LoggedCount = 0
    num_slid: LoggedCount = 0
    num_events: LoggedCount = 0
    """Upper bound of the event numbers that readers may have received."""
    frozen: str | None = None
    """The system text that replaced `system`; None if it was never replaced."""


@dataclass(frozen=True, slots=True)
class LogContents:
    """The whole contents of a log."""

    header: SessionHeader
    chunks: dict[int, Chunk] = field(default_factory=dict)
    """Chunks by number, in order."""
    watches: dict[str, WatchOptions] = field(default_factory=dict)
    """Options of named watches, by name."""

    @property
    def system(self) -> str:
        """The newest system text."""
        return self.header.system if self.header.frozen is None else self.header.frozen


@dataclass(frozen=True, slots=True)
class LogState:
    """State of a session's log."""

    is_resumed: bool = False
    """Whether the session was resumed from it."""
    flushed: int = 0
    """The newest version that is on disk."""
    num_failures: int = 0
    """Number of failed attempts to write."""
    error: str | None = None
    """The reason why the last attempt to write failed; None if it succeeded. The session continues, and it is tried
    again."""


def write_contents(connection: sqlite3.Connection, contents: LogContents, before: LogContents | None) -> None:
    """Write what differs between `before`, a log's contents, and `contents`, in one transaction. `before` is None for a
    new log. A chunk whose number is in both is left as it is.

    :raises sqlite3.Error: nothing was changed.
    """
    old_meta = {} if before is None else asdict(before.header)
    old_chunks, old_watches = ({}, {}) if before is None else (before.chunks, before.watches)
    meta = [pair for pair in asdict(contents.header).items() if pair not in old_meta.items()]
    gone = [(number,) for number in old_chunks.keys() - contents.chunks.keys()]
    new = [
        (number, *(getattr(contents.chunks[number], name) for name in CHUNK_COLUMNS))
        for number in sorted(contents.chunks.keys() - old_chunks.keys())
    ]
    ended = [(name,) for name in old_watches if name not in contents.watches]
    watches = [
        (name, encode_watch(watch)) for name, watch in contents.watches.items() if old_watches.get(name) is not watch
    ]
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement, rows in (
            ("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta),
            ("DELETE FROM chunks WHERE number = ?", gone),
            ("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", new),
            ("DELETE FROM watches WHERE name = ?", ended),
            ("INSERT OR REPLACE INTO watches VALUES (?, ?)", watches),
        ):
            connection.executemany(
                statement, ([without_lone_surrogates(v) if isinstance(v, str) else v for v in row] for row in rows)
            )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def read_contents(connection: sqlite3.Connection) -> LogContents:
    """Check the database's integrity, and return the validated header, chunks in order, and watches of a log.

    :raises ValueError, sqlite3.Error: the log is damaged.
    """
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise ValueError(verdict)
    header = read_header_rows(connection)
    chunks: dict[int, Chunk] = {}
    for number, *values in connection.execute(f"SELECT number, {', '.join(CHUNK_COLUMNS)} FROM chunks ORDER BY number"):
        with _located(f"chunk {number}"):
            if not 1 <= number <= header.num_appended:
                raise ValueError(f"only {header.num_appended} were appended")
            chunks[number] = checked_chunk(as_dataclass(Chunk, dict(zip(CHUNK_COLUMNS, values, strict=True))))
    watches: dict[str, WatchOptions] = {}
    for name, options in connection.execute("SELECT name, options FROM watches ORDER BY rowid"):
        with _located(f"watch {name!r:.80}"):
            if not isinstance(name, str) or not isinstance(options, str):
                raise ValueError("its name or its options are no text")
            watches[name] = watch = _decode_watch(name, options)
            watch.parse()
    return LogContents(header, chunks, watches)


def read_header_rows(connection: sqlite3.Connection) -> SessionHeader:
    """Read and validate a log's header; raise ValueError or sqlite3.Error if it is damaged."""
    rows = connection.execute("SELECT name, value FROM meta LIMIT 100")
    with _located("meta"):
        return as_dataclass(SessionHeader, {str(name): value for name, value in rows})


def encode_watch(watch: WatchOptions) -> str:
    """Return a watch without its name as JSON; raise ConfigurationError if no valid watch can be read back from it."""
    try:
        values = asdict(watch)
        text = json.dumps({name: value for name, value in values.items() if name != "name"})
        _decode_watch(watch.name or "", text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the watch {watch.name!r:.80} cannot be kept in the session's log: {message_of(error):.300}. Leave its "
            "parameters plain, or watch without a name"
        ) from error
    return text


def _decode_watch(name: str, options: str) -> WatchOptions:
    """Return the watch of this name from its options as JSON; raise ValueError if they are invalid."""
    values = parse_json(options)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return as_dataclass(WatchOptions, {**values, "name": name})


@contextmanager
def _located(place: str) -> Iterator[None]:
    """Put `place` in front of the message of a ValueError in the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
