"""Translates the errors of vLLM into ours: of its requests, of a model's configuration, and of an engine's start."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, ModelError, StreamRagError

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
