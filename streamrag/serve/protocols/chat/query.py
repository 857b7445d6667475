"""The query of a chat completion: the last user message is the question, the messages before it are history."""

from collections.abc import Sequence
from typing import Any

from streamrag.backends.tools.parser import AnswerReader
from streamrag.backends.tools.template import with_tools
from streamrag.core import SamplingParams, Turn
from streamrag.query.options import MAX_DRAFT, QueryOptions
from streamrag.serve.failures import RequestError
from streamrag.serve.protocols.chat.requests import ChatMessage, ChatRequest
from streamrag.serve.request_fields import message_text, parse_turn, sampling, split_turns
from streamrag.serve.service import Service

NO_PARSER = "tools: this service has no tool parser. Its operator can name vLLM's: --tool-call-parser NAME"


def chat_query(service: Service, body: ChatRequest) -> tuple[str, QueryOptions, AnswerReader]:
    """Return the question, the options, and a reader of the answer, with tools if the request uses them.

    The beginning of `prediction` becomes the draft.

    :raises RequestError, ConfigurationError: messages, tools or values are invalid.
    """
    params = body.params(service.params)
    if body.uses_tools:
        question, options, reader = tool_query(service, body, params)
    else:
        turns = [parse_turn(each.role, each.content, f"messages.{i}") for i, each in enumerate(body.messages)]
        question, options = conversation_options(service, turns, "messages", params)
        reader = AnswerReader()
    if body.prediction is not None:
        options["draft"] = message_text(body.prediction.content, "prediction.content")[:MAX_DRAFT]
    return question, options, reader


def tool_query(service: Service, body: ChatRequest, params: SamplingParams) -> tuple[str, QueryOptions, AnswerReader]:
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


def _message(message: ChatMessage, param: str) -> dict[str, Any]:
    """Return a message for the chat template."""
    turn = parse_turn("user" if message.role == "tool" else message.role, message.content, param)
    others = message.model_dump(include={"tool_calls", "tool_call_id"}, exclude_none=True)
    return {"role": "tool" if message.role == "tool" else turn.role, "content": turn.text, **others}


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
