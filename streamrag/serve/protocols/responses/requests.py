"""The schema of requests, in the body of a POST or with `response.create`, and their checks."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from streamrag.core import SamplingParams, Turn
from streamrag.serve.connections.json_body import RequestModel
from streamrag.serve.failures import RequestError
from streamrag.serve.protocols.chat.query import model_retrieves
from streamrag.serve.protocols.chat.requests import HARMLESS
from streamrag.serve.protocols.responses.states import State
from streamrag.serve.request_fields import end_with_question, parse_turn, refuse_fields, sampling
from streamrag.serve.service import Service

INCLUDES = frozenset((
    "file_search_call.results",
    # Outputs that this service never has, so leaving them out is correct:
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url",
    "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
))  # fmt: skip

MAX_ITEMS = 1000  # maximum items in one request's input

MAX_TOOLS = 16_384
"""Maximum characters of a request's tools as JSON: they are held as objects, and repeated in the response."""

Word = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Id = Annotated[str, Field(min_length=1, max_length=128)]


class CacheOptions(RequestModel):
    prewarm: bool | None = None


class ResponseRequest(RequestModel):
    """A request as OpenAI defines it. Unsupported fields of OpenAI's are refused, not ignored."""

    model_config = ConfigDict(extra="allow")

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
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
    # WebSocket only:
    generate: bool | None = None
    stream_id: Id | None = None
    prompt_cache_options: CacheOptions | None = None
    # Permitted only with values that change nothing:
    reasoning: Any = None
    top_logprobs: int | None = None

    def without_tools(self) -> "ResponseRequest":
        """Return the request as if the client had no tools, but may search files: without calls and results either."""
        items = self.input
        if isinstance(items, list):
            items = [item for item in items if not str(item.get("type")).endswith(("_call", "_output"))]
        choice = self.tool_choice if self.tool_choice == "none" else None
        searches = [tool for tool in self.tools or () if tool.get("type") == "file_search"]
        return self.model_copy(update={"input": items, "tool_choice": choice, "tools": searches or None})

    @property
    def is_prepared_only(self) -> bool:
        """Whether the client only wants the conversation so far prefilled, without an answer."""
        return self.generate is False or (
            self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)
        )

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return the request's sampling parameters, `default`'s where it has none, as `sampling` does."""
        return sampling(default, max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p)

    def check(self, *, is_socket: bool) -> list[str]:
        """Return the names of fields that are ignored. Raise RequestError for the first field that is unsupported, too
        large, or permitted on a WebSocket only."""
        text_format = (self.text or {}).get("format")
        choice = self.tool_choice
        choice_type = choice.get("type") if isinstance(choice, dict) else choice
        refused = {
            "reasoning": isinstance(self.reasoning, Mapping) and any(v is not None for v in self.reasoning.values()),
            "top_logprobs": bool(self.top_logprobs),
            "truncation": self.truncation not in (None, "disabled"),
            "include": not INCLUDES.issuperset(self.include or ()),
            "tools": any(tool.get("type") != "file_search" or tool.get("filters") for tool in self.tools or ()),
            "tool_choice": choice_type not in (None, "", "none", "auto", "required", "file_search"),
            "text.format": text_format is not None
            and not (isinstance(text_format, Mapping) and text_format.get("type") == "text"),
            "text.verbosity": (self.text or {}).get("verbosity") not in (None, "medium"),
            "generate": self.is_prepared_only and not is_socket,
            "stream_id": self.stream_id is not None and not is_socket,
        }
        ignored = refuse_fields(self, HARMLESS | {"stream_options"}, refused)
        for name, value in (("tools", self.tools), ("tool_choice", choice)):
            try:
                num_characters = len(json.dumps(value, allow_nan=False))
            except ValueError:
                raise RequestError(f"{name}: it has a number that is too large", param=name) from None
            if num_characters > MAX_TOOLS:
                raise RequestError(f"{name}: it has more than {MAX_TOOLS:,} characters", param=name)
        return ignored

    def turns(self) -> tuple[Turn, ...]:
        """Return the messages of the input as turns; a string is a user's, and no input has none.

        Raises RequestError for items other than messages, except results of earlier searches, which are left out.
        """
        if self.input is None:
            return ()
        if isinstance(self.input, str):
            return (Turn("user", self.input),)
        turns = []
        for i, item in enumerate(self.input):
            kind = item.get("type")
            if kind == "file_search_call":
                continue  # from an earlier output; its message has the result
            if kind not in (None, "message"):
                message = f"an item of type {kind!r:.40}: this service reads messages only"
                raise RequestError(message, param=f"input.{i}.type")
            role = item.get("role")
            turns.append(parse_turn(role if isinstance(role, str) else repr(role), item.get("content"), f"input.{i}"))
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A supported request, with the conversation that it continues."""

    id: str
    body: ResponseRequest
    turns: tuple[Turn, ...]  # all turns, including those of earlier responses, without instructions
    brings_context: bool  # whether part of the conversation was prepared, so that nothing is retrieved
    retrieves: bool  # whether the service retrieves for it
    params: SamplingParams
    is_stored: bool

    @property
    def question(self) -> str:
        """The last user message."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "user"), "")

    @property
    def conversation(self) -> tuple[Turn, ...]:
        """The turns, preceded by the instructions."""
        instructions = self.body.instructions
        return (Turn("system", instructions), *self.turns) if instructions else self.turns

    @property
    def wants_results(self) -> bool:
        """Whether the response includes the retrieved chunks."""
        return "file_search_call.results" in (self.body.include or ())


def check_request(
    service: Service, client: str, body: ResponseRequest, previous: State | None, *, is_socket: bool
) -> CheckedRequest:
    """Return a client's checked request that continues `previous`. Unless it is only prepared, it has a user's turn.

    :raises RequestError, ConfigurationError: the request is invalid or unsupported.
    """
    body = body.without_tools() if service.ignores_tools else body
    service.ignored_fields.note(client, body.check(is_socket=is_socket))
    may_retrieve = model_retrieves(service, body.model) and body.tool_choice != "none"
    turns = (*(previous.turns if previous is not None else ()), *body.turns())
    if not turns:
        raise RequestError("input: there is no message, and no previous response", param="input")
    if not body.is_prepared_only:
        end_with_question(turns, lambda turn: turn.role, "input")
    brings_context = body.is_prepared_only or (previous is not None and previous.brings_context)
    return CheckedRequest(
        id=f"resp_{uuid.uuid4().hex}",
        body=body,
        turns=turns,
        brings_context=brings_context,
        retrieves=not brings_context and service.source is not None and may_retrieve,
        params=service.cap_params(body.params(service.params)),
        is_stored=body.store is not False,
    )
