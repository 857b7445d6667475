"""Calls of vLLM's engine, with its errors translated into ours.

They end even if the engine dies, and leave no request in it after a cancellation.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, ModelError, StreamRagError
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


OWN_ERROR = re.compile(r"streamrag\.errors\.\w+: (.*)")
"""The error that our scheduler raises in the engine's process when it does not support the engine."""


@contextmanager
def vllm_errors_translated(why_dead: Callable[[], str]) -> Iterator[None]:
    """Translate errors of vLLM; pass ours through. `why_dead` returns why the engine's process is gone.

    :raises EngineDeadError: the engine's process is gone.
    :raises BackendError: vLLM refused the request, as with any ValueError, or failed.
    """
    from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMError
    from vllm.v1.engine.async_llm import InputStreamError
    from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

    try:
        try:
            yield
        except InputStreamError as error:  # a streamed chunk was refused
            raise error.cause from error
    except StreamRagError:
        raise
    except VllmEngineDeadError as error:
        raise EngineDeadError(why_dead()) from error
    except (VLLMClientError, GracefulHTTPError, ValueError) as error:
        raise BackendError(f"vLLM refuses the request: {error}") from error
    except VLLMError as error:
        raise BackendError(f"vLLM failed: {error.__cause__ or error}") from error


@contextmanager
def vllm_model_errors_translated(model: Path | str) -> Iterator[None]:
    """Turn errors of vLLM, while it creates the configuration of a model, into ModelError."""
    try:
        yield
    except (OSError, ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise ModelError(f"vLLM cannot load {model}: {error}") from error


def start_error(error: Exception, model: Path | str, reason: str | None, last_lines: str) -> StreamRagError:
    """Return our error for an engine that did not start.

    BackendError without a reason; ConfigurationError if our scheduler refused or memory is too small; else ModelError.

    reason: the exception in the engine's log that ended its process; None if there is none.
    last_lines: the end of that log.
    """
    if reason is None:
        return BackendError(f"vLLM's engine failed while it was started: {error}\n{last_lines}")
    if refused := OWN_ERROR.match(reason):
        return ConfigurationError(f'{refused.group(1)}: VllmBackend(..., strategy="warming")')
    is_of_memory = "memory" in reason.lower() or "KV cache" in reason
    if is_of_memory and "memory profiling" not in reason:  # that one is about other programs on the device
        return ConfigurationError(
            f"the model's KV cache does not fit: {reason}\n"
            "Change kv_cache_bytes (in a benchmark: --kv-tokens), or gpu_memory_utilization in engine_args, or lower "
            "max_model_len"
        )
    return ModelError(f"vLLM cannot load {model}: {reason}")
