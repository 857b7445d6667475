"""A query's events in the service's own form: one JSON object per event, for SSE.

    event: chunk_arrived
    data: {"at_s": 0.12, "chunk": {"text": "...", "uri": "...", "title": "...", "passage": 0, "score": null}}

The name of an event is that of its class in `streamrag.telemetry`, in small letters.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from streamrag.core import Chunk
from streamrag.serve.failures import failure_of
from streamrag.telemetry import Answered, ContextChanged, Event, SourceFailed

_INNER_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def name_of(event: Event) -> str:
    """Return an event's name, as in "chunk_arrived"."""
    return _INNER_CAPITAL.sub("_", type(event).__name__).lower()


def values_of(event: Event, before: tuple[Chunk, ...] = ()) -> dict[str, Any]:
    """Return an event's fields, for JSON. An answer's token ids and the engine's record of single steps stay here.

    Of a changed context there is what differs from the one before, as a splice: behind its first `at` chunks,
    `num_removed` go and `chunks` come. These have been told of when they arrived: `uri` and `passage` say which they
    are.
    """
    if isinstance(event, SourceFailed):
        return {"at_s": event.at_s, "error": failure_of(event.error).message}
    if isinstance(event, ContextChanged):
        values = asdict(replace(event, chunks=()))
        del values["chunks"]
        return {**values, "splice": _splice(before, event.chunks)}
    if isinstance(event, Answered):
        answer = event.answer
        record = answer.record
        values = {
            name: value
            for name, value in asdict(answer).items()
            if name not in ("token_ids", "record", "source_error", "submitted_s")
        }
        values["source_error"] = answer.source_error and failure_of(answer.source_error).message
        values["num_output_tokens"] = len(answer.token_ids)
        values["num_cached_tokens"] = None if record is None else record.num_from_cache
        return {"at_s": event.at_s, "answer": values}
    return asdict(event)


def _splice(before: tuple[Chunk, ...], after: tuple[Chunk, ...]) -> dict[str, Any]:
    at = len(before)
    if after[:at] != before:  # mostly it has only grown, and that is quickly told
        at = _num_alike(before, after)
    num_behind = _num_alike(before[at:][::-1], after[at:][::-1])
    chunks = [{"uri": chunk.uri, "passage": chunk.passage} for chunk in after[at : len(after) - num_behind]]
    return {"at": at, "num_removed": len(before) - at - num_behind, "chunks": chunks}


def _num_alike(one: Sequence[Chunk], other: Sequence[Chunk]) -> int:
    """Count the leading chunks that are from the same place in both."""
    pairs = enumerate(zip(one, other, strict=False))
    differ = (i for i, (a, b) in pairs if (a.uri, a.passage) != (b.uri, b.passage))
    return next(differ, min(len(one), len(other)))


def json_of(values: Any) -> str:
    """Return values as JSON in one line, without any character that a reader might take for its end."""
    return json.dumps(values, separators=(",", ":"))
