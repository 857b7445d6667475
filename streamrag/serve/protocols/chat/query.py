"""The query of a chat completion: the last user message is the question, the messages before it are history."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from streamrag.backends.tools.parser import AnswerReader
from streamrag.backends.tools.template import with_tools
from streamrag.core import SamplingParams, Turn
from streamrag.modes import PromptTemplate
from streamrag.query.options import MAX_DRAFT, QueryOptions
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.chat.requests import ChatMessage, ChatRequest
from streamrag.serve.protocols.conversation_stream import conversation_events
from streamrag.serve.request_fields import end_with_question, message_text, parse_turn, sampling, split_turns
from streamrag.serve.service import Service
from streamrag.telemetry import QueryEvent

NO_PARSER = (
    "tools: this service has no tool parser. Its operator can name vLLM's, --tool-call-parser NAME, or have tools "
    "ignored, --ignore-tools"
)


@dataclass(frozen=True, slots=True)
class ChatQuery:
    """The question of a chat completion, what stands around it in the prompt, and a reader of the answer."""

    question: str
    system: str  # the client's own
    history: tuple[Turn, ...]
    params: SamplingParams
    reader: AnswerReader
    retrieves: bool
    draft: str | None
    template: PromptTemplate | None  # with the tools and messages of `with_tools`; None without any

    def events(self, service: Service, caller: Caller) -> AbstractAsyncContextManager[AsyncIterator[QueryEvent]]:
        """Admit the query and give its events: those of `Service.events` or `conversation_events`."""
        if not self.retrieves:
            system = (Turn("system", self.system),) if self.system else ()
            turns = (*system, *self.history, Turn("user", self.question))
            wrap = self.template.wrap_tokenizer if self.template is not None else None
            return conversation_events(service, caller, "chat", turns, service.cap_params(self.params), wrap)
        options = query_options(service, self.system, self.history, self.params)
        if self.template is not None:
            options["template"] = self.template
        if self.draft is not None:
            options["draft"] = self.draft
        return service.events(caller, "chat", self.question, **options)


def chat_query(service: Service, body: ChatRequest) -> ChatQuery:
    """Return the query of a request, which retrieves unless its model's name or `tool_choice` "none" says otherwise.

    The beginning of `prediction` becomes the draft. The question is the last user's message. Calls and results of tools
    behind it stand behind the question, so that the prompt of an agent's next step begins like that of the last one.
    With `tool_choice` "none" there are no tools.

    :raises RequestError, ConfigurationError: model, messages, tools or values are invalid, or there is no tool parser.
    """
    retrieves = check_model(service, body.model) and body.tool_choice != "none"
    params, reader, history, template = body.params(service.params), AnswerReader(), tuple[Turn, ...](), None
    if body.uses_tools:
        if service.tool_parser is None:
            raise RequestError(NO_PARSER, code="unsupported_value", param="tools")
        tools = [each.model_dump(exclude_none=True) for each in body.tools or () if body.tool_choice != "none"]
        messages = [_message(each, f"messages.{i}") for i, each in enumerate(body.messages)]
        messages = end_with_question(messages, lambda message: str(message["role"]), "messages")
        system, question, template = with_tools(service.template, messages, tools)
        if tools:
            params = sampling(params, extra=service.tool_parser.sampling())
            reader = service.tool_parser.reader(tools, is_single=body.parallel_tool_calls is False)
    else:
        turns = [parse_turn(each.role, each.content, f"messages.{i}") for i, each in enumerate(body.messages)]
        system, history, question = split_turns(turns, "messages")
    draft = body.prediction and message_text(body.prediction.content, "prediction.content")[:MAX_DRAFT]
    return ChatQuery(question, system, history, params, reader, retrieves, draft, template)


def _message(message: ChatMessage, param: str) -> dict[str, Any]:
    """Return a message for the chat template."""
    turn = parse_turn("user" if message.role == "tool" else message.role, message.content, param)
    others = message.model_dump(include={"tool_calls", "tool_call_id"}, exclude_none=True)
    return {"role": "tool" if message.role == "tool" else turn.role, "content": turn.text, **others}


def query_options(service: Service, system: str, history: Sequence[Turn], params: SamplingParams) -> QueryOptions:
    """Return the options of a query that retrieves; a client's system text follows the service's own."""
    options = QueryOptions(history=history, params=params)
    if system:
        options["system"] = service.system_text(system)
    return options


def check_model(service: Service, name: str | None) -> bool:
    """Return whether the model of this name retrieves. Raises RequestError if the service has no such model."""
    if name not in (None, "", *service.model_names):
        has = " and ".join(map(repr, service.model_names))
        message = f"there is no model {name!r:.80} here, only {has}"
        raise RequestError(message, status=404, code="model_not_found", param="model")
    return name != service.chat_name
