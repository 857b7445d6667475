"""Traces become trace files; and the lines of which recorders make them."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamrag.core import Hint
from streamrag.errors import TraceError
from streamrag.support.bounded_reading import parse_json, without_lone_surrogates
from streamrag.trace.files import replace_file
from streamrag.trace.lines import (
    OF_THE_READER,
    AppendLine,
    ChunkLine,
    EndLine,
    Header,
    Line,
    QueryLine,
    SkippedLine,
    TextMode,
    UpdateLine,
    encode,
    first_problem,
    hint_fields,
)
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedSkip
from streamrag.versions import __version__

KEY_BYTES = 12
"""Bytes of a hash: enough for any number of chunks that fits on a disk."""

clean = without_lone_surrogates


def write_trace(
    trace: Trace, path: str | os.PathLike[str], *, text: TextMode = "full", overwrite: bool = False
) -> None:
    """Write a trace as one session, gzip or zstd by suffix; reading it gives the same trace, times to a microsecond.

    `provenance` must be plain values, for JSON. A key is written as it is, so it must stand for the same tokens
    everywhere in the trace.

    :raises TraceError: the file exists, or cannot be written; or a key stands for two lengths.
    :raises MissingDependencyError: it is a .zst file, and zstandard is not installed.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise TraceError(f"{path} exists: name another file, or say that it may be overwritten")
    try:
        replace_file(path, map(encode, _lines(trace, text)))
    except ValidationError as error:
        raise TraceError(f"{path} cannot be written: {first_problem(error)}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


def make_header(text: TextMode, tokenizer: str | None, provenance: Mapping[str, Any]) -> Header:
    """The first line of a session that begins now.

    :raises TraceError: `provenance` is not plain values.
    """
    made = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "streamrag": __version__}
    kept = {name: value for name, value in provenance.items() if name not in OF_THE_READER}
    try:
        kept = parse_json(json.dumps(kept))
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"provenance={kept!r} must be plain values, for JSON: {error}") from error
    return Header(text=text, tokenizer=tokenizer and clean(tokenizer), provenance=made | kept)


def chunk_key(text: str, uri: str, title: str, passage: int) -> str:
    """The key of a recorded chunk: a hash of all that its tokens depend on."""
    content = json.dumps([text, uri, title, passage]).encode()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).hexdigest()


def seconds(value: float) -> float:
    """To the microsecond."""
    return round(max(value, 0.0), 6)


def event_line(
    query_id: str, at_s: float, keys: Sequence[str], scores: Sequence[float | None], hint: Hint | None, *, appends: bool
) -> Line:
    """The line of a chunk event."""
    finite = tuple(score if score is not None and isfinite(score) else None for score in scores)
    fields = hint_fields(hint)
    if appends:
        return AppendLine(query=query_id, at_s=seconds(at_s), key=keys[0], score=finite[0], hint=fields)
    known = finite if any(score is not None for score in finite) else None
    return UpdateLine(query=query_id, at_s=seconds(at_s), keys=tuple(keys), scores=known, hint=fields)


def chunk_line(chunk: TracedChunk, text: TextMode) -> ChunkLine:
    """The definition of a chunk, with its text or only its length."""
    full = chunk.text if text == "full" else None
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
    defined: dict[str, int] = {}
    for query in trace.queries:
        query_id = clean(query.query_id)
        yield QueryLine(id=query_id, arrival_s=seconds(query.arrival_s), text=clean(query.text))
        for event in sorted((*query.events, *query.skipped), key=lambda event: event.at_s):
            if isinstance(event, TracedSkip):
                yield SkippedLine(
                    query=query_id, at_s=seconds(event.at_s), uri=clean(event.uri), reason=clean(event.reason)
                )
                continue
            appends = isinstance(event, TracedAppend)
            chunks = (event.chunk,) if isinstance(event, TracedAppend) else event.chunks
            for chunk in chunks:
                if chunk.key not in defined:
                    yield chunk_line(chunk, text)
                if defined.setdefault(chunk.key, chunk.num_tokens) != chunk.num_tokens:
                    raise TraceError(
                        f"query {query_id!r}: chunk {chunk.key!r} has {chunk.num_tokens} tokens, and had "
                        f"{defined[chunk.key]} before: one key, the same tokens"
                    )
            keys, scores = [chunk.key for chunk in chunks], [chunk.score for chunk in chunks]
            yield event_line(query_id, event.at_s, keys, scores, event.hint, appends=appends)
        yield EndLine(
            query=query_id,
            end_s=seconds(query.end_s),
            outcome=query.outcome,
            error=clean(query.error) or None,
            cut_short=None if query.cut_short is None else clean(query.cut_short),
            num_output_tokens=query.num_output_tokens,
        )
