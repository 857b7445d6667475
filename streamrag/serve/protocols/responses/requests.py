"""What a client asks for, in the body of a POST or with `response.create`, and what of it this service does."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from streamrag.core import SamplingParams, Turn
from streamrag.serve.failures import RequestError
from streamrag.serve.protocols.chat import HARMLESS, check_model
from streamrag.serve.protocols.responses.states import State
from streamrag.serve.request_fields import refuse_fields, sampling, turn_of
from streamrag.serve.service import Service

INCLUDES = frozenset(
    {
        "file_search_call.results",
        # This service never has the rest, so that leaving them out is what they ask for:
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

MAX_ITEMS = 1000
"""Number of items in one request's input."""

MAX_TOOLS = 16_384
"""Characters of a request's tools as JSON: they stand in its response, and are held as objects meanwhile."""

Word = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Id = Annotated[str, Field(min_length=1, max_length=128)]


class CacheOptions(BaseModel):
    """Options of the prompt cache."""

    prewarm: bool | None = None


class ResponseRequest(BaseModel):
    """A request as OpenAI defines it. What this service cannot do is refused, not ignored."""

    model_config = ConfigDict(extra="allow")

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Annotated[dict[Word, Value], Field(max_length=16)] | None = None
    include: list[str] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    user: Value | None = None
    # Fields that only a WebSocket has.
    generate: bool | None = None
    stream_id: Id | None = None
    prompt_cache_options: CacheOptions | None = None
    # Fields with values that ask for nothing; so do null, false, "" and [], in any field.
    reasoning: Any = None
    top_logprobs: int | None = None

    @property
    def is_prepared_only(self) -> bool:
        """Whether the client wants the conversation so far computed, and no answer."""
        return self.generate is False or (
            self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)
        )

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return how to sample the answer."""
        return sampling(default, max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p)

    def check(self, *, is_socket: bool) -> None:
        """Refuse what this service does not do.

        :raises RequestError: the request asks for it.
        """
        text_format = (self.text or {}).get("format")
        choice = self.tool_choice
        chosen = choice.get("type") if isinstance(choice, dict) else choice
        refused = {
            "reasoning": isinstance(self.reasoning, Mapping) and any(v is not None for v in self.reasoning.values()),
            "top_logprobs": bool(self.top_logprobs),
            "truncation": self.truncation not in (None, "disabled"),
            "include": not INCLUDES.issuperset(self.include or ()),
            "tools": any(tool.get("type") != "file_search" or tool.get("filters") for tool in self.tools or ()),
            "tool_choice": chosen not in (None, "none", "auto", "required", "file_search"),
            "text.format": text_format is not None
            and not (isinstance(text_format, Mapping) and text_format.get("type") == "text"),
            "text.verbosity": (self.text or {}).get("verbosity") not in (None, "medium"),
            "generate": self.is_prepared_only and not is_socket,
            "stream_id": self.stream_id is not None and not is_socket,
        }
        refuse_fields(self, HARMLESS | {"stream_options"}, refused)
        for name, given_back in (("tools", self.tools), ("tool_choice", choice)):
            try:
                num_characters = len(json.dumps(given_back, allow_nan=False))
            except ValueError:
                raise RequestError(f"{name}: it has a number that is too large", param=name) from None
            if num_characters > MAX_TOOLS:
                raise RequestError(f"{name}: it has more than {MAX_TOOLS:,} characters", param=name)

    def turns(self) -> tuple[Turn, ...]:
        """Return the messages of the input.

        :raises RequestError: there is something else in it.
        """
        if self.input is None:
            return ()
        if isinstance(self.input, str):
            return (Turn("user", self.input),)
        turns = []
        for i, item in enumerate(self.input):
            kind = item.get("type", "message")
            if kind == "file_search_call":
                continue  # part of an earlier output that the client sends back: its message has the result
            if kind != "message":
                raise RequestError(
                    f"an item of type {kind!r:.40}: this service reads messages only", param=f"input.{i}.type"
                )
            role = item.get("role")
            turns.append(turn_of(role if isinstance(role, str) else repr(role), item.get("content"), f"input.{i}"))
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that this service can answer, with the conversation that it continues."""

    id: str
    body: ResponseRequest
    turns: tuple[Turn, ...]
    """All turns, also those of earlier responses, without instructions."""
    brings_context: bool
    """Whether something was prepared for it, so that nothing is retrieved."""
    retrieves: bool
    """Whether the service retrieves for it."""
    params: SamplingParams
    is_stored: bool

    @property
    def question(self) -> str:
        """The last message of the user."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "user"), "")

    @property
    def conversation(self) -> tuple[Turn, ...]:
        """The turns, with the instructions in front."""
        given = self.body.instructions
        return (Turn("system", given), *self.turns) if given else self.turns

    @property
    def wants_results(self) -> bool:
        """Whether the chunks of retrieval are part of the response."""
        return "file_search_call.results" in (self.body.include or ())


def check_request(
    service: Service, body: ResponseRequest, previous: State | None, *, is_socket: bool
) -> CheckedRequest:
    """Return what a client asks for, after the previous response.

    :raises RequestError, ConfigurationError: it cannot be done.
    """
    body.check(is_socket=is_socket)
    check_model(service, body.model)
    turns = (*(previous.turns if previous is not None else ()), *body.turns())
    if not turns:
        raise RequestError("input: there is nothing to answer, and nothing before it", param="input")
    if not body.is_prepared_only and turns[-1].role != "user":
        raise RequestError("the last message must be a user's: it is the question", param="input")
    brings_context = body.is_prepared_only or (previous is not None and previous.brings_context)
    return CheckedRequest(
        id=f"resp_{uuid.uuid4().hex}",
        body=body,
        turns=turns,
        brings_context=brings_context,
        retrieves=not brings_context and service.source is not None and body.tool_choice != "none",
        params=service.answering(body.params(service.params)),
        is_stored=body.store is not False,
    )
