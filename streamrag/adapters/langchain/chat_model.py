"""A pipeline as a LangChain chat model."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, fields, replace
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import Field

from streamrag.adapters.portal import LoopPortal, PortalOwner
from streamrag.core import AnswerChunk, SamplingParams, Turn, part_name
from streamrag.errors import ConfigurationError
from streamrag.pipeline import Pipeline
from streamrag.support.messages import type_name
from streamrag.telemetry import Answer

SAMPLING = {field.name for field in fields(SamplingParams)}


class StreamragChatModel(PortalOwner, BaseChatModel):
    """A pipeline as a LangChain chat model. The last human message is the query; retrieval and prefill overlap.

    Leading system messages replace the template's system text; the messages between them and the query are the
    history. A call may override all fields, and the options of `SamplingParams` and `QueryOptions`.

    The answer streams in chunks. The last one has `usage_metadata`, and in `response_metadata` the
    `citations` (number, uri, title, passage, text and score of each passage in the prompt), `finish_reason`,
    `model_name`, `timings`, and `cut_short` and `source_error` if retrieval ended early.

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
    """Time limit of an answer in seconds, including retrieval."""
    cache: BaseCache | bool | None = Field(default=False, exclude=True)
    """LangChain's cache; off by default, because the answer depends on the retrieved documents."""
    portal: Any = Field(default=None, exclude=True, repr=False)
    """The portal to the pipeline's event loop; copies of the model share it."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.portal is None:
            self.portal = LoopPortal.to_pipeline(self.pipeline)

    @property
    def _llm_type(self) -> str:
        return "streamrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop")}
        parts = {"source": part_name(self.pipeline.source), "backend": part_name(self.pipeline.backend)}
        return {**parts, **{name: value for name, value in given.items() if value is not None}}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
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
        query, options = self._parse_messages(messages, stop, kwargs)
        for part in self.portal.iterate(lambda: _answer(self.pipeline, query, options)):
            yield self._chunk(part)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        query, options = self._parse_messages(messages, stop, kwargs)
        async with aclosing(self.portal.aiterate(lambda: _answer(self.pipeline, query, options))) as parts:
            async for part in parts:
                yield self._chunk(part)

    def _parse_messages(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Return the query and its options: the call's, else the model's fields. `timeout` becomes `deadline_s`."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop", "timeout")}
        given = {
            name: value for name, value in {**own, **call, "stop": stop or own["stop"]}.items() if value is not None
        }
        if "timeout" in given:
            given["deadline_s"] = given.pop("timeout")
        sampling = {name: given.pop(name) for name in SAMPLING & given.keys()}
        params = given.pop("params", SamplingParams())
        system, history, query = _conversation(messages)
        return query, {
            "params": replace(params, **sampling) if isinstance(params, SamplingParams) else params,
            **({"system": system} if system else {}),
            "history": history,
            **given,
        }

    def _chunk(self, part: AnswerChunk | Answer) -> ChatGenerationChunk:
        """Return a chunk of text, or for the answer the last chunk, which has usage and metadata but no text."""
        if isinstance(part, AnswerChunk):
            return ChatGenerationChunk(message=AIMessageChunk(content=part.text))
        num_prompt, num_answer = part.num_prompt_tokens, len(part.token_ids)
        about = {
            "citations": [asdict(citation) for citation in part.citations],
            "finish_reason": part.finish_reason,
            "model_name": self.pipeline.backend.model.name,
            "timings": asdict(part.timings),
            "cut_short": part.cut_short,
            "source_error": part.source_error and str(part.source_error),
        }
        usage = UsageMetadata(input_tokens=num_prompt, output_tokens=num_answer, total_tokens=num_prompt + num_answer)
        message = AIMessageChunk(
            content="",
            usage_metadata=usage,
            response_metadata={name: value for name, value in about.items() if value is not None},
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)


async def _answer(
    pipeline: Pipeline, query: str, options: Mapping[str, Any]
) -> AsyncGenerator[AnswerChunk | Answer, None]:
    """Yield the chunks with text, and then the whole answer."""
    async with pipeline.stream(query, **options) as stream:
        async for chunk in stream:
            if chunk.text:
                yield chunk
    yield stream.result


def _conversation(messages: Sequence[BaseMessage]) -> tuple[str, list[Turn], str]:
    """Return the system text, the history, and the query; raise ConfigurationError for other messages than text."""
    turns: list[Turn] = []
    for message in messages:
        match message:
            case SystemMessage():
                role = "system"
            case HumanMessage():
                role = "user"
            case AIMessage() if not message.tool_calls:
                role = "assistant"
            case _:
                raise ConfigurationError(
                    f"{type_name(message)} for tools is not supported: use system, human and AI messages with text"
                )
        if role != "assistant" and any(block["type"] != "text" for block in message.content_blocks):
            raise ConfigurationError(f"{type_name(message)} has content other than text, which is not supported")
        turns.append(Turn(role, str(message.text)))  # type: ignore[arg-type]
    if not turns or turns[-1].role != "user":
        raise ConfigurationError("the last message must be a human message: it is the query")
    *earlier, query = turns
    num_system = next((i for i, turn in enumerate(earlier) if turn.role != "system"), len(earlier))
    return "\n\n".join(turn.text for turn in earlier[:num_system]), earlier[num_system:], query.text
