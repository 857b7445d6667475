"""`POST /v1/chat/completions`, compatible with OpenAI's clients.

The last user message is the question, for which the service retrieves; the messages before it are history.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrag.backends.tools.parser import AnswerReader
from streamrag.core import MAX_INT, SamplingParams, Turn
from streamrag.query.options import MAX_DRAFT, QueryOptions
from streamrag.serve.citation_marks import url_citations
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import RequestModel, encode_json, read_body
from streamrag.serve.connections.sse import EMPTY_LINES, Write, format_event, respond, unless_disconnected
from streamrag.serve.failures import Failure, RequestError
from streamrag.serve.protocols.event_encoder import wait_for_answer
from streamrag.serve.protocols.tool_calls import MAX_TOOLS, Tool, ToolCall, check_size, tool_query, uses_tools
from streamrag.serve.request_fields import SAMPLING, message_text, parse_turn, refuse_fields, sampling, split_turns
from streamrag.serve.service import Service
from streamrag.telemetry import Answer, Answered, RetrievalStarted, TokensGenerated

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]


class Message(RequestModel):
    role: str
    content: Any = None


class ChatMessage(Message):
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(default=None, max_length=128)


class Prediction(RequestModel):
    """A text that the answer may repeat. It changes no answer."""

    type: Literal["content"]
    content: Any


class StreamOptions(RequestModel):
    include_usage: bool = False


HARMLESS = frozenset((
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
))  # fmt: skip
"""Fields that do not change the answer and are ignored."""

EXTRA = {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
"""Fields that are passed to the engine unchanged."""


class ChatRequest(RequestModel):
    """A request as OpenAI defines it. Unsupported fields are refused, not ignored."""

    model_config = ConfigDict(extra="allow")

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, Bias] | None = Field(default=None, max_length=300)
    n: int | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), BeforeValidator(check_size)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _check_calls(cls, messages: Any) -> Any:
        if isinstance(messages, list):
            check_size([each.get("tool_calls") for each in messages if isinstance(each, dict)])
        return messages

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return `default` with the request's sampling parameters; `max_completion_tokens` overrides `max_tokens`.

        :raises ConfigurationError: a value is invalid.
        """
        fields = self.model_dump(include={*SAMPLING, "ignore_eos"})
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        if isinstance(self.stop, str):
            fields["stop"] = (self.stop,)
        return sampling(default, **fields, extra=self.model_dump(include=EXTRA))

    def check(self) -> None:
        """Raise RequestError for `n` other than 1, formats other than text, forced tools, and unknown fields that are
        set and not `HARMLESS`."""
        refused = {
            "n": self.n not in (None, 1),
            "response_format": (self.response_format or {}).get("type") not in (None, "text"),
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
        }
        refuse_fields(self, HARMLESS, refused)


def routes(service: Service) -> list[Route]:
    """Return `POST /v1/chat/completions`, which answers whole, or as SSE with [DONE] at the end if `stream` is set."""

    async def chat(request: Request) -> Response:
        """Check the request, answer it, and respond with one completion or a stream of chunks."""
        body = await read_body(request, ChatRequest)
        body.check()
        check_model(service, body.model)
        question, options, reader = chat_query(service, body)
        encoder = ChatEncoder(service.model_name, reader)
        query = service.events(request.scope[CALLER], "chat", question, **options)
        if not body.stream:
            answer = await unless_disconnected(wait_for_answer(query, encoder.delta), request.receive)
            return JSONResponse(encoder.whole(answer))
        with_usage = body.stream_options is not None and body.stream_options.include_usage

        async def produce(write: Write) -> None:
            async with query as events:
                async for event in events:
                    if isinstance(event, RetrievalStarted):
                        await write(EMPTY_LINES)  # begins the response, with nothing to take for the first token
                    for chunk in encoder.chunks(event, with_usage=with_usage):
                        await write(format_event(encode_json(chunk)))
            await write(format_event("[DONE]"))

        timeout_s = service.limits.send_timeout_s
        return await respond(request, produce, on_failure=encode_failure, send_timeout_s=timeout_s, ping=EMPTY_LINES)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def chat_query(service: Service, body: ChatRequest) -> tuple[str, QueryOptions, AnswerReader]:
    """Return the question, the options, and a reader of the answer, with tools if the request uses them.

    The beginning of `prediction` becomes the draft.

    :raises RequestError, ConfigurationError: messages, tools or values are invalid.
    """
    params = body.params(service.params)
    if uses_tools(body):
        question, options, reader = tool_query(service, body, params)
    else:
        turns = [parse_turn(each.role, each.content, f"messages.{i}") for i, each in enumerate(body.messages)]
        question, options = conversation_options(service, turns, "messages", params)
        reader = AnswerReader()
    if body.prediction is not None:
        options["draft"] = message_text(body.prediction.content, "prediction.content")[:MAX_DRAFT]
    return question, options, reader


def conversation_options(
    service: Service, turns: Sequence[Turn], param: str, params: SamplingParams
) -> tuple[str, QueryOptions]:
    """Return a conversation's question, and query options with its history; a system text follows the service's own.

    :raises RequestError: the last turn is not a user's.
    """
    system, history, question = split_turns(turns, param)
    options = QueryOptions(history=history, params=params)
    if system:
        options["system"] = service.system_text(system)
    return question, options


def check_model(service: Service, name: str | None) -> None:
    """Check the model's name in a request. Raises RequestError if the service has another model."""
    if name not in (None, "", service.model_name):
        message = f"there is no model {name!r:.80} here, only {service.model_name!r}"
        raise RequestError(message, status=404, code="model_not_found", param="model")


def encode_failure(failure: Failure) -> Sequence[bytes]:
    """Return the last event of a failed stream, for which OpenAI's client raises APIError."""
    return [format_event(failure.json())]


class ChatEncoder:
    """The encoder of one chat completion, whole or in chunks."""

    def __init__(self, model: str, reader: AnswerReader) -> None:
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._reader = reader
        self._has_begun = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response without a stream, after `delta` of all events; null content if only calls."""
        text, calls = self._reader.text, self._reader.calls
        message = {
            "role": "assistant",
            "content": text if text.strip() or not calls else None,
            "refusal": None,
            "annotations": url_citations(text, answer.citations),
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
            annotations = url_citations(self._reader.text, answer.citations)
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
