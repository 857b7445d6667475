"""A pipeline as Pipecat's LLM service, between Pipecat's own aggregators: frames in, frames out."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

frames = pytest.importorskip("pipecat.frames.frames", reason="pipecat-ai is not installed: `make voice`")

from pipecat.metrics.metrics import LLMUsageMetricsData, TTFBMetricsData  # noqa: E402
from pipecat.pipeline.pipeline import Pipeline as Processors  # noqa: E402
from pipecat.pipeline.worker import PipelineParams, PipelineWorker  # noqa: E402
from pipecat.processors.aggregators.llm_context import LLMContext  # noqa: E402
from pipecat.processors.aggregators.llm_response_universal import (  # noqa: E402
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor  # noqa: E402
from pipecat.services.llm_service import FunctionCallParams  # noqa: E402
from pipecat.tests.utils import run_test  # noqa: E402
from pipecat.turns.user_turn_strategies import EagerUserTurnStrategies, ExternalUserTurnStrategies  # noqa: E402
from pipecat.workers.runner import WorkerRunner  # noqa: E402

from streamrag import Append, Chunk, Pipeline, Prompt, SourceError, Turn  # noqa: E402
from streamrag.adapters.pipecat import StreamragLLMService  # noqa: E402
from streamrag.errors import ConfigurationError  # noqa: E402
from streamrag.open_questions import WaitForWords  # noqa: E402
from streamrag.testing import ScriptedBackend, ScriptedSource  # noqa: E402

PAGE = Append(Chunk("A task group is cancelled by its scope.", "tasks.md"))
INSTRUCTIONS = "You answer callers."
QUESTION = "how do I cancel a task"
AT_ONCE = WaitForWords(settle_s=0, pause_s=0)


def begin() -> Any:
    return frames.ProposedUserStartedSpeakingFrame()


def end() -> Any:
    return frames.ProposedUserStoppedSpeakingFrame()


def interim(text: str) -> Any:
    return frames.InterimTranscriptionFrame(text, "user", "now")


def predicted(text: str) -> Any:
    return frames.EagerTranscriptionFrame(text, "user", "now")


def final(text: str) -> Any:
    return frames.TranscriptionFrame(text, "user", "now")


class Ends(FrameProcessor):
    """Keeps what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Any] = []

    async def process_frame(self, frame: Any, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        await self.push_frame(frame, direction)

    def of(self, kind: type) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    @property
    def text(self) -> str:
        return "".join(frame.text for frame in self.of(frames.LLMTextFrame))

    @property
    def num_answers(self) -> int:
        return len(self.of(frames.LLMFullResponseEndFrame))


class Bot:
    """A bot of Pipecat's own parts and ours, and what came out of the service and of its end."""

    def __init__(self, service: StreamragLLMService, strategies: Any = None) -> None:
        self.context = LLMContext([{"role": "system", "content": INSTRUCTIONS}])
        strategies = strategies or ExternalUserTurnStrategies()
        pair = LLMContextAggregatorPair(
            self.context, user_params=LLMUserAggregatorParams(user_turn_strategies=strategies)
        )
        service.follow(pair.user())
        self.results: list[Any] = []
        service.add_event_handler("on_answer", lambda service, answer: self.results.append(answer))
        self.out = Ends()
        self.worker = PipelineWorker(
            Processors([pair.user(), service, self.out, pair.assistant()]),
            params=PipelineParams(enable_metrics=True, enable_usage_metrics=True),
            cancel_on_idle_timeout=False,
            enable_rtvi=False,
        )
        self.errors: list[Any] = []
        self.worker.add_event_handler("on_pipeline_error", lambda worker, frame: self.errors.append(frame))

    async def take(self, *given: Any) -> None:
        for frame in given:
            await self.worker.queue_frame(frame)


@asynccontextmanager
async def bot_of(
    pipeline: Pipeline, service: StreamragLLMService | None = None, strategies: Any = None
) -> AsyncIterator[Bot]:
    """A bot that runs; afterwards nothing is left."""
    async with pipeline:
        bot = Bot(service or StreamragLLMService(pipeline, rule=AT_ONCE), strategies)
        is_started = asyncio.Event()
        bot.worker.add_event_handler("on_pipeline_started", lambda worker, frame: is_started.set())
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(bot.worker)
        task = asyncio.create_task(runner.run())
        await is_started.wait()
        try:
            yield bot
        finally:
            await bot.take(frames.EndFrame())
            await task
        assert pipeline.num_queries == 0
        assert isinstance(pipeline.backend, ScriptedBackend)
        assert pipeline.backend.num_requests == 0


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


async def test_a_context_frame_is_answered_with_system_messages_and_history(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    history = Turn("user", "Hello"), Turn("assistant", "Hello!")
    context = LLMContext(
        [
            {"role": "system", "content": INSTRUCTIONS},
            *({"role": turn.role, "content": turn.text} for turn in history),
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        ]
    )
    async with Pipeline(source, backend) as pipeline:
        down, _ = await run_test(
            StreamragLLMService(pipeline),
            frames_to_send=[frames.LLMContextFrame(context)],
            expected_down_frames=[
                frames.LLMServiceMetadataFrame,
                frames.LLMFullResponseStartFrame,
                *[frames.LLMTextFrame] * len("By its scope."),
                frames.LLMFullResponseEndFrame,
            ],
        )
        assert pipeline.num_queries == 0
    assert "".join(frame.text for frame in down if isinstance(frame, frames.LLMTextFrame)) == "By its scope."
    (prompt,) = complete(backend)
    assert prompt.token_ids == (await one_shot(QUESTION, *history)).token_ids


async def test_retrieval_and_prefill_begin_while_the_user_speaks_and_the_commit_only_completes_the_prompt(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with bot_of(Pipeline(source, backend)) as bot:
        await bot.take(begin(), interim("how do"), interim(QUESTION))
        await until(lambda: backend.prompts and backend.prompts[-1])
        assert complete(backend) == []
        await bot.take(final(QUESTION), end())
        await until(lambda: len(bot.context.messages) == 3)
        assert bot.out.text == "By its scope."
        await bot.take(begin(), interim("cancel it"))  # in the same conversation as what is committed
        await until(lambda: len(source.queries) == 2)
        await bot.take(final("cancel it"), interim("two times"))
        await until(lambda: source.queries[-1] == "cancel it two times")
        await bot.take(final("twice?"), end())
        await until(lambda: len(bot.results) == 2)
        metrics = [data for frame in bot.out.of(frames.MetricsFrame) for data in frame.data]
    assert source.queries[:2] == [QUESTION, "cancel it"]
    first, second = complete(backend)
    assert first.token_ids == (await one_shot(QUESTION)).token_ids
    history = Turn("user", QUESTION), Turn("assistant", "By its scope.")
    assert second.token_ids == (await one_shot("cancel it twice?", *history)).token_ids
    assert [answer.citations[0].uri for answer in bot.results] == ["tasks.md"] * 2
    assert sum(isinstance(data, TTFBMetricsData) and data.value > 0 for data in metrics) == 2
    usages = [data.value for data in metrics if isinstance(data, LLMUsageMetricsData)]
    assert [usage.completion_tokens for usage in usages] == [len("By its scope.")] * 2


async def test_a_transcript_that_changes_is_answered_as_it_was_committed(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with bot_of(Pipeline(source, backend)) as bot:
        await bot.take(begin(), interim("how do I counsel"))
        await until(lambda: source.queries)
        await bot.take(interim("how do I cancel"), final(QUESTION), end())
        await until(lambda: bot.out.num_answers)
    assert (source.queries[0], source.queries[-1]) == ("how do I counsel", QUESTION)
    (prompt,) = complete(backend)
    assert prompt.token_ids == (await one_shot(QUESTION)).token_ids


async def test_the_answer_to_a_predicted_end_of_turn_is_held_and_there_is_no_other(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async with bot_of(Pipeline(source, backend), strategies=EagerUserTurnStrategies()) as bot:
        await bot.take(begin(), interim(QUESTION), predicted(QUESTION))
        await until(lambda: bot.results)
        assert bot.out.text == ""
        await bot.take(final(QUESTION), end())
        await until(lambda: bot.out.num_answers)
    assert bot.out.text == "By its scope."
    assert source.queries == [QUESTION]
    assert len(complete(backend)) == 1


async def test_a_prediction_that_is_withdrawn_stops_its_answer_and_a_new_question_begins(
    source: ScriptedSource,
) -> None:
    backend = ScriptedBackend("By its scope.", is_endless=True)
    async with bot_of(pipeline := Pipeline(source, backend), strategies=EagerUserTurnStrategies()) as bot:
        await bot.take(begin(), predicted("how do I cancel"))
        await until(lambda: complete(backend))
        await bot.take(frames.EagerEndOfTurnCancelFrame())
        await until(lambda: pipeline.num_queries == 0)
        await bot.take(interim("how do I cancel a task group"))
        await until(lambda: source.queries[-1] == "how do I cancel a task group")
        await bot.take(final("how do I cancel a task group"), end())
        await until(lambda: bot.out.text == "By its scope.")
        assert pipeline.num_queries == 1
        await bot.take(frames.InterruptionFrame())
    assert len(complete(backend)) == 2


async def test_an_interruption_stops_the_answer(source: ScriptedSource) -> None:
    backend = ScriptedBackend("By its scope.", is_endless=True)
    async with bot_of(pipeline := Pipeline(source, backend)) as bot:
        await bot.take(begin(), final(QUESTION), end())
        await until(lambda: bot.out.text == "By its scope.")
        await bot.take(begin())
        await until(lambda: pipeline.num_queries == 0)
        assert backend.num_requests == 0
        assert bot.results == []


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_bot_that_ends_stops_its_open_question(
    source: ScriptedSource, backend: ScriptedBackend, is_cancelled: bool
) -> None:
    async with bot_of(Pipeline(source, backend)) as bot:
        await bot.take(begin(), interim(QUESTION))
        await until(lambda: backend.num_requests)
        if is_cancelled:
            await bot.worker.cancel()
    assert complete(backend) == []


async def test_a_failed_retrieval_is_an_error_frame_and_the_next_question_is_answered(backend: ScriptedBackend) -> None:
    steps = {QUESTION: [SourceError("the site is down")]}
    source = ScriptedSource(lambda query: steps.get(query, [PAGE]))
    async with bot_of(Pipeline(source, backend)) as bot:
        await bot.take(begin(), interim(QUESTION))
        await until(lambda: source.queries)
        await bot.take(final(QUESTION), end())
        await until(lambda: bot.errors and bot.out.num_answers == 1)
        (error,) = bot.errors
        assert (error.error, type(error.exception)) == ("the site is down", SourceError)
        await bot.take(begin(), final("Why?"), end())
        await until(lambda: bot.out.num_answers == 2)
    assert bot.out.text == "By its scope."


async def test_a_pipecat_bot_with_tools_or_no_user_message_is_told_what_to_do(
    source: ScriptedSource, backend: ScriptedBackend
) -> None:
    async def look_up(params: FunctionCallParams) -> None:
        """Look something up."""

    async with bot_of(pipeline := Pipeline(source, backend)) as bot:
        await bot.take(frames.LLMRunFrame())
        await until(lambda: bot.errors)
        assert "no message of its user" in bot.errors[0].error
        assert "TTSSpeakFrame" in bot.errors[0].error
        await bot.take(frames.LLMSetToolsFrame([look_up]), begin(), final(QUESTION), end())
        await until(lambda: len(bot.errors) == 2)
        assert "the agent has 1: give it none" in bot.errors[1].error
        with pytest.raises(ConfigurationError, match="max_retrievals=-1"):
            StreamragLLMService(pipeline, max_retrievals=-1)
    assert complete(backend) == []


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.03])
async def test_a_bot_that_is_cancelled_at_any_moment_leaves_nothing(after_s: float, backend: ScriptedBackend) -> None:
    source = ScriptedSource([0.005, PAGE, 0.005])
    async with bot_of(Pipeline(source, ScriptedBackend(is_endless=True))) as bot:
        await bot.take(begin(), interim("how do I"), interim(QUESTION), final(QUESTION), end())
        await asyncio.sleep(after_s)
        with suppress(asyncio.CancelledError):
            await bot.worker.cancel()
    assert source.num_streams == 0


def test_the_example_answers_and_says_how_long_it_took() -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "examples/pipecat_bot.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"Cancel its scope\. Timings\(.*ttft_after_retrieval_s=.*\)\n", ended.stdout)
