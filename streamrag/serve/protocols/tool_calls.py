"""Tools in chat completions: definitions, calls and results in a request, bounded.

A client's schemas are shown to the model, and used to read the arguments of calls. No grammar is made from them.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, Json

from streamrag.backends.tools.parser import AnswerReader
from streamrag.backends.tools.template import with_tools
from streamrag.core import SamplingParams
from streamrag.query.options import QueryOptions
from streamrag.serve.connections.json_body import RequestModel, StrictModel
from streamrag.serve.failures import RequestError
from streamrag.serve.request_fields import parse_turn, sampling
from streamrag.serve.service import Service

if TYPE_CHECKING:
    from streamrag.serve.protocols.chat import ChatMessage, ChatRequest

MAX_TOOLS = 128  # maximum tools of a request, and calls of a message
MAX_CHARS = 65_536
"""Maximum characters of all tools of a request, and also of the calls in all its messages."""

NO_PARSER = "tools: this service has no tool parser. Its operator can name vLLM's: --tool-call-parser NAME"

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Parameters(RequestModel, extra="allow"):
    """A JSON schema of an object, as far as vLLM's parsers look into it."""

    type: Literal["object"] = "object"
    properties: dict[str, dict[str, Any]] = Field(default={})


class Function(StrictModel):
    name: Name
    description: str | None = None
    parameters: Parameters = Parameters()
    strict: Literal[False] | None = None


class Tool(StrictModel):
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


def uses_tools(body: "ChatRequest") -> bool:
    """Whether a request has tools, or messages of tools."""
    return bool(body.tools) or any(each.role == "tool" or each.tool_calls for each in body.messages)


def tool_query(service: Service, body: "ChatRequest", params: SamplingParams) -> tuple[str, QueryOptions, AnswerReader]:
    """Return the question of a request that uses tools, the query's options, and a reader of the answer.

    The question is the last user's message. Calls and results behind it stand behind the question, so that the prompt
    of an agent's next step begins like that of the last one. With `tool_choice` "none" there are no tools.

    :raises RequestError, ConfigurationError: a message is invalid, or the service has no parser.
    """
    if service.tool_parser is None:
        raise RequestError(NO_PARSER, code="unsupported_value", param="tools")
    tools = [each.model_dump(exclude_none=True) for each in body.tools or () if body.tool_choice != "none"]
    messages = [_message(each, f"messages.{i}") for i, each in enumerate(body.messages)]
    system, question, template = with_tools(service.template, messages, tools)
    options = QueryOptions(template=template, params=params)
    if system:
        options["system"] = service.system_text(system)
    if not tools:
        return question, options, AnswerReader()
    options["params"] = sampling(params, extra=service.tool_parser.sampling())
    return question, options, service.tool_parser.reader(tools, is_single=body.parallel_tool_calls is False)


def _message(message: "ChatMessage", param: str) -> dict[str, Any]:
    """Return a message for the chat template."""
    turn = parse_turn("user" if message.role == "tool" else message.role, message.content, param)
    others = message.model_dump(include={"tool_calls", "tool_call_id"}, exclude_none=True)
    return {"role": "tool" if message.role == "tool" else turn.role, "content": turn.text, **others}
