"""Encodes the events of a query as numbered events of the protocol, and as the response object that they add up to."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from streamrag.core import Chunk, TokenUsage
from streamrag.serve.citation_marks import LONGEST_MARK, encode_annotation, file_id, file_name, find_marks
from streamrag.serve.failures import Failure
from streamrag.serve.protocols.chat.encoder import encode_passages
from streamrag.serve.protocols.responses.requests import CheckedRequest
from streamrag.telemetry import Answer, Answered, ContextComplete, QueryEvent, RetrievalStarted, TokensGenerated

ServerEvent = dict[str, Any]

ERROR_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""The protocol's error codes by type of failure; all others are "server_error"."""


class ResponseEncoder:
    """The encoder of one response. `response` is the complete object once the response has ended."""

    def __init__(self, request: CheckedRequest, model: str, base_url: str | None = None) -> None:
        self._request = request
        self._base_url = base_url
        self._num_events = 0
        self._search: dict[str, Any] | None = None
        self._message: dict[str, Any] | None = None
        self._text = ""
        self._annotations: list[dict[str, Any]] = []
        self._passages: Sequence[Chunk] = ()
        self.response = _response(request, model)
        self.num_shared = 0  # prompt tokens of earlier requests, which the engine's record does not count as cached

    @property
    def has_begun(self) -> bool:
        """Whether an event was encoded."""
        return self._num_events > 0

    def begin(self) -> list[ServerEvent]:
        """Return the first events of a response, "created" and "in_progress", both without output."""
        response = {**self.response, "output": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def encode(self, event: QueryEvent) -> list[ServerEvent]:
        """Return the events for the start or end of retrieval, text, or the answer; none for other events.

        The response's own first events are those of `begin`. A citation comes with the text that completes it.
        """
        match event:
            case RetrievalStarted(query=query):
                return self._begin_search(query)
            case ContextComplete(chunks=chunks):
                self._passages = chunks
                return self._end_search()
            case TokensGenerated(text=text) if text:
                return [*self._begin_message(), *self._add(text)]
            case Answered(answer=answer):
                return [*self._begin_message(), *self._complete(answer)]
        return []

    def complete_prepared(self, num_tokens: int | None) -> list[ServerEvent]:
        """Return the last events of a response without an answer, whose conversation is only prefilled."""
        self._end("completed", usage=_usage(TokenUsage(num_tokens, 0), self.num_shared))
        return [self._event("response.completed", response=self.response)]

    def fail(self, failure: Failure) -> list[ServerEvent]:
        """Mark the response and an unfinished search as failed, a message as incomplete; return the last event."""
        if self._search is not None and self._search["status"] != "completed":
            self._search["status"] = "failed"
        if self._message is not None:
            self._message.update(status="incomplete", content=[self._part()])
        error = {"code": ERROR_CODES.get(failure.type, "server_error"), "message": failure.message}
        self._end("failed", error=error)
        return [self._event("response.failed", response=self.response)]

    def _begin_search(self, query: str) -> list[ServerEvent]:
        """Add a search to the output, and return its events "added", "in_progress" and "searching"."""
        search_id, status = f"fs_{uuid.uuid4().hex}", "in_progress"
        self._search = {
            "id": search_id,
            "type": "file_search_call",
            "status": status,
            "queries": [query],
            "results": None,
        }
        at = {"output_index": 0, "item_id": search_id}
        events = [
            self._add_item(self._search),
            self._event("response.file_search_call.in_progress", **at),
            self._event("response.file_search_call.searching", **at),
        ]
        self._search["status"] = "searching"
        return events

    def _end_search(self) -> list[ServerEvent]:
        """Complete the search, with its results if wanted, and return "completed" and "done"; none without a search."""
        if self._search is None:
            return []
        self._search["status"] = "completed"
        if self._request.wants_results:
            self._search["results"] = [_result(number, chunk) for number, chunk in enumerate(self._passages, 1)]
        return [
            self._event("response.file_search_call.completed", output_index=0, item_id=self._search["id"]),
            self._event("response.output_item.done", output_index=0, item=dict(self._search)),
        ]

    def _begin_message(self) -> list[ServerEvent]:
        """Add an empty message to the output, and return the events for it and its text part; none if there is one."""
        if self._message is not None:
            return []
        message_id, status = f"msg_{uuid.uuid4().hex}", "in_progress"
        self._message = {"id": message_id, "type": "message", "role": "assistant", "status": status, "content": []}
        return [
            self._add_item(self._message),
            self._event("response.content_part.added", **self._at, part=self._part()),
        ]

    def _add_item(self, item: dict[str, Any]) -> ServerEvent:
        """Append an item to the response's output, and return its event. The event has a copy of the item."""
        self.response["output"].append(item)
        index = len(self.response["output"]) - 1
        return self._event("response.output_item.added", output_index=index, item=dict(item))

    def _add(self, text: str) -> list[ServerEvent]:
        """Add text of the answer, and return its event and those of the citations that it completes."""
        num_before = len(self._text)
        self._text += text
        events = [self._event("response.output_text.delta", **self._at, delta=text, logprobs=[])]
        for mark in find_marks(self._text, len(self._passages), max(0, num_before - LONGEST_MARK)):
            if mark.end <= num_before:
                continue
            annotation = encode_annotation(mark, self._passages, self._base_url)
            values = {**self._at, "annotation_index": len(self._annotations), "annotation": annotation}
            events.append(self._event("response.output_text.annotation.added", **values))
            self._annotations.append(annotation)
        return events

    def _complete(self, answer: Answer) -> list[ServerEvent]:
        """Return the last events of an answer, whose message must have begun, and complete the response with usage and
        passages: "incomplete" if `max_tokens` cut the answer."""
        assert self._message is not None
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        self._message.update(status=status, content=[self._part()])
        num_shared = self.num_shared if answer.unit == "tokens" else 0
        num_cached = max(num_shared, answer.record.num_from_cache if answer.record is not None else 0)
        self._end(
            status,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(answer.usage, num_cached),
            streamrag={"citations": encode_passages(answer)},
        )
        return [
            self._event("response.output_text.done", **self._at, text=self._text, logprobs=[]),
            self._event("response.content_part.done", **self._at, part=self._part()),
            self._event("response.output_item.done", output_index=self._at["output_index"], item=dict(self._message)),
            self._event(f"response.{status}", response=self.response),
        ]

    def _end(self, status: str, **values: Any) -> None:
        self.response.update(status=status, completed_at=int(time.time()) if status == "completed" else None, **values)

    @property
    def _at(self) -> dict[str, Any]:
        """The message's place in the output, as fields of its events."""
        assert self._message is not None
        return {"output_index": len(self.response["output"]) - 1, "item_id": self._message["id"], "content_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": list(self._annotations), "logprobs": []}

    def _event(self, kind: str, **values: Any) -> ServerEvent:
        """Return an event with the next sequence number, and the request's `stream_id` if it has one."""
        event = {"type": kind, "sequence_number": self._num_events, **values}
        if self._request.body.stream_id is not None:
            event["stream_id"] = self._request.body.stream_id
        self._num_events += 1
        return event


def _response(request: CheckedRequest, model: str) -> dict[str, Any]:
    """Return the response object of a request that begins: in progress, without output and usage."""
    body, params = request.body, request.params
    return {
        "id": request.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "store": request.is_stored,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _usage(usage: TokenUsage, num_cached: int) -> dict[str, Any] | None:
    """Return the numbers of tokens in the protocol's form, cached ones at most the prompt's; None if one is unknown."""
    if usage.num_prompt_tokens is None or usage.num_output_tokens is None:
        return None
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": min(num_cached, usage.num_prompt_tokens), "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_tokens,
    }


def _result(number: int, chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as a search result, with its passage number."""
    return {
        "file_id": file_id(chunk),
        "filename": file_name(chunk),
        "score": chunk.score,
        "text": chunk.text,
        "attributes": {"number": number, "uri": chunk.uri[:512], "title": chunk.title[:512]},
    }
