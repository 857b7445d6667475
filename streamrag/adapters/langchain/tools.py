"""Tools, their calls and their results, between LangChain's form and OpenAI's."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage, convert_to_openai_messages
from langchain_core.messages.tool import tool_call_chunk

from streamrag.errors import ConfigurationError
from streamrag.support.messages import short_repr, type_name


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
    """Return OpenAI's "required" for any tool, "auto" by default, "none" or a mapping; raise for an unknown name."""
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
