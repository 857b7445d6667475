"""Calls of vLLM's engine that end, also when the engine dies, and leave nothing in it, whoever is cancelled."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from streamrag.backends.vllm.client.errors import vllm_errors_translated
from streamrag.errors import BackendError, EngineDeadError
from streamrag.support.tasks import wait_regardless

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

DEATH_POLL_S = 0.1


async def ask_engine(engine: "AsyncLLM", question: Coroutine[Any, Any, T], why_dead: Callable[[], str]) -> T:
    """The engine's answer; vLLM itself would wait for ever for that of a dead one.

    :raises EngineDeadError: the engine's process is gone, or goes before it answers.
    :raises BackendError: vLLM failed.
    """
    answer = asyncio.ensure_future(question)
    try:
        with vllm_errors_translated(why_dead):
            while not answer.done():
                await asyncio.wait([answer], timeout=DEATH_POLL_S)
                if not answer.done() and engine.errored:
                    raise EngineDeadError(why_dead())
            return answer.result()
    finally:
        answer.cancel()


async def abort_surely(engine: "AsyncLLM", request_id: str, *, is_internal: bool = False) -> None:
    """Have the engine forget a request, if it knows it, before any cancellation goes on."""
    if engine.errored:
        return
    aborting = asyncio.create_task(engine.abort(request_id, internal=is_internal), name="abort a request")
    await wait_regardless([aborting])
    if not engine.errored:  # else there is nothing left to abort
        aborting.result()


async def request_outputs(
    engine: "AsyncLLM", prompt: Any, params: Any, request_id: str, why_dead: Callable[[], str]
) -> AsyncGenerator[Any, None]:
    """vLLM's RequestOutputs of one plain request; closing the generator aborts it.

    :raises EngineDeadError: the engine's process is gone.
    :raises BackendError: vLLM refused the request or gave it up, or failed otherwise.
    """
    await ask_engine(engine, engine.get_supported_tasks(), why_dead)  # else vLLM does, and for ever of a dead one
    try:
        with vllm_errors_translated(why_dead):
            async with aclosing(engine.generate(prompt, params, request_id)) as outputs:
                async for output in outputs:
                    if output.outputs and output.outputs[0].finish_reason in ("abort", "error"):
                        raise BackendError("the engine gave the request up; was the backend closed?")
                    yield output
    finally:
        # vLLM aborts by itself, but not when it is cancelled just while it hands the request over.
        await abort_surely(engine, request_id)
