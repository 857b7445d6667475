"""An adapter for Pipecat. Needs the extra `pipecat`.

service = StreamragLLMService(pipeline)
context = LLMContextAggregatorPair(LLMContext())
service.follow(context.user())
processors = [transport.input(), stt, context.user(), service, tts, transport.output(), context.assistant()]
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Unpack

from streamrag.adapters.voice_listener import VoiceListener, token_counts
from streamrag.errors import MissingDependencyError, StreamRagError, install_line
from streamrag.open_questions import ListenOptions
from streamrag.pipeline import Pipeline

try:
    from pipecat.frames.frames import (
        Frame,
        InterimTranscriptionFrame,
        LLMContextFrame,
        LLMFullResponseEndFrame,
        LLMFullResponseStartFrame,
        TranscriptionFrame,
    )
    from pipecat.metrics.metrics import LLMTokenUsage
    from pipecat.processors.aggregators.llm_context import LLMContext, LLMSpecificMessage, standard_message_text
    from pipecat.processors.aggregators.llm_response_universal import LLMUserAggregator
    from pipecat.processors.frame_processor import FrameDirection
    from pipecat.services.llm_service import LLMService
    from pipecat.services.settings import LLMSettings
    from pipecat.utils.string import TextPartForConcatenation, concatenate_aggregated_text
except ImportError:
    raise MissingDependencyError("pipecat-ai", install_line("pipecat")) from None

__all__ = ["StreamragLLMService"]


class StreamragLLMService(LLMService):
    """A pipeline as the LLM service of one conversation.

    It answers the last message of the user in each `LLMContextFrame`. System messages replace the template's system
    text, and the other messages are the history. `follow` the user's aggregator to retrieve and prefill while the user
    speaks. An interruption stops the answer. The answer to a predicted end of the turn is held back until the turn has
    ended, as with all of Pipecat's LLM services. What fails becomes an `ErrorFrame`.

    The event `on_answer` has each complete `Answer`, with the citations and timings.

    pipeline: the pipeline that answers. Start it in the event loop of the bot, and close it after the bot.
    options: `ListenOptions` for every question, such as `rule` and `params`.

    :raises ConfigurationError: an option cannot work.
    """

    def __init__(self, pipeline: Pipeline, **options: Unpack[ListenOptions]) -> None:
        settings = LLMSettings(**{each.name: None for each in fields(LLMSettings) if each.name != "extra"})
        super().__init__(settings=settings)
        self._listener = VoiceListener(pipeline, options)
        self._register_event_handler("on_answer")

    def follow(self, aggregator: LLMUserAggregator) -> None:
        """Retrieve and prefill with each transcript that this aggregator collects for the user's turn."""

        async def hear(aggregator: LLMUserAggregator, frame: Frame) -> None:
            if isinstance(frame, InterimTranscriptionFrame | TranscriptionFrame):
                parts = aggregator.aggregation_string(), frame.text
                text = concatenate_aggregated_text(
                    [TextPartForConcatenation(part, frame.includes_inter_frame_spaces) for part in parts]
                )
                is_final = isinstance(frame, TranscriptionFrame)
                await self._listener.hear(text, self._messages(aggregator.context), is_final=is_final)

        aggregator.add_event_handler("on_before_process_frame", hear)

    def can_generate_metrics(self) -> bool:
        return True

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        await self.push_frame(LLMFullResponseStartFrame())
        await self.start_processing_metrics()
        await self.start_ttfb_metrics()
        try:
            await self._answer(frame.context)
        except StreamRagError as error:
            await self.push_error(str(error), exception=error)
        finally:
            await self.stop_processing_metrics()
            await self.push_frame(LLMFullResponseEndFrame())

    async def cleanup(self) -> None:
        await self._listener.aclose()
        await super().cleanup()

    async def _answer(self, context: LLMContext) -> None:
        tools = getattr(context.tools, "standard_tools", ())
        async with self._listener.answer(self._messages(context), tools) as answer:
            async for chunk in answer:
                await self.stop_ttfb_metrics()
                await self._push_llm_text(chunk.text)
        if counts := token_counts(answer.result.usage):
            await self.start_llm_usage_metrics(LLMTokenUsage(**counts))
        await self._call_event_handler("on_answer", answer.result)

    def _messages(self, context: LLMContext) -> Iterator[tuple[str, str]]:
        yield "system", self._settings.system_instruction or ""  # Pipecat's own, such as how to mark an incomplete turn
        for message in context.messages:
            if not isinstance(message, LLMSpecificMessage):
                yield message["role"], standard_message_text(message)
