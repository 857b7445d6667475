"""Traces are written as trace files; and the lines that recorders write."""

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
from streamrag.trace.files import replace_file
from streamrag.trace.lines import (
    READER_KEYS,
    AppendKeyLine,
    ChunkLine,
    EndLine,
    Header,
    Line,
    QueryLine,
    QuerySkippedLine,
    TextMode,
    UpdateKeysLine,
    encode,
)
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedSkip

KEY_BYTES = 12
"""Bytes of a hash: enough for any number of chunks that fits on a disk."""

clean = without_lone_surrogates


def write_trace(
    trace: Trace, path: str | os.PathLike[str], *, text: TextMode = "full", overwrite: bool = False
) -> None:
    """Write a trace as one session, as gzip or zstd by suffix; times are rounded to a microsecond.

    `provenance` must be plain values, for JSON. Keys are written as they are, so a key must stand for the same tokens
    everywhere in the trace.

    :raises TraceError: the file exists, or cannot be written; or a key stands for two lengths.
    :raises MissingDependencyError: it is a .zst file, and zstandard is not installed.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise TraceError(f"{path} exists: name another file, or say that it may be overwritten")
    _check_lengths(trace)
    try:
        replace_file(path, map(encode, _lines(trace, text)))
    except ValidationError as error:
        raise TraceError(f"{path} cannot be written: {LineError(error, is_tagged=False)}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


def make_header(text: TextMode, tokenizer: str | None, provenance: Mapping[str, Any]) -> Header:
    """Return the first line of a session that begins now.

    :raises TraceError: `provenance` is not plain values.
    """
    made = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "streamrag": __version__}
    kept = {name: value for name, value in provenance.items() if name not in READER_KEYS}
    try:
        kept = parse_json(json.dumps(kept))
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"provenance={kept!r} must be plain values, for JSON: {error}") from error
    return Header(text=text, tokenizer=tokenizer and clean(tokenizer), provenance=made | kept)


def chunk_key(text: str, uri: str, title: str, passage: int) -> str:
    """Return the key of a recorded chunk: a hash of all that its tokens depend on."""
    content = json.dumps([text, uri, title, passage]).encode()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).hexdigest()


def seconds(value: float) -> float:
    """Return a time as it is written: rounded to a microsecond, and not negative."""
    return round(max(value, 0.0), 6)


class SessionEncoder:
    """The lines of one session's events. Each chunk is defined before the first line that names it."""

    def __init__(self, text: TextMode) -> None:
        self._text = text
        self._defined: set[str] = set()

    def encode(self, query_id: str, event: TracedEvent | TracedSkip) -> Iterator[Line]:
        """Yield the lines of an event: of chunks that are new in the session, then of the event itself."""
        at_s = seconds(event.at_s)
        if isinstance(event, TracedSkip):
            yield QuerySkippedLine(query=query_id, at_s=at_s, uri=clean(event.uri), reason=clean(event.reason))
            return
        chunks = (event.chunk,) if isinstance(event, TracedAppend) else event.chunks
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


def _lines(trace: Trace, text: TextMode) -> Iterator[Line]:
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
    """Check that each key stands for one number of tokens.

    :raises TraceError: a key stands for two.
    """
    known: dict[str, int] = {}
    for query in trace.queries:
        for event in query.events:
            for chunk in (event.chunk,) if isinstance(event, TracedAppend) else event.chunks:
                if (num_tokens := known.setdefault(chunk.key, chunk.num_tokens)) != chunk.num_tokens:
                    raise TraceError(
                        f"query {query.query_id!r}: chunk {chunk.key!r} has {chunk.num_tokens} tokens, and had "
                        f"{num_tokens} before: one key, the same tokens"
                    )
