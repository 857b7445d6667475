"""A chat completion as JSON, whole or in chunks."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from streamrag.backends.tools.parser import AnswerReader
from streamrag.serve.citation_marks import passage_annotations
from streamrag.telemetry import Answer, Answered, TokensGenerated


class ChatEncoder:
    """The encoder of one chat completion, whole or in chunks."""

    def __init__(self, model: str, reader: AnswerReader, base_url: str | None = None) -> None:
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._reader = reader
        self._base_url = base_url
        self._has_begun = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response without a stream, after `delta` of all events; null content if only calls."""
        text, calls = self._reader.text, self._reader.calls
        message = {
            "role": "assistant",
            "content": text if text.strip() or not calls else None,
            "refusal": None,
            "annotations": passage_annotations(text, answer.citations, self._base_url),
            **({"tool_calls": calls} if calls else {}),
        }
        finish_reason = self._reader.finish_reason(answer.finish_reason)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choice],
            "usage": encode_usage(answer),
            "streamrag": {"citations": encode_passages(answer)},
        }

    def chunks(self, event: object, *, with_usage: bool) -> list[dict[str, Any]]:
        """Return an event's chunks: the role before the first text, text and calls, last citations and wanted usage."""
        if isinstance(event, Answered):
            answer = event.answer
            annotations = passage_annotations(self._reader.text, answer.citations, self._base_url)
            finish_reason = self._reader.finish_reason(answer.finish_reason)
            last = self._chunk({"annotations": annotations} if annotations else {}, finish_reason)
            last["streamrag"] = {"citations": encode_passages(answer)}
            usage = {**self._chunk({}), "choices": [], "usage": encode_usage(answer)}
            return [*self._role(), last, *([usage] if with_usage else [])]
        delta = self.delta(event)
        return [*self._role(), self._chunk(delta)] if delta else []

    def _role(self) -> list[dict[str, Any]]:
        """Return the chunk with the role, once."""
        has_begun, self._has_begun = self._has_begun, True
        return [] if has_begun else [self._chunk({"role": "assistant", "content": ""})]

    def delta(self, event: object) -> dict[str, Any]:
        """Return what `event` adds to the message."""
        return self._reader.push(event.chunk) if isinstance(event, TokensGenerated) else {}

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}


def encode_passages(answer: Answer) -> list[dict[str, Any]]:
    """Return the passages of the prompt without their text: an extension, for clients that show sources."""
    return [{"number": each.number, "uri": each.uri, "title": each.title} for each in answer.citations]


def encode_usage(answer: Answer) -> dict[str, Any] | None:
    """Return the counts of tokens, with the draft's, or None if unknown. Cached ones are those of the prefix cache."""
    usage = answer.usage
    if usage.num_tokens is None:
        return None
    num_cached = 0 if answer.record is None else min(answer.record.num_from_cache, answer.num_prompt_tokens)
    draft = answer.draft
    num_accepted, num_verified = (draft.num_accepted, draft.num_verified) if draft else (0, 0)
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_verified - num_accepted,
        },
    }
