"""An adapter for LiveKit Agents. Needs the extra `livekit`.

model = StreamragLLM(pipeline)
session = AgentSession(llm=model, stt=..., tts=...)
model.follow(session)
await session.start(agent=Agent(instructions="You answer callers of a print shop."), room=room)
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any, Unpack

from streamrag.adapters.voice_listener import VoiceListener, token_counts
from streamrag.errors import BackendError, MissingDependencyError, install_line
from streamrag.open_questions import ListenOptions
from streamrag.pipeline import Pipeline

try:
    from livekit import agents
    from livekit.agents import llm
except ImportError:
    raise MissingDependencyError("livekit-agents", install_line("livekit")) from None

__all__ = ["StreamragLLM"]


class StreamragLLM(llm.LLM):
    """A pipeline as the LLM of one `AgentSession`.

    It answers the last message of the user. The agent's instructions replace the template's system text, and the other
    messages are the history. `follow` the session to retrieve and prefill while its user speaks. A generation that
    LiveKit discards or interrupts stops at once. What fails becomes an `error` event of the session.

    It emits the event `answer` with each complete `Answer`, which has the citations and timings; that of a preemptive
    generation may be discarded afterwards.

    pipeline: the pipeline that answers. Start it in the event loop of the session, and close it after the session.
    options: `ListenOptions` for every question, such as `rule` and `params`.

    :raises ConfigurationError: an option cannot work.
    """

    def __init__(self, pipeline: Pipeline, **options: Unpack[ListenOptions]) -> None:
        super().__init__()
        self.listener = VoiceListener(pipeline, options)
        self._pipeline = pipeline
        self._final_text = ""  # of the turn that the user is speaking
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def model(self) -> str:
        with suppress(BackendError):  # before the start
            return self._pipeline.backend.model.name
        return str(super().model)

    @property
    def provider(self) -> str:
        return "streamrag"

    def follow(self, session: agents.AgentSession) -> None:
        """Retrieve and prefill with each transcript of this session, and stop that when the session closes."""

        def hear(event: agents.UserInputTranscribedEvent) -> None:
            text = f"{self._final_text} {event.transcript}".lstrip()  # as LiveKit joins the transcripts of a turn
            if event.is_final:
                self._final_text = text
            messages = list(_messages(session.current_agent.chat_ctx))
            self._run_soon(self.listener.hear(text, messages, is_final=event.is_final))

        def end_turn(event: agents.ConversationItemAddedEvent) -> None:
            if getattr(event.item, "role", "") == "user":
                self._final_text = ""

        session.on("user_input_transcribed", hear)
        session.on("conversation_item_added", end_turn)
        session.on("close", lambda event: self._run_soon(self.listener.aclose()))

    def chat(
        self,
        *,
        chat_ctx: llm.ChatContext,
        tools: list[llm.Tool] | None = None,
        conn_options: agents.APIConnectOptions = agents.DEFAULT_API_CONNECT_OPTIONS,
        **kwargs: Any,
    ) -> llm.LLMStream:
        return _AnswerStream(self, chat_ctx=chat_ctx, tools=tools or [], conn_options=conn_options)

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.gather(*self._tasks, self.listener.aclose(), return_exceptions=True)

    def _run_soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what a handler of events, which is not async, has to wait for."""
        task = asyncio.create_task(work, name="streamrag listener")
        self._tasks.add(task)
        task.add_done_callback(self._report)

    def _report(self, task: asyncio.Task[None]) -> None:
        """Forget a task that has ended; if it failed, emit a recoverable error."""
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            about = llm.LLMError(timestamp=time.time(), label=self.label, error=error, recoverable=True)
            self.emit("error", about)


class _AnswerStream(llm.LLMStream):
    """The answer as LiveKit reads it."""

    async def _run(self) -> None:
        id = agents.utils.shortuuid("answer_")
        async with self._llm.listener.answer(_messages(self._chat_ctx), self._tools) as answer:
            async for chunk in answer:
                delta = llm.ChoiceDelta(role="assistant", content=chunk.text)
                self._event_ch.send_nowait(llm.ChatChunk(id=id, delta=delta))
        if counts := token_counts(answer.result.usage):
            self._event_ch.send_nowait(llm.ChatChunk(id=id, usage=llm.CompletionUsage(**counts)))
        self._llm.emit("answer", answer.result)


def _messages(chat: llm.ChatContext) -> Iterator[tuple[str, str]]:
    return ((item.role, item.text_content or "") for item in chat.items if item.type == "message")
