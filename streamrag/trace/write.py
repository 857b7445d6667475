"""The writer of trace files, and the encoding of events that recorders share with it."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import parse_json, without_lone_surrogates
from streamrag.support.versions import __version__
from streamrag.trace.events import HintFields, LineError, finite
from streamrag.trace.file_schema import (
    READER_KEYS,
    AppendKeyLine,
    ChunkLine,
    EndLine,
    QueryLine,
    QuerySkippedLine,
    TextMode,
    TraceHeader,
    TraceLine,
    UpdateKeysLine,
    encode,
)
from streamrag.trace.files import replace_file
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedSkip, chunks_of

KEY_BYTES = 12  # bytes of a chunk's hash: large enough to exclude collisions

clean = without_lone_surrogates


def write_trace(
    trace: Trace, path: str | os.PathLike[str], *, text: TextMode = "full", overwrite: bool = False
) -> None:
    """Write a trace as one session, compressed by suffix with gzip or zstd. Times are rounded to a microsecond.

    The values of `provenance` must be JSON values. Keys are not changed, so each must identify the same tokens
    throughout the trace.

    :raises TraceError: the file exists, or cannot be written; or two chunks with one key differ in length.
    :raises MissingDependencyError: it is a .zst file, but zstandard is not installed.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise TraceError(f"{path} exists: choose another path, or allow overwriting")
    _check_lengths(trace)
    try:
        replace_file(path, map(encode, _lines(trace, text)))
    except ValidationError as error:
        raise TraceError(f"{path} cannot be written: {LineError(error, is_tagged=False)}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


def make_header(text: TextMode, tokenizer: str | None, provenance: Mapping[str, Any]) -> TraceHeader:
    """Return the header of a session that begins now, without READER_KEYS; raise TraceError for values not of JSON."""
    made = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "streamrag": __version__}
    kept = {name: value for name, value in provenance.items() if name not in READER_KEYS}
    try:
        kept = parse_json(json.dumps(kept))
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"provenance={kept!r} must have JSON values only: {error}") from error
    return TraceHeader(text=text, tokenizer=tokenizer and clean(tokenizer), provenance=made | kept)


def chunk_key(text: str, uri: str, title: str, passage: int) -> str:
    """Return the key of a recorded chunk: a hash of everything that determines its tokens."""
    content = json.dumps([text, uri, title, passage]).encode()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).hexdigest()


def seconds(value: float) -> float:
    """Return a time for a trace file: rounded to a microsecond, and not negative."""
    return round(max(value, 0.0), 6)


class SessionEncoder:
    """An encoder of one session's events, which defines each chunk before its first use."""

    def __init__(self, text: TextMode) -> None:
        self._text = text
        self._defined: set[str] = set()

    def encode(self, query_id: str, event: TracedEvent | TracedSkip) -> Iterator[TraceLine]:
        """Yield the lines of an event: definitions of new chunks, and the event itself."""
        at_s = seconds(event.at_s)
        if isinstance(event, TracedSkip):
            yield QuerySkippedLine(query=query_id, at_s=at_s, uri=clean(event.uri), reason=clean(event.reason))
            return
        chunks = chunks_of(event)
        for chunk in chunks:
            if chunk.key not in self._defined:
                self._defined.add(chunk.key)
                yield self._definition(chunk)
        keys, scores = tuple(chunk.key for chunk in chunks), tuple(finite(chunk.score) for chunk in chunks)
        hint = HintFields.of(event.hint)
        if isinstance(event, TracedAppend):
            yield AppendKeyLine(query=query_id, at_s=at_s, key=keys[0], score=scores[0], hint=hint)
        else:
            known = scores if any(score is not None for score in scores) else None
            yield UpdateKeysLine(query=query_id, at_s=at_s, keys=keys, scores=known, hint=hint)

    def _definition(self, chunk: TracedChunk) -> ChunkLine:
        """Return the line that defines a chunk, with its text, or only the text's length."""
        full = chunk.text if self._text == "full" else None
        num_chars = chunk.num_chars if chunk.text is None else len(chunk.text)
        return ChunkLine(
            key=chunk.key,
            num_tokens=chunk.num_tokens,
            num_chars=None if full is not None else num_chars,
            text=None if full is None else clean(full),
            uri=clean(chunk.uri),
            title=clean(chunk.title),
            passage=chunk.passage,
        )


def _lines(trace: Trace, text: TextMode) -> Iterator[TraceLine]:
    """Yield a trace as one session that begins now: a header; for each query its line, its events by time, its end."""
    yield make_header(text, trace.provenance.get("tokenizer"), trace.provenance)
    encoder = SessionEncoder(text)
    for query in trace.queries:
        query_id = clean(query.query_id)
        yield QueryLine(id=query_id, arrival_s=seconds(query.arrival_s), text=clean(query.text))
        for event in sorted((*query.events, *query.skipped), key=lambda event: event.at_s):
            yield from encoder.encode(query_id, event)
        yield EndLine(
            query=query_id,
            end_s=seconds(query.end_s),
            outcome=query.outcome,
            error=clean(query.error) or None,
            cut_short=None if query.cut_short is None else clean(query.cut_short),
            num_output_tokens=query.num_output_tokens,
        )


def _check_lengths(trace: Trace) -> None:
    """Raise TraceError if two chunks of the trace with one key have different numbers of tokens."""
    known: dict[str, int] = {}
    for query in trace.queries:
        for event in query.events:
            for chunk in chunks_of(event):
                if (num_tokens := known.setdefault(chunk.key, chunk.num_tokens)) != chunk.num_tokens:
                    raise TraceError(
                        f"query {query.query_id!r}: chunk {chunk.key!r} has {chunk.num_tokens} tokens here, and "
                        f"{num_tokens} elsewhere: a key must identify the same tokens"
                    )
