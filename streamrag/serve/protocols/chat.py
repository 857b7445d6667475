"""`POST /v1/chat/completions`, compatible with OpenAI's clients.

The last user message is the question, for which the service retrieves; the messages before it are history.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrag.core import MAX_INT, SamplingParams, Turn
from streamrag.query.options import QueryOptions
from streamrag.serve.citation_marks import url_citations
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import encode_json, read_body
from streamrag.serve.connections.sse import Write, respond, unless_disconnected
from streamrag.serve.failures import Failure, RequestError
from streamrag.serve.protocols.event_encoder import wait_for_answer
from streamrag.serve.request_fields import SAMPLING, parse_turn, refuse_fields, sampling, split_turns
from streamrag.serve.service import Service
from streamrag.telemetry import Answer, Answered, RetrievalStarted, TokensGenerated

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]


class Message(BaseModel):
    role: str
    content: Any = None


class StreamOptions(BaseModel):
    include_usage: bool = False


HARMLESS = frozenset((
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
))  # fmt: skip
"""Fields that do not change the answer and are ignored."""

EXTRA = {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
"""Fields that are passed to the engine unchanged."""


class ChatRequest(BaseModel):
    """A request as OpenAI defines it. Unsupported fields are refused, not ignored."""

    model_config = ConfigDict(extra="allow")

    messages: list[Message] = Field(min_length=1, max_length=1000)
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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, Bias] | None = Field(default=None, max_length=300)
    n: int | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: Any = None

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return the request's sampling parameters, `default`'s where it has none, as `sampling` does."""
        fields = self.model_dump(include=SAMPLING)
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        if isinstance(self.stop, str):
            fields["stop"] = (self.stop,)
        return sampling(default, **fields, extra=self.model_dump(include=EXTRA))

    def check(self) -> None:
        """Check that the service supports the request. Raises RequestError if it does not."""
        refused = {
            "n": self.n not in (None, 1),
            "response_format": (self.response_format or {}).get("type", "text") != "text",
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
        }
        refuse_fields(self, HARMLESS, refused)


def routes(service: Service) -> list[Route]:
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        body.check()
        check_model(service, body.model)
        turns = [parse_turn(each.role, each.content, f"messages.{i}") for i, each in enumerate(body.messages)]
        question, options = conversation_options(service, turns, "messages", body.params(service.params))
        encoder = ChatEncoder(service.model_name)
        query = service.events(request.scope[CALLER], "chat", question, **options)
        if not body.stream:
            return JSONResponse(encoder.whole(await unless_disconnected(wait_for_answer(query), request.receive)))
        with_usage = body.stream_options is not None and body.stream_options.include_usage

        async def produce(write: Write) -> None:
            async with query as events:
                async for event in events:
                    for chunk in encoder.chunks(event, with_usage=with_usage):
                        await write(ServerSentEvent(encode_json(chunk)))
            await write(ServerSentEvent("[DONE]"))

        timeout_s = service.limits.send_timeout_s
        return await respond(request, produce, on_failure=encode_failure, send_timeout_s=timeout_s)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def conversation_options(
    service: Service, turns: Sequence[Turn], param: str, params: SamplingParams
) -> tuple[str, QueryOptions]:
    """Return a conversation's question and query options. Raises RequestError unless it ends with a user's turn."""
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


def encode_failure(failure: Failure) -> Sequence[ServerSentEvent]:
    """Return the last event of a failed stream, for which OpenAI's client raises APIError."""
    return [ServerSentEvent(failure.json())]


class ChatEncoder:
    """The encoder of one chat completion, whole or in chunks."""

    def __init__(self, model: str) -> None:
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response without a stream."""
        message = {
            "role": "assistant",
            "content": answer.text,
            "refusal": None,
            "annotations": url_citations(answer.text, answer.citations),
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choice],
            "usage": encode_usage(answer),
            "streamrag": {"citations": encode_passages(answer)},
        }

    def chunks(self, event: object, *, with_usage: bool) -> list[dict[str, Any]]:
        """Return the chunks that `event` adds to a stream."""
        match event:
            case RetrievalStarted():  # signals the admission of the query
                return [self._chunk({"role": "assistant", "content": ""})]
            case TokensGenerated(text=text) if text:
                return [self._chunk({"content": text})]
            case Answered(answer=answer):
                annotations = url_citations(answer.text, answer.citations)
                last = self._chunk({"annotations": annotations} if annotations else {}, answer.finish_reason)
                last["streamrag"] = {"citations": encode_passages(answer)}
                usage = {**self._chunk({}), "choices": [], "usage": encode_usage(answer)}
                return [last, *([usage] if with_usage else [])]
        return []

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}


def encode_passages(answer: Answer) -> list[dict[str, Any]]:
    """Return the passages of the prompt without their text: an extension, for clients that show sources."""
    return [{"number": each.number, "uri": each.uri, "title": each.title} for each in answer.citations]


def encode_usage(answer: Answer) -> dict[str, Any] | None:
    """Return the token counts, or None if unknown. Tokens prefilled during retrieval do not count as cached."""
    usage = answer.usage
    if usage.num_tokens is None:
        return None
    num_cached = 0 if answer.record is None else min(answer.record.num_from_cache, answer.num_prompt_tokens)
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
