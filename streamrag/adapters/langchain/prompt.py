"""LangChain's prompt templates as the template of a pipeline, and its messages and tools in OpenAI's form."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.prompts import BasePromptTemplate, MessagesPlaceholder

from streamrag.core import Turn
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.support.messages import short_repr, type_name

_PLACE = f"@@{secrets.token_hex(16)}@@"
"""Stands for the documents where they divide a prompt; random, so that no text contains it."""
_QUESTION = f"@@{secrets.token_hex(16)}@@"
PASSAGE = "[{number}] {text}\n\n"
"""The format of a document in an application's own prompt: titles and addresses make the prompt a tenth longer."""
MESSAGES = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}


@dataclass(frozen=True, slots=True, kw_only=True)
class LangchainTemplate(PromptTemplate):
    """The messages of a LangChain prompt. Everything before the documents is prefilled while retrieval runs."""

    prompt: BasePromptTemplate[Any]
    context: str
    """The variable of the documents."""
    question: str
    """The variable of the question."""
    history: str | None
    """The variable of earlier messages; None if the prompt has no place for them."""

    def messages(self, question: str, history: Sequence[Turn]) -> tuple[list[Turn], list[Turn]]:
        """Return the messages up to the documents, and those after; the one with the documents is divided in two.

        Raises ConfigurationError if there is history, but no place for it in the prompt.
        """
        values: dict[str, Any] = {self.context: _PLACE, self.question: question}
        if self.history is not None:
            values[self.history] = [MESSAGES[turn.role](turn.text) for turn in history]
        elif history:
            raise ConfigurationError(
                f"the prompt has no place for the {len(history)} earlier messages: give it a MessagesPlaceholder"
            )
        turns = list(map(turn_of, self.prompt.format_prompt(**values).to_messages()))
        number, divided = next((number, turn) for number, turn in enumerate(turns) if _PLACE in turn.text)
        before, after = divided.text.split(_PLACE)
        if self.passage.endswith("\n"):
            after = after.lstrip("\n")
        system = [Turn("system", self.system)] if self.system else []
        return (
            [*system, *turns[:number], Turn(divided.role, before)],
            [Turn(divided.role, after), *turns[number + 1 :]],
        )


def template_of(prompt: Any, *, context: str, question: str | None, passage: str) -> LangchainTemplate:
    """Return the template with the words of a LangChain prompt. The question's variable is by default the only other.

    A `MessagesPlaceholder`, if any, is the place of the history.

    :raises ConfigurationError: `prompt` is no prompt, lacks one of the variables or has others, or does not have the
        documents exactly once; or `turn_of` refuses a message.
    """
    if not isinstance(prompt, BasePromptTemplate):
        raise ConfigurationError(f"prompt={short_repr(prompt)} must be a ChatPromptTemplate or another prompt template")
    parts = [part.variable_name for part in getattr(prompt, "messages", ()) if isinstance(part, MessagesPlaceholder)]
    others = sorted({*prompt.input_variables} - {context, *parts})
    question = question or (others[0] if len(others) == 1 else None)
    if question is None or context not in prompt.input_variables or others != [question] or len(parts) > 1:
        raise ConfigurationError(
            f"the prompt has the variables {', '.join(sorted(prompt.input_variables)) or '(none)'}, and must have one "
            f"for the documents (context={context!r}), one for the question (question={question!r}), and at most one "
            "MessagesPlaceholder: name the two with context= and question=, and fill in others with prompt.partial()"
        )
    values: dict[str, Any] = {context: _PLACE, question: _QUESTION, **{part: [] for part in parts}}
    text = "\n".join(turn_of(message).text for message in prompt.format_prompt(**values).to_messages())
    if text.count(_PLACE) != 1:
        raise ConfigurationError(f"the prompt must have {{{context}}} once, and has it {text.count(_PLACE)} times")
    lines = text.replace(_PLACE, "\n").replace("{", "{{").replace("}", "}}").replace(_QUESTION, "{question}")
    return LangchainTemplate(
        system="",
        before_context="",
        after_context=lines,  # for the lines that no document may imitate; `messages` has the prompt itself
        passage=passage,
        prompt=prompt,
        context=context,
        question=question,
        history=parts[0] if parts else None,
    )


def turn_of(message: BaseMessage) -> Turn:
    """Return a system, human or AI message as a turn with its text. Other content of an AI message is left out.

    :raises ConfigurationError: it is of another kind, calls tools, or is a system or human message with more than text.
    """
    role = next((role for role, kind in MESSAGES.items() if isinstance(message, kind)), None)
    if role is None or (isinstance(message, AIMessage) and message.tool_calls):
        raise ConfigurationError(
            f"{type_name(message)} for tools is not supported: use system, human and AI messages with text"
        )
    if role != "assistant" and any(block["type"] != "text" for block in message.content_blocks):
        raise ConfigurationError(f"{type_name(message)} has content other than text, which is not supported")
    return Turn(role, str(message.text))  # type: ignore[arg-type]


def uses_tools(messages: Sequence[BaseMessage]) -> bool:
    """Whether messages are of tools, or call them."""
    return any(isinstance(each, ToolMessage) or (isinstance(each, AIMessage) and each.tool_calls) for each in messages)


def openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with a text as content, and the arguments of calls as parsed JSON.

    :raises ConfigurationError: there is other content than text, except in AI messages, where it is left out.
    """
    converted: Any = convert_to_openai_messages(list(messages))
    for message, each in zip(messages, converted, strict=True):
        if not isinstance(message, AIMessage) and any(block["type"] != "text" for block in message.content_blocks):
            raise ConfigurationError(f"{type_name(message)} has content other than text, which is not supported")
        each["content"] = str(message.text)
        for call in each.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(converted)


def openai_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return OpenAI's "required" for True or "any", "auto" by default, "none", or a mapping for the name of a tool.

    A mapping is returned unchanged. Raises ConfigurationError for an unknown name.
    """
    if choice in (True, "any", "required"):
        return "required"
    if not choice or choice in ("auto", "none") or isinstance(choice, Mapping):
        return choice or "auto"
    if choice not in (names := [tool["function"]["name"] for tool in tools]):
        raise ConfigurationError(f"tool_choice={short_repr(choice)}: the tools are {', '.join(names) or '(none)'}")
    return {"type": "function", "function": {"name": choice}}


def chunk_of(delta: Mapping[str, Any]) -> AIMessageChunk:
    """Return a piece of an answer in OpenAI's form, its text and pieces of calls, as LangChain's chunk."""
    chunks = []
    for call in delta.get("tool_calls", ()):
        function = {"name": None, "arguments": None, **call.get("function", {})}
        id, index = call.get("id"), call["index"]
        chunks.append(tool_call_chunk(name=function["name"], args=function["arguments"], id=id, index=index))
    return AIMessageChunk(content=delta.get("content", ""), tool_call_chunks=chunks)
