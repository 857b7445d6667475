"""The query of a chat completion: the last user message is the question, the messages before it are history."""

from collections.abc import Sequence
from typing import Any

from streamrag.backends.tools.parser import AnswerReader
from streamrag.backends.tools.template import with_tools
from streamrag.core import SamplingParams, Source, Turn
from streamrag.modes import PromptTemplate
from streamrag.query.options import MAX_DRAFT, QueryOptions
from streamrag.serve.failures import RequestError
from streamrag.serve.protocols.chat.requests import ChatMessage, ChatRequest
from streamrag.serve.request_fields import end_with_question, message_text, parse_turn, sampling, split_turns
from streamrag.serve.service import NoSource, Service

NO_PARSER = (
    "tools: this service has no tool parser. Its operator can name vLLM's, --tool-call-parser NAME, or have tools "
    "ignored, --ignore-tools"
)

ALONE = PromptTemplate("", before_context="", no_context="", cut_short="", after_context="{question}")
"""The template of a prompt that is the conversation alone."""


def chat_query(service: Service, body: ChatRequest) -> tuple[str, Source | None, QueryOptions, AnswerReader]:
    """Return the question, a source, the options, and a reader of the answer, with tools if the request uses them.

    The source is None for the service's own, and empty if the model's name or `tool_choice` "none" says so. The
    beginning of `prediction` becomes the draft.

    :raises RequestError, ConfigurationError: model, messages, tools or values are invalid.
    """
    params = body.params(service.params)
    retrieves = model_retrieves(service, body.model) and body.tool_choice != "none"
    template = service.template if retrieves else ALONE
    if body.uses_tools:
        question, options, reader = tool_query(service, body, params, template)
    else:
        turns = [parse_turn(each.role, each.content, f"messages.{i}") for i, each in enumerate(body.messages)]
        question, options = conversation_options(turns, "messages", params, template)
        reader = AnswerReader()
    if not retrieves:
        options["deadline_s"] = service.limits.deadline_s
    if body.prediction is not None:
        options["draft"] = message_text(body.prediction.content, "prediction.content")[:MAX_DRAFT]
    return question, None if retrieves else NoSource(), options, reader


def tool_query(
    service: Service, body: ChatRequest, params: SamplingParams, template: PromptTemplate
) -> tuple[str, QueryOptions, AnswerReader]:
    """Return the question of a request that uses tools, the query's options, and a reader of the answer.

    The question is the last user's message. Calls and results behind it stand behind the question, so that the prompt
    of an agent's next step begins like that of the last one. With `tool_choice` "none" there are no tools.

    :raises RequestError, ConfigurationError: a message is invalid, or the service has no parser.
    """
    if service.tool_parser is None:
        raise RequestError(NO_PARSER, code="unsupported_value", param="tools")
    tools = [each.model_dump(exclude_none=True) for each in body.tools or () if body.tool_choice != "none"]
    messages = [_message(each, f"messages.{i}") for i, each in enumerate(body.messages)]
    messages = end_with_question(messages, lambda message: str(message["role"]), "messages")
    system, question, template = with_tools(template, messages, tools)
    options = QueryOptions(template=template, params=params, system=_system(template, system))
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
    turns: Sequence[Turn], param: str, params: SamplingParams, template: PromptTemplate
) -> tuple[str, QueryOptions]:
    """Return a conversation's question, and query options with its history; a system text follows the template's own.

    :raises RequestError: there is no user's turn.
    """
    system, history, question = split_turns(turns, param)
    return question, QueryOptions(history=history, params=params, template=template, system=_system(template, system))


def _system(template: PromptTemplate, client_text: str) -> str:
    return "\n\n".join(filter(None, (template.system, client_text)))


def model_retrieves(service: Service, name: str | None) -> bool:
    """Return whether the model of this name retrieves. Raises RequestError if the service has no such model."""
    if name not in (None, "", *service.model_names):
        names = " and ".join(map(repr, service.model_names))
        message = f"there is no model {name!r:.80} here, only {names}"
        raise RequestError(message, status=404, code="model_not_found", param="model")
    return name != service.chat_name
