"""A query's events in the service's own form: one JSON object per event, for SSE.

    event: chunk_arrived
    data: {"at_s": 0.12, "chunk": {"text": "...", "uri": "...", "title": "...", "passage": 0, "score": null}}

The name of an event is that of its class in `streamrag.telemetry`, in small letters.
"""

import json
import re
from dataclasses import asdict, replace
from typing import Any

from streamrag.serve.failures import failure_of
from streamrag.telemetry import Answered, ContextChanged, Event, SourceFailed

_INNER_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def name_of(event: Event) -> str:
    """As in "chunk_arrived"."""
    return _INNER_CAPITAL.sub("_", type(event).__name__).lower()


def values_of(event: Event) -> dict[str, Any]:
    """Its fields, for JSON. An answer's token ids and the engine's record of single steps stay here.

    The chunks of a changed context have been told of when they arrived: `uri` and `passage` say which they are.
    """
    if isinstance(event, SourceFailed):
        return {"at_s": event.at_s, "error": failure_of(event.error).message}
    if isinstance(event, ContextChanged):
        chunks = [{"uri": chunk.uri, "passage": chunk.passage} for chunk in event.chunks]
        return {**asdict(replace(event, chunks=())), "chunks": chunks}
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


def json_of(values: Any) -> str:
    """In one line, with nothing that a reader of lines might take for the end of one."""
    return json.dumps(values, separators=(",", ":"))
