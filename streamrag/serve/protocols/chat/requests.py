"""A chat completion's request: messages, sampling parameters and tools, bounded.

A client's schemas of tools are shown to the model, and used to read the arguments of calls, but no grammar is made from
them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, Json, field_validator, model_validator

from streamrag.core import MAX_INT, SamplingParams
from streamrag.serve.connections.json_body import RequestModel
from streamrag.serve.request_fields import NOTHING, SAMPLING, refuse_fields, sampling

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]

MAX_TOOLS = 128  # maximum tools of a request, and calls of a message
MAX_CHARS = 65_536
"""Maximum characters of all tools of a request, and also of the calls in all its messages."""

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Parameters(RequestModel, extra="allow"):
    """A JSON schema of an object, as far as vLLM's parsers look into it."""

    type: Literal["object"] = "object"
    properties: dict[str, dict[str, Any]] = Field(default={})


class Function(RequestModel):
    name: Name
    description: str | None = None
    parameters: Parameters = Parameters()
    strict: Literal[False] | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class CalledFunction(RequestModel):
    name: Name
    arguments: Json[dict[str, Any]]


class ToolCall(RequestModel):
    id: str = Field(min_length=1, max_length=128)
    type: Literal["function"] = "function"
    function: CalledFunction


def check_size(values: Any) -> Any:
    """Return the tools of a request, or the calls of each message. Raises ValueError if they are too large."""
    if len(str(values)) > MAX_CHARS:
        raise ValueError(f"tools, or calls of tools, have more than {MAX_CHARS:,} characters")
    return values


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
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
))  # fmt: skip
"""Fields that do not change the answer and are ignored."""

EXTRA = {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
"""Fields that are passed to the engine unchanged."""


class ChatRequest(RequestModel):
    """A request as OpenAI defines it. Unsupported fields of OpenAI's are refused, not ignored."""

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
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # Permitted where the model's chat template does not use them:
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None

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
        if self.top_k == -1:  # vLLM's value for all
            fields["top_k"] = 0
        if self.stop is not None:
            texts = [self.stop] if isinstance(self.stop, str) else self.stop
            fields["stop"] = tuple(text for text in texts if text) or None
        return sampling(default, **fields, extra=self.model_dump(include=EXTRA))

    def check(self, chat_template: str) -> list[str]:
        """Return the names of fields that are ignored. Raise RequestError for `n` other than 1, formats other than
        text, forced tools, values that this chat template uses, and fields that `refuse_fields` refuses."""
        for_template = self.chat_template_kwargs if isinstance(self.chat_template_kwargs, Mapping) else {}
        refused = {
            "n": self.n not in (None, 1),
            "response_format": (self.response_format or {}).get("type") not in (None, "text"),
            "tool_choice": self.tool_choice not in ("none", "auto", *NOTHING),
            "function_call": self.function_call not in ("none", "auto", *NOTHING),
            "reasoning_effort": self.reasoning_effort not in NOTHING and "reasoning_effort" in chat_template,
            "chat_template_kwargs": any(
                value is not None and name in chat_template for name, value in for_template.items()
            ),
        }
        ignored = [name for name in ("reasoning_effort", "chat_template_kwargs") if getattr(self, name) not in NOTHING]
        return [*refuse_fields(self, HARMLESS, refused), *ignored]

    @property
    def uses_tools(self) -> bool:
        """Whether the request has tools that may be called, or messages of tools."""
        may_call = bool(self.tools) and self.tool_choice != "none"
        return may_call or any(each.role == "tool" or each.tool_calls for each in self.messages)


TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "tool_calls"})


class ToollessChatRequest(ChatRequest):
    """A request as if the client had no tools: without definitions, calls and results, which may be invalid."""

    @model_validator(mode="before")
    @classmethod
    def _leave_tools_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {name: value for name, value in values.items() if name not in TOOL_FIELDS or value == "none"}
        if isinstance(messages := kept.get("messages"), list):
            kept["messages"] = [
                {name: value for name, value in each.items() if name not in TOOL_FIELDS}
                for each in messages
                if isinstance(each, dict) and each.get("role") not in ("tool", "function")
                and (each.get("content") or TOOL_FIELDS.isdisjoint(each))
            ]  # fmt: skip
        return kept
