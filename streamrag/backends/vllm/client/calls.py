"""Calls of vLLM's engine. They end even if the engine dies, and leave no request in it after a cancellation."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from streamrag.backends.vllm.client.vllm_errors import vllm_errors_translated
from streamrag.errors import BackendError, EngineDeadError
from streamrag.support.tasks import wait_shielded

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

DEATH_POLL_S = 0.1


async def ask_engine(engine: "AsyncLLM", question: Coroutine[Any, Any, T], why_dead: Callable[[], str]) -> T:
    """Await `question`, a call of the engine, and return its result. vLLM itself would wait forever for a dead engine.

    :raises EngineDeadError: the engine's process is gone, or dies before it answers.
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
    """Abort a request, if a live engine has it, and wait for that. A cancellation takes effect only after the abort."""
    if engine.errored:
        return
    aborting = asyncio.create_task(engine.abort(request_id, internal=is_internal), name="abort a request")
    await wait_shielded([aborting])
    if not engine.errored:  # a dead engine has no requests
        aborting.result()


async def request_outputs(
    engine: "AsyncLLM", prompt: Any, params: Any, request_id: str, why_dead: Callable[[], str]
) -> AsyncGenerator[Any, None]:
    """Yield vLLM's RequestOutputs of one plain request. Closing the generator aborts the request.

    :raises EngineDeadError: the engine's process is gone.
    :raises BackendError: vLLM refused or dropped the request, or failed.
    """
    await ask_engine(engine, engine.get_supported_tasks(), why_dead)  # else vLLM asks, and waits forever if it is dead
    try:
        with vllm_errors_translated(why_dead):
            async with aclosing(engine.generate(prompt, params, request_id)) as outputs:
                async for output in outputs:
                    if any(part.finish_reason in ("abort", "error") for part in output.outputs):
                        raise BackendError("the engine dropped the request; was the backend closed?")
                    yield output
    finally:
        # vLLM aborts the request itself, except if it is cancelled while it submits the request.
        await abort_surely(engine, request_id)
