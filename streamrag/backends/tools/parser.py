"""Find calls of tools in an answer with a tool parser of vLLM, used as a library."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from streamrag.backends.tools.template import ToolTokenizer, model_tokenizer
from streamrag.backends.vllm.client.processes import import_vllm
from streamrag.backends.vllm.version import check_version
from streamrag.core import AnswerChunk, Tokenizer, Turn
from streamrag.errors import BackendError, ConfigurationError

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Definitions of tools in OpenAI's form."""

PROBE = {"type": "function", "function": {"name": "probe_of_tools", "parameters": {"type": "object", "properties": {}}}}
ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "properties": {}}}}


class ToolCallParser:
    """A tool parser of vLLM, by its name for vLLM's `--tool-call-parser`. Importing vLLM takes seconds.

    :raises MissingDependencyError, UnsupportedVersionError: vLLM is not installed, or of another series.
    :raises ConfigurationError: vLLM has no such parser.
    """

    def __init__(self, name: str) -> None:
        check_version()
        import_vllm()
        from vllm.parser.parser_manager import ParserManager
        from vllm.tool_parsers import ToolParserManager

        names = ToolParserManager.list_registered()
        if name not in names:
            raise ConfigurationError(f"vLLM has no tool parser {name!r:.80}. It has {', '.join(names)}")
        self.name = name
        self._parser_class: Any = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
        self._tokenizer: Any = None

    def load(self, tokenizer: Tokenizer) -> None:
        """Copy the model's tokenizer, which threads use too, for the parser. Does nothing the second time.

        :raises ConfigurationError: the parser is for other models, there is no tokenizer of transformers, or its chat
            template has no tools.
        """
        from vllm.tokenizers.hf import get_cached_tokenizer

        if self._tokenizer is None:
            own = get_cached_tokenizer(copy.deepcopy(model_tokenizer(tokenizer).whole))
            try:
                self._parser_class(own)
            except Exception as error:
                raise ConfigurationError(f"the tool parser {self.name} is not for this model: {error}") from error
            ToolTokenizer([PROBE], (), (), tokenizer, 0).render_chat([Turn("user", "Hello")])
            self._tokenizer = own

    def sampling(self, tools: Tools = (ANY_TOOL,), tool_choice: Any = "auto") -> dict[str, Any]:
        """Return `skip_special_tokens`, and unless `tool_choice` is "auto" a grammar, for `SamplingParams.extra`.

        :raises ConfigurationError: vLLM refuses the tools.
        """
        from vllm.exceptions import VLLMClientError

        try:
            request = _request(tools, tool_choice)
            request = self._parser_class(self._tokenizer, request.tools).adjust_request(request)
        except (ValueError, VLLMClientError) as error:
            raise ConfigurationError(f"vLLM refuses the tools: {error}") from error
        extra = {"skip_special_tokens": request.skip_special_tokens}
        if tool_choice != "auto" and request.structured_outputs is not None:
            given = asdict(request.structured_outputs).items()
            extra["structured_outputs"] = {name: value for name, value in given if value and name[0] != "_"}
        return extra

    def reader(self, tools: Tools, tool_choice: Any = "auto", *, is_single: bool = False) -> "AnswerReader":
        """Return a reader of the text and calls of one answer, which drops all but the first call if it `is_single`."""
        request = _request(tools, tool_choice)
        parser = self._parser_class(self._tokenizer, request.tools)

        def parse(piece: AnswerChunk) -> dict[str, Any]:
            token_ids, is_last = list(piece.token_ids), piece.finish_reason is not None
            try:
                found = parser.parse_delta(piece.text, token_ids, request, [], finished=is_last)
            except Exception as error:
                raise BackendError(f"vLLM's tool parser failed: {error!r:.500}") from error
            delta = {} if found is None else found.model_dump(exclude_none=True, include={"content", "tool_calls"})
            calls = [call for call in delta.get("tool_calls", ()) if not (is_single and call["index"])]
            return {**delta, "tool_calls": calls}

        return AnswerReader(parse)


def _request(tools: Tools, tool_choice: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[], tools=copy.deepcopy(list(tools)), tool_choice=tool_choice)


class AnswerReader:
    """A reader of one answer, piece by piece. By default all of it is text."""

    def __init__(self, parse: Callable[[AnswerChunk], dict[str, Any]] = lambda piece: {"content": piece.text}) -> None:
        self._parse = parse
        self.text = ""
        """The text so far, without calls."""
        self.calls: list[dict[str, Any]] = []
        """The calls so far, in OpenAI's form."""

    def push(self, piece: AnswerChunk) -> dict[str, Any]:
        """Add a piece to `text` and `calls`. Return its `content` and `tool_calls`, if any, as in OpenAI's streams.

        :raises BackendError: the parser failed.
        """
        delta = {name: value for name, value in self._parse(piece).items() if value}
        self.text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            function = {"name": "", "arguments": "", **call.get("function", {})}
            if "id" in call:
                self.calls.append({"id": call["id"], "type": "function", "function": function})
            else:
                self.calls[call["index"]]["function"]["arguments"] += function["arguments"]
        return delta

    def finish_reason(self, reason: str) -> str:
        """Return why the answer ended: "tool_calls" if it has some and was not cut off."""
        return "tool_calls" if self.calls and reason == "stop" else reason
