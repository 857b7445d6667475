"""What a client asks for with `response.create`, or in the body of a POST, and what of it this service does."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from streamrag.core import SamplingParams, Turn
from streamrag.serve.failures import RequestError
from streamrag.serve.interfaces.chat import HARMLESS, check_model
from streamrag.serve.interfaces.responses.states import State
from streamrag.serve.request_fields import refuse_fields, sampling, turn_of
from streamrag.serve.service import Service

INCLUDES = frozenset(
    {
        "file_search_call.results",
        # Of what this service never has, so that leaving them out is what they ask for:
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

MAX_ITEMS = 1000
"""Of one request's input."""

MAX_TOOLS = 16_384
"""Characters of its tools as JSON: they stand in each response, and are held as objects while it is answered."""

Word = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Id = Annotated[str, Field(min_length=1, max_length=128)]


class CacheOptions(BaseModel):
    """What a client says about the prompt cache."""

    prewarm: bool | None = None


class ResponseRequest(BaseModel):
    """OpenAI's request, as far as this service does what it says; what it cannot do is refused, not ignored."""

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
    # What only a WebSocket has.
    generate: bool | None = None
    stream_id: Id | None = None
    prompt_cache_options: CacheOptions | None = None
    # Further values that ask for nothing; so do null, false, "" and [], in any field.
    reasoning: Any = None
    top_logprobs: int | None = None

    @property
    def is_prepared_only(self) -> bool:
        """Whether it wants no answer, but the conversation so far to be computed."""
        return self.generate is False or (
            self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)
        )

    def params(self, default: SamplingParams) -> SamplingParams:
        """How to sample the answer."""
        return sampling(default, max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p)

    def check(self, *, is_socket: bool) -> None:
        """:raises RequestError: it asks for what this service does not do."""
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
        """The messages of its input.

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
                continue  # a client that sends back all of an earlier output: its message says what came of it
            if kind != "message":
                raise RequestError(
                    f"an item of type {kind!r:.40}: this service reads messages only", param=f"input.{i}.type"
                )
            role = item.get("role")
            turns.append(turn_of(role if isinstance(role, str) else repr(role), item.get("content"), f"input.{i}"))
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood: the conversation that it goes on with, and what is to be done."""

    id: str
    request: ResponseRequest
    turns: tuple[Turn, ...]
    """All of them, also those of earlier responses, without instructions."""
    brings_context: bool
    """Whether something was prepared for it, so that nothing is retrieved."""
    retrieves: bool
    """Whether it is answered from what the service retrieves."""
    params: SamplingParams
    is_stored: bool

    @property
    def question(self) -> str:
        """The last thing that the user said."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "user"), "")

    @property
    def whole(self) -> tuple[Turn, ...]:
        """The conversation with its instructions."""
        given = self.request.instructions
        return (Turn("system", given), *self.turns) if given else self.turns

    @property
    def wants_results(self) -> bool:
        """Whether retrieval's chunks are part of the response."""
        return "file_search_call.results" in (self.request.include or ())


def understood(service: Service, request: ResponseRequest, previous: State | None, *, is_socket: bool) -> Asked:
    """What `request` asks for, after the response before.

    :raises RequestError, ConfigurationError: it cannot be done.
    """
    request.check(is_socket=is_socket)
    check_model(service, request.model)
    added = request.turns()
    turns = (*(previous.turns if previous is not None else ()), *added)
    if not turns:
        raise RequestError("input: there is nothing to answer, and nothing before it", param="input")
    if not request.is_prepared_only and turns[-1].role != "user":
        raise RequestError("the last message must be a user's: it is the question", param="input")
    brings_context = request.is_prepared_only or (previous is not None and previous.brings_context)
    return Asked(
        f"resp_{uuid.uuid4().hex}",
        request,
        turns,
        brings_context,
        not brings_context and service.source is not None and request.tool_choice != "none",
        service.answering(request.params(service.params)),
        request.store is not False,
    )
