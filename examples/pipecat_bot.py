"""A Pipecat bot whose LLM service is a pipeline, with a scripted caller: python examples/pipecat_bot.py"""

import asyncio

from pipecat.frames import frames
from pipecat.pipeline.pipeline import Pipeline as Processors
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.turns.user_turn_strategies import ExternalUserTurnStrategies
from pipecat.workers.runner import WorkerRunner

from streamrag import Append, Chunk, Pipeline
from streamrag.adapters.pipecat import StreamragLLMService
from streamrag.testing import ScriptedBackend, ScriptedSource


async def speak(worker: PipelineWorker, words: str) -> None:
    begin, end = frames.ProposedUserStartedSpeakingFrame(), frames.ProposedUserStoppedSpeakingFrame()
    await worker.queue_frames([begin, frames.InterimTranscriptionFrame(words, "caller", "now")])
    await asyncio.sleep(1)
    await worker.queue_frames([frames.TranscriptionFrame(words, "caller", "now"), end, frames.EndFrame()])


async def main() -> None:
    source = ScriptedSource([0.5, Append(Chunk("Cancelling a scope cancels every task in it.", "tasks.md"))])
    async with Pipeline(source, ScriptedBackend("Cancel its scope.")) as pipeline:
        service = StreamragLLMService(pipeline)
        service.add_event_handler("on_answer", lambda _, answer: print(answer.text, answer.timings))
        turns = LLMUserAggregatorParams(user_turn_strategies=ExternalUserTurnStrategies())
        context = LLMContextAggregatorPair(LLMContext(), user_params=turns)
        service.follow(context.user())
        worker = PipelineWorker(Processors([context.user(), service, context.assistant()]))
        runner = WorkerRunner()
        await runner.add_workers(worker)
        await asyncio.gather(runner.run(), speak(worker, "how do I cancel every task"))


asyncio.run(main())
