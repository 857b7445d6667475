"""A pipeline as a LangChain chat model."""

import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, cast
from uuid import uuid4

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import LC_ID_PREFIX, AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, Field

from streamrag.adapters.langchain.agent_step import AgentStep
from streamrag.adapters.langchain.prompt import (
    PASSAGE,
    chunk_of,
    openai_messages,
    openai_tool_choice,
    template_of,
    turn_of,
    uses_tools,
)
from streamrag.adapters.langchain.source import from_langchain
from streamrag.adapters.portal import LoopPortal, PortalOwner
from streamrag.backends.tools.parser import AnswerReader, ToolCallParser
from streamrag.backends.tools.template import with_tools
from streamrag.core import Backend, Mode, SamplingParams, Turn, part_name
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.pipeline import Pipeline
from streamrag.telemetry import Answer, TokenUsage

if TYPE_CHECKING:
    from streamrag.adapters.langchain.tool_node import StreamragToolNode

SAMPLING = {field.name for field in fields(SamplingParams)}
LONG_QUERY_CHARS = 2_000
"""A longer query is probably a prompt with documents: questions are shorter, and six short documents are longer."""
QUOTED_CHARS = 40
"""A query that contains a passage of this length is a prompt, too."""
NO_TOOLS = (
    "this model has no tool parser: name that of vLLM for it, as in StreamragChatModel(..., tool_parser='hermes'). Or "
    "let the agent keep its own chat model, and give it this retrieval as a tool: "
    "create_retriever_tool(StreamragRetriever(source=source), name, description)"
)


class StreamragChatModel(PortalOwner, BaseChatModel):
    """A pipeline as a LangChain chat model. The last human message is the query; retrieval and prefill overlap.

    Leading system messages replace the template's system text; the messages between them and the query are the
    history. A call may override all fields, and the options of `SamplingParams` and `QueryOptions`.

    The answer streams in chunks. The last one has `usage_metadata`, if the numbers of tokens are known, and in
    `response_metadata` the `citations` (number, uri, title, passage, text and score of each passage in the prompt),
    `finish_reason`, `model_name`, `timings`, the chosen `overlap`, the sources that were `left_out` for lack of room,
    `cut_short` and `source_error` if retrieval ended early, and the texts of the `alternatives` if `n` is above 1.

    A pipeline that has been started is used in its event loop. Otherwise `async with` starts it in the current loop, or
    the first call starts it in a thread with its own loop, until `close()`, the end of a `with` block, or garbage
    collection of the model. Cancelling a call stops its query.
    """

    pipeline: Pipeline
    """The pipeline that retrieves and answers."""
    temperature: float | None = None
    """Temperature of sampling, which is greedy by default."""
    top_p: float | None = None
    """Share of probability to sample from; 1 by default."""
    max_tokens: int | None = None
    """Maximum number of tokens of the answer; 256 by default."""
    seed: int | None = None
    """Seed of the sampling; by default that of the engine."""
    stop: list[str] | None = None
    """Texts that end the answer."""
    timeout: float | None = None
    """Time limit of an answer in seconds, including retrieval, but not the start of the pipeline."""
    tool_parser: str | None = None
    """Tool parser of vLLM for the model, such as "hermes", for `bind_tools`."""
    cache: BaseCache | bool | None = Field(default=False, exclude=True)
    """LangChain's cache; off by default, because the answer depends on the retrieved documents."""
    portal: Any = Field(default=None, exclude=True, repr=False)
    """The portal to the pipeline's event loop; copies of the model share it."""
    parser: Any = Field(default=None, exclude=True, repr=False)
    """The tool parser; copies of the model share it."""
    tool_node: Any = Field(default=None, exclude=True, repr=False)
    """The `StreamragToolNode` that `bind_tools` was called with."""

    @classmethod
    def from_retriever(
        cls,
        retriever: Any,
        backend: Backend,
        prompt: Any = None,
        *,
        mode: Mode | None = None,
        context: str = "context",
        question: str | None = None,
        passage: str | None = None,
        **options: Any,
    ) -> Self:
        """Return a model that answers with a retriever's documents, in the words of the application's own prompt.

        Its input is the question; earlier messages before it fill the prompt's `MessagesPlaceholder`.

        retriever: anything that `from_langchain` takes.
        backend: the model or its server.
        prompt: a `ChatPromptTemplate` with the documents, in any message; by default streamrag's own words.
        mode: how an update changes the documents in the prompt; by default as the retriever ranks them.
        context, question: the prompt's variables; the question's is by default the only other one.
        passage: the format of a document, as in `PromptTemplate`; by default its number and its text, and without
            `prompt` also its title and source.
        options: fields of the model, such as `max_tokens`.

        :raises ConfigurationError: the retriever or the prompt cannot be used, or an option is no field.
        """
        if unknown := sorted(options.keys() - cls.model_fields.keys()):  # LangChain ignores what is misspelt
            near = get_close_matches(unknown[0], cls.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"{cls.__name__} has no field {unknown[0]!r}{hint}")
        if prompt is None:
            template = PromptTemplate() if passage is None else PromptTemplate(passage=passage)
        else:
            template = template_of(
                prompt, context=context, question=question, passage=PASSAGE if passage is None else passage
            )
        return cls(pipeline=Pipeline(from_langchain(retriever), backend, mode=mode, template=template), **options)

    def model_post_init(self, context: Any) -> None:
        """Create the portal, and the parser that `tool_parser` names, if any; a copy has those of its model already."""
        super().model_post_init(context)
        if self.portal is None:
            self.portal = LoopPortal.to_pipeline(self.pipeline)
        if self.parser is None and self.tool_parser is not None:
            self.parser = ToolCallParser(self.tool_parser)

    @property
    def _llm_type(self) -> str:
        return "streamrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop")}
        parts = {"source": part_name(self.pipeline.source), "backend": part_name(self.pipeline.backend)}
        return {**parts, **{name: value for name, value in given.items() if value is not None}}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """Return LangChain's tracing parameters, with streamrag as provider and by default the backend as the model."""
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "streamrag"
        params.setdefault("ls_model_name", part_name(self.pipeline.backend))
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(self._astream(messages, stop, run_manager, **kwargs)) as chunks:
            return await agenerate_from_stream(chunks)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """Yield chunks of text or calls of tools, and a last one without text, but with usage and metadata."""
        query, options = self._parse_messages(messages, stop, kwargs)
        for part in self.portal.iterate(lambda: _answer(self, query, options)):
            yield self._chunk(query, part)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        """Yield chunks as `_stream` does, without blocking. Closing the generator stops the query."""
        query, options = self._parse_messages(messages, stop, kwargs)
        parse = partial(self._parse_messages, stop=stop, call=kwargs)
        message_id = f"{LC_ID_PREFIX}-{run_manager.run_id if run_manager else uuid4()}"  # LangChain's own
        step = self.tool_node and AgentStep(self.tool_node, self, messages, parse, options, message_id)
        if step is not None and isinstance(messages[-1], ToolMessage):
            # All but the last tokens are in the prefix cache, which only the first prompt of a query is looked up in.
            options.setdefault("overlap", False)
        parts = self.portal.aiterate(lambda: _answer(self, query, options))
        async with step or nullcontext(), aclosing(parts):
            async for part in parts:
                chunk = self._chunk(query, part)
                if step is not None:
                    step.add(cast(AIMessageChunk, chunk.message))
                yield chunk

    def _parse_messages(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Return the query and its options: the call's, else the model's fields. Warn of a query that may be a prompt.

        Sampling parameters, also the model's, replace those of the call's `params`; `timeout` becomes `deadline_s`;
        earlier messages become `system` and `history`, or with tools a `template`. The tool choice "none" drops tools.

        :raises ConfigurationError: there are tools without a tool parser, or a message that cannot be used.
        """
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop", "timeout")}
        given = {
            name: value for name, value in {**own, **call, "stop": stop or own["stop"]}.items() if value is not None
        }
        given.pop("ls_structured_output_format", None)  # for LangSmith
        if "timeout" in given:
            given["deadline_s"] = given.pop("timeout")
        sampling = {name: given.pop(name) for name in SAMPLING & given.keys()}
        params = given.pop("params", SamplingParams())
        if given.get("tools") and self.parser is None:
            raise ConfigurationError(NO_TOOLS)
        if given.get("tool_choice") == "none":
            given = {name: value for name, value in given.items() if name not in ("tools", "tool_choice")}
        tools, history = given.get("tools", ()), list[Turn]()
        if tools or uses_tools(messages):
            template = given.pop("template", self.pipeline.template)
            system, query, given["template"] = with_tools(template, openai_messages(messages), tools)
        else:
            system, history, query = _conversation(messages)
        if len(query) > LONG_QUERY_CHARS:
            _warn_of_prompt(query)
        return query, {
            "params": replace(params, **sampling) if isinstance(params, SamplingParams) else params,
            **({"system": system} if system else {}),
            "history": history,
            **given,
        }

    def bind_tools(
        self,
        tools: "Sequence[Any] | StreamragToolNode",
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return a runnable whose answers may call tools. Needs the field `tool_parser`, and vLLM.

        tools: functions, pydantic models, LangChain tools or schemas; or a `StreamragToolNode`, whose tools then start
            while the model still writes, and are read while they still write.
        tool_choice: "any" or True for any tool, or the name of one: the engine constrains the answer to a call. By
            default the model decides; with "none" it sees no tools.
        strict: whether a call that the engine constrains also follows the tool's schema.
        kwargs: as for `bind`; `parallel_tool_calls=False` for at most one call.

        :raises ConfigurationError: there is no tool parser, or no such tool.
        """
        if self.parser is None:
            raise ConfigurationError(NO_TOOLS)
        given = tools if isinstance(tools, Sequence) else tools.tools_by_name.values()
        definitions = [convert_to_openai_tool(tool, strict=strict) for tool in given]
        model = self.model_copy(update={"tool_node": tools if hasattr(tools, "start_early") else None})
        bound = model.bind(tools=definitions, tool_choice=openai_tool_choice(tool_choice, definitions), **kwargs)
        return cast(Runnable[LanguageModelInput, AIMessage], bound)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return a runnable whose answer is an instance of a pydantic model, or a dict of a TypedDict or JSON schema.

        The engine constrains the answer to the schema: embedded vLLM and vLLM's server do. The answer comes whole.

        include_raw: return a dict with the message as `raw`, `parsed`, and the `parsing_error` or None. By default, an
            answer that cannot be parsed raises LangChain's OutputParserException.
        kwargs: ignored, as `method` and `strict` of other chat models of LangChain; the schema is always enforced.
        """
        json_schema = convert_to_json_schema(schema)
        parser: BaseOutputParser[Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        structure = {"kwargs": {"method": "json_schema"}, "schema": json_schema}
        model = self.bind(json_schema=json_schema, ls_structured_output_format=structure)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def _chunk(self, query: str, part: AIMessageChunk | Answer) -> ChatGenerationChunk:
        """Return a chunk as it is, or for the answer an empty last one with usage and metadata.

        Warn if the query contains a cited text of `QUOTED_CHARS` or more, unless it was warned of for its length.
        """
        if isinstance(part, AIMessageChunk):
            return ChatGenerationChunk(message=part)
        texts = [citation.text.strip() for citation in part.citations]
        if len(query) <= LONG_QUERY_CHARS and any(len(text) >= QUOTED_CHARS and text in query for text in texts):
            _warn_of_prompt(query)
        about = {
            "citations": [asdict(citation) for citation in part.citations],
            "finish_reason": part.finish_reason,
            "alternatives": [each.text for each in part.alternatives] or None,
            "model_name": self.pipeline.backend.model.name,
            "timings": asdict(part.timings),
            "overlap": part.overlap and {"way": part.overlap.way, "reason": part.overlap.reason},
            "left_out": [chunk.uri for chunk in part.left_out] or None,
            "cut_short": part.cut_short,
            "source_error": part.source_error and str(part.source_error),
        }
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage_metadata(part.usage),
            response_metadata={name: value for name, value in about.items() if value is not None},
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)


def _usage_metadata(usage: TokenUsage) -> UsageMetadata | None:
    """Return the numbers of tokens in LangChain's form; None unless those of prompt and answer are known."""
    num_input, num_output = usage.num_prompt_tokens, usage.num_output_tokens
    if num_input is None or num_output is None:
        return None
    return UsageMetadata(input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output)


def _warn_of_prompt(query: str) -> None:
    """Warn that the query seems to be a prompt with documents, and that `from_retriever` should replace the chain."""
    warnings.warn(
        f"the query has {len(query):,} characters and looks like a prompt that already contains documents: it is what "
        "streamrag retrieves with, and retrieved documents are added to it. Replace the whole chain, not only the "
        "model: StreamragChatModel.from_retriever(retriever, backend, prompt) | StrOutputParser(), which keeps your "
        "prompt and takes the question",
        UserWarning,
        stacklevel=2,
    )


async def _answer(
    model: StreamragChatModel, query: str, options: dict[str, Any]
) -> AsyncGenerator[AIMessageChunk | Answer, None]:
    """Yield chunks with text or calls of tools, and then the answer, whose `finish_reason` may become "tool_calls".

    Takes tools out of `options`, for the parser; they need the pipeline's start and its tokenizer.
    """
    pipeline, reader = model.pipeline, AnswerReader()
    tools, choice = options.pop("tools", ()), options.pop("tool_choice", "auto")
    is_single = options.pop("parallel_tool_calls", None) is False
    if tools:
        await pipeline.start()  # for its tokenizer
        tokenizer = pipeline.backend.model.tokenizer
        await in_thread(tokenizer, partial(model.parser.load, tokenizer))
        params = options["params"]
        options["params"] = replace(params, extra={**model.parser.sampling(tools, choice), **params.extra})
        reader = model.parser.reader(tools, choice, is_single=is_single)
    async with pipeline.stream(query, **options) as stream:
        async for piece in stream:
            if delta := reader.push(piece):
                yield chunk_of(delta)
    yield replace(stream.result, finish_reason=reader.finish_reason(stream.result.finish_reason))


def _conversation(messages: Sequence[BaseMessage]) -> tuple[str, list[Turn], str]:
    """Return the text of the leading system messages, the history after them, and the query, which is the last message.

    :raises ConfigurationError: the last message is not human, or `turn_of` refuses a message.
    """
    turns = list(map(turn_of, messages))
    if not turns or turns[-1].role != "user":
        raise ConfigurationError("the last message must be a human message: it is the query")
    *earlier, query = turns
    num_system = next((i for i, turn in enumerate(earlier) if turn.role != "system"), len(earlier))
    return "\n\n".join(turn.text for turn in earlier[:num_system]), earlier[num_system:], query.text
