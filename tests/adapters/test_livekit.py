"""A pipeline as the LLM of LiveKit's AgentSession: text only, with a recognizer of speech that is scripted."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

agents = pytest.importorskip("livekit.agents", reason="livekit-agents is not installed: `make voice`")

from livekit.agents import stt  # noqa: E402
from livekit.agents.voice.io import AudioInput, TextOutput  # noqa: E402

from streamrag import Append, Chunk, OpenAIBackend, Pipeline, Prompt, SourceError, Turn  # noqa: E402
from streamrag.adapters.livekit import StreamragLLM  # noqa: E402
from streamrag.errors import ConfigurationError  # noqa: E402
from streamrag.open_questions import WaitForWords  # noqa: E402
from streamrag.testing import ScriptedBackend, ScriptedSource  # noqa: E402

PAGE = Append(Chunk("A task group is cancelled by its scope.", "tasks.md"))
INSTRUCTIONS = "You answer callers."
QUESTION = "how do I cancel a task"
AT_ONCE = WaitForWords(settle_s=0, pause_s=0)
INTERIM, FINAL = stt.SpeechEventType.INTERIM_TRANSCRIPT, stt.SpeechEventType.FINAL_TRANSCRIPT
PREDICTED = stt.SpeechEventType.PREFLIGHT_TRANSCRIPT
BEGIN, END = stt.SpeechEventType.START_OF_SPEECH, stt.SpeechEventType.END_OF_SPEECH


class Recognizer(stt.STT):
    """It says what the test says."""

    def __init__(self) -> None:
        super().__init__(capabilities=stt.STTCapabilities(streaming=True, interim_results=True))
        self.events = asyncio.Queue[stt.SpeechEvent]()

    async def _recognize_impl(self, *arguments: Any, **options: Any) -> stt.SpeechEvent:
        raise NotImplementedError

    def stream(self, *, language: Any = None, conn_options: Any = None) -> "RecognizerStream":
        return RecognizerStream(stt=self, conn_options=conn_options)

    def say(self, *said: tuple[stt.SpeechEventType, str] | stt.SpeechEventType) -> None:
        for each in said:
            kind, text = each if isinstance(each, tuple) else (each, "")
            spoken = [stt.SpeechData(text=text, language="en")] if text else []
            self.events.put_nowait(stt.SpeechEvent(type=kind, alternatives=spoken))


class RecognizerStream(stt.RecognizeStream):
    async def _run(self) -> None:
        while True:
            self._event_ch.send_nowait(await self._stt.events.get())


class Microphone(AudioInput):
    """Silence, of which the recognizer needs none."""

    def __init__(self) -> None:
        super().__init__(label="microphone")

    async def __anext__(self) -> Any:
        await asyncio.sleep(3600)


class Screen(TextOutput):
    def __init__(self) -> None:
        super().__init__(label="screen", next_in_chain=None)
        self.text = ""
        self.answers: list[str] = []

    async def capture_text(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        self.answers.append(self.text)
        self.text = ""


class Call:
    """A session, and what happened in it."""

    def __init__(self, model: StreamragLLM, **turn_handling: Any) -> None:
        self.recognizer, self.screen = Recognizer(), Screen()
        self.session = agents.AgentSession(
            llm=model,
            stt=self.recognizer,
            vad=None,
            turn_handling={"turn_detection": "stt", "endpointing": {"min_delay": 0.05}, **turn_handling},
        )
        self.session.input.audio = Microphone()
        self.session.output.transcription = self.screen
        self.errors: list[Any] = []
        self.results: list[Any] = []
        self.session.on("error", lambda event: self.errors.append(event.error))
        model.on("answer", self.results.append)
        model.follow(self.session)


@asynccontextmanager
async def call_to(
    pipeline: Pipeline, model: StreamragLLM | None = None, agent: Any = None, **turn_handling: Any
) -> AsyncIterator[Call]:
    """A call; afterwards nothing is left."""
    async with pipeline:
        model = model or StreamragLLM(pipeline, rule=AT_ONCE)
        call = Call(model, **turn_handling)
        await call.session.start(agent=agent or agents.Agent(instructions=INSTRUCTIONS), record=False)
        try:
            yield call
        finally:
            await call.session.aclose()
            await model.aclose()
        assert pipeline.num_queries == 0
        if isinstance(pipeline.backend, ScriptedBackend):
            assert pipeline.backend.num_requests == 0
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("streamrag listener")] == []


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def complete(backend: ScriptedBackend) -> list[Prompt]:
    return [prompt for prompts in backend.prompts for prompt in prompts if prompt.is_complete]


async def one_shot(question: str, *history: Turn) -> Prompt:
    """The prompt of a question that is asked as a whole."""
    backend = ScriptedBackend()
    async with Pipeline(ScriptedSource([PAGE]), backend, overlap=False) as pipeline:
        assert [_ async for _ in pipeline.stream(question, system=INSTRUCTIONS, history=history)]
    (prompt,) = complete(backend)
    return prompt


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource([PAGE])


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend("By its scope.")


async def test_a_typed_question_is_answered_with_instructions_and_history(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with call_to(Pipeline(source, backend)) as call:
        result = await call.session.run(user_input=QUESTION)
        message = result.expect.next_event().is_message(role="assistant")
        assert message.event().item.text_content == "By its scope."
        await call.session.run(user_input="Why?")
        metrics = call.session.usage.model_usage[0]
    first, second = complete(backend)
    assert first.token_ids == (await one_shot(QUESTION)).token_ids
    history = Turn("user", QUESTION), Turn("assistant", "By its scope.")
    assert second.token_ids == (await one_shot("Why?", *history)).token_ids
    assert [answer.citations[0].uri for answer in call.results] == ["tasks.md"] * 2
    assert (metrics.provider, metrics.model, metrics.output_tokens) == (
        "streamrag",
        "scripted",
        2 * len("By its scope."),
    )


async def test_retrieval_and_prefill_begin_while_the_user_speaks_and_the_commit_only_completes_the_prompt(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with call_to(Pipeline(source, backend)) as call:
        call.recognizer.say(BEGIN, (INTERIM, "how do"), (INTERIM, QUESTION))
        await until(lambda: backend.prompts and backend.prompts[-1])
        assert complete(backend) == []
        call.recognizer.say((FINAL, QUESTION), END)
        await until(lambda: call.screen.answers)
        assert call.screen.answers == ["By its scope."]
        call.recognizer.say(BEGIN, (INTERIM, "cancel it"))  # in the same conversation as what is committed
        await until(lambda: len(source.queries) == 2)
        call.recognizer.say((FINAL, "cancel it"), (INTERIM, "two times"))
        await until(lambda: source.queries[-1] == "cancel it two times")
        call.recognizer.say((FINAL, "twice?"), END)
        await until(lambda: len(call.screen.answers) == 2)
    assert source.queries[:2] == [QUESTION, "cancel it"]
    first, second = complete(backend)
    assert first.token_ids == (await one_shot(QUESTION)).token_ids
    history = Turn("user", QUESTION), Turn("assistant", "By its scope.")
    assert second.token_ids == (await one_shot("cancel it twice?", *history)).token_ids


async def test_a_transcript_that_changes_is_answered_as_it_was_committed(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with call_to(Pipeline(source, backend), preemptive_generation={"enabled": False}) as call:
        call.recognizer.say(BEGIN, (INTERIM, "how do I counsel"))
        await until(lambda: source.queries)
        call.recognizer.say((INTERIM, "how do I cancel"), (FINAL, QUESTION), END)
        await until(lambda: call.screen.answers)
    assert (source.queries[0], source.queries[-1]) == ("how do I counsel", QUESTION)
    (prompt,) = complete(backend)
    assert prompt.token_ids == (await one_shot(QUESTION)).token_ids


async def test_a_preemptive_generation_is_the_answer_and_there_is_no_other(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with call_to(Pipeline(source, backend)) as call:
        call.recognizer.say(BEGIN, (INTERIM, QUESTION), (PREDICTED, QUESTION))
        await until(lambda: call.results)
        assert call.screen.answers == []
        call.recognizer.say((FINAL, QUESTION), END)
        await until(lambda: call.screen.answers)
    assert call.screen.answers == ["By its scope."]
    assert source.queries == [QUESTION]
    assert len(complete(backend)) == 1


async def test_a_preemptive_generation_that_is_discarded_stops_and_a_new_question_begins(
    source: ScriptedSource,
) -> None:
    backend = ScriptedBackend("By its scope.", is_endless=True)
    async with call_to(pipeline := Pipeline(source, backend)) as call:
        call.recognizer.say(BEGIN, (PREDICTED, "how do I cancel"))
        await until(lambda: complete(backend))
        call.recognizer.say((INTERIM, "how do I cancel a task group"))  # LiveKit discards it
        await until(lambda: source.queries[-1] == "how do I cancel a task group" and pipeline.num_queries == 1)
        assert call.screen.text == ""
        call.recognizer.say((FINAL, "how do I cancel a task group"), END)
        await until(lambda: call.screen.text == "By its scope.")
        assert pipeline.num_queries == 1
    assert len(complete(backend)) == 2


@pytest.mark.parametrize("is_by_voice", [True, False])
async def test_an_interruption_stops_the_answer(source: ScriptedSource, is_by_voice: bool) -> None:
    backend = ScriptedBackend("By its scope.", is_endless=True)
    async with call_to(pipeline := Pipeline(source, backend)) as call:
        call.recognizer.say(BEGIN, (FINAL, QUESTION), END)
        await until(lambda: call.screen.text == "By its scope.")
        if is_by_voice:
            call.recognizer.say(BEGIN, (INTERIM, "Stop"), (FINAL, "Stop it"), END)
            await until(lambda: len(complete(backend)) == 2)
            assert pipeline.num_queries == 1
        else:
            await call.session.interrupt()
            await until(lambda: pipeline.num_queries == 0)
            assert backend.num_requests == 0


async def test_a_session_that_is_closed_stops_its_open_question(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with call_to(pipeline := Pipeline(source, backend)) as call:
        call.recognizer.say(BEGIN, (INTERIM, QUESTION))
        await until(lambda: backend.num_requests)
        await call.session.aclose()
        await until(lambda: pipeline.num_queries == 0)
    assert complete(backend) == []


async def test_a_failed_retrieval_is_an_error_event_and_the_next_question_is_answered(backend: ScriptedBackend) -> None:
    steps = {QUESTION: [SourceError("the site is down")]}
    source = ScriptedSource(lambda query: steps.get(query, [PAGE]))
    async with call_to(Pipeline(source, backend)) as call:
        with pytest.raises(SourceError, match="the site is down"):
            await call.session.run(user_input=QUESTION)
        call.recognizer.say(BEGIN, (INTERIM, QUESTION))
        await until(lambda: len(source.queries) == 2)
        call.recognizer.say((FINAL, QUESTION), END)
        await until(lambda: len(call.errors) == 2)
        assert [(str(error.error), error.recoverable) for error in call.errors] == [("the site is down", False)] * 2
        await call.session.run(user_input="Why?")
    assert call.screen.answers == ["By its scope."]


async def test_a_rule_that_fails_is_an_error_event_and_the_question_is_answered(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    def rule(text: str, retrieved: str) -> float:
        raise ArithmeticError("no rule")

    pipeline = Pipeline(source, backend)
    async with call_to(pipeline, StreamragLLM(pipeline, rule=rule)) as call:
        call.recognizer.say(BEGIN, (INTERIM, QUESTION), (FINAL, QUESTION), END)
        await until(lambda: call.screen.answers)
    assert call.screen.answers == ["By its scope."]
    assert {(str(error.error), error.recoverable) for error in call.errors} == {("no rule", True)}


async def test_a_livekit_agent_with_tools_or_no_user_message_is_told_what_to_do(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    @agents.function_tool
    async def look_up() -> str:
        """Look something up."""
        return ""

    async with call_to(Pipeline(source, backend)) as call:
        await call.session.generate_reply(instructions="Greet the caller.")
        assert "no message of its user" in str(call.errors[0].error)
    agent = agents.Agent(instructions=INSTRUCTIONS, tools=[look_up])
    async with call_to(pipeline := Pipeline(source, backend), agent=agent) as call:
        with pytest.raises(ConfigurationError, match="the agent has 1: give it none"):
            await call.session.run(user_input=QUESTION)
        with pytest.raises(ConfigurationError, match="max_retrievals=-1"):
            StreamragLLM(pipeline, max_retrievals=-1)
    assert source.queries == []


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.03])
async def test_a_stream_that_is_closed_at_any_moment_leaves_nothing(after_s: float) -> None:
    source = ScriptedSource([0.005, PAGE, 0.005])
    async with Pipeline(source, backend := ScriptedBackend(is_endless=True)) as pipeline:
        model = StreamragLLM(pipeline, rule=AT_ONCE)
        chat = agents.ChatContext.empty()
        await model.listener.hear(QUESTION, [])
        chat.add_message(role="user", content=QUESTION)
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s), model.chat(chat_ctx=chat) as answer:
                async for _ in answer:
                    pass
        await model.aclose()
        assert (pipeline.num_queries, backend.num_requests, source.num_streams) == (0, 0, 0)


def test_a_pipeline_that_is_not_started_has_a_model_that_is_not_known() -> None:
    pipeline = Pipeline(ScriptedSource([]), OpenAIBackend("http://127.0.0.1:1/v1", "model"))
    assert StreamragLLM(pipeline).model == "unknown"


def test_the_example_retrieves_before_the_turn_ends() -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "examples/livekit_agent.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-3:] == [
        "retrieving for 'how do I cancel every task'",
        "the turn ends",
        "Cancel its scope.",
    ]
