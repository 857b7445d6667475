"""Encode the events of a query, which `streamrag.telemetry` defines, as JSON in events of SSE, and send them.

    event: chunk_arrived
    data: {"at_s": 0.12, "chunk": {"text": "...", "uri": "...", "title": "...", "passage": 0, "score": null}}

The name of an event is that of its class, in snake case. `answered` or `error` is the last.
"""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from streamrag.core import Chunk
from streamrag.serve.connections.json_body import encode_json
from streamrag.serve.connections.sse import Produce, Write, format_event, respond
from streamrag.serve.failures import Failure, failure_of
from streamrag.serve.service import Service
from streamrag.telemetry import (
    Answer,
    Answered,
    ContextChanged,
    DraftChanged,
    QueryEvent,
    SourceFailed,
    TokensGenerated,
)

PRIVATE_FIELDS = ("token_ids", "record", "source_error", "submitted_s", "alternatives", "prompt_logprobs")
"""Fields of an answer that are not sent, or not as they are."""

_INNER_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


async def write_events(write: Write, events: AsyncIterator[QueryEvent]) -> None:
    """Write the events of one query in order, each changed context as a splice of the previous one."""
    context: tuple[Chunk, ...] = ()
    async for event in events:
        await write(encode_sse(event, context))
        if isinstance(event, ContextChanged):
            context = event.chunks


def encode_sse(event: QueryEvent, context: tuple[Chunk, ...] = ()) -> bytes:
    """Return an event as SSE; `context` is the one before it."""
    return format_event(encode_json(event_values(event, context)), event=event_name(event))


def event_name(event: QueryEvent) -> str:
    """Return an event's name, such as "chunk_arrived"."""
    return _INNER_CAPITAL.sub("_", type(event).__name__).lower()


def event_values(event: QueryEvent, context: tuple[Chunk, ...] = ()) -> dict[str, Any]:
    """Return an event's fields, for JSON, without log probabilities, and an answer's without `PRIVATE_FIELDS`.

    An answer's token counts are those of its `usage`: null where unknown. Errors of sources have their public message.

    A changed context is a splice of `context`: after its first `at` chunks, `num_removed` are removed and `chunks`
    inserted. These were sent when they arrived, so `uri` and `passage` identify them.
    """
    if isinstance(event, SourceFailed):
        return {"at_s": event.at_s, "error": failure_of(event.error).message}
    if isinstance(event, ContextChanged):
        values = asdict(replace(event, chunks=()))
        del values["chunks"]
        return {**values, "splice": _splice(context, event.chunks)}
    if isinstance(event, DraftChanged):
        return {"at_s": event.at_s, "text": event.text, "chunks": [_reference(chunk) for chunk in event.chunks]}
    if isinstance(event, Answered):
        answer = event.answer
        values = {name: value for name, value in asdict(answer).items() if name not in PRIVATE_FIELDS}
        values["source_error"] = answer.source_error and failure_of(answer.source_error).message
        values |= values.pop("usage")
        values["num_cached_tokens"] = None if answer.record is None else answer.record.num_from_cache
        return {"at_s": event.at_s, "answer": values}
    if isinstance(event, TokensGenerated):
        return {
            "at_s": event.at_s, "text": event.text, "token_ids": event.token_ids, "finish_reason": event.finish_reason,
        }  # fmt: skip
    return asdict(event)


def _splice(before: tuple[Chunk, ...], after: tuple[Chunk, ...]) -> dict[str, Any]:
    """Return where two contexts differ: the place, the number of chunks to remove there, and those to insert."""
    at = len(before)
    if after[:at] != before:  # the fast path: most contexts only grow
        at = _num_shared(before, after)
    num_last = _num_shared(before[at:][::-1], after[at:][::-1])
    chunks = [_reference(chunk) for chunk in after[at : len(after) - num_last]]
    return {"at": at, "num_removed": len(before) - at - num_last, "chunks": chunks}


def _reference(chunk: Chunk) -> dict[str, Any]:
    """Return what identifies a chunk that was sent when it arrived."""
    return {"uri": chunk.uri, "passage": chunk.passage}


def _num_shared(one: Sequence[Chunk], other: Sequence[Chunk]) -> int:
    """Count the leading chunks with equal `uri` and `passage`."""
    pairs = enumerate(zip(one, other, strict=False))
    differ = (i for i, (a, b) in pairs if (a.uri, a.passage) != (b.uri, b.passage))
    return next(differ, min(len(one), len(other)))


def encode_failure(failure: Failure) -> Sequence[bytes]:
    """Return the event `error` that ends a failed stream."""
    return [format_event(failure.json(), event="error")]


async def respond_with_events(
    request: Request, service: Service, produce: Produce, *, receive: Receive | None = None
) -> Response:
    """Respond with the events that `produce` writes. `receive` is as for `respond`."""
    timeout_s = service.limits.send_timeout_s
    return await respond(request, produce, on_failure=encode_failure, send_timeout_s=timeout_s, receive=receive)


async def wait_for_answer(
    query: AbstractAsyncContextManager[AsyncIterator[QueryEvent]], note: Callable[[QueryEvent], object] = id
) -> Answer:
    """Return the complete answer to a query, and pass each event before it to `note`. Raises the query's error, or
    RuntimeError if the query ends without an answer."""
    async with query as events:
        async for event in events:
            if isinstance(event, Answered):
                return event.answer
            note(event)
    raise RuntimeError("a query ended without an answer and without an error")
