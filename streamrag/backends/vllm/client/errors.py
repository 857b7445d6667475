"""Translation of vLLM's errors into ours, used where its engine is called."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrag.errors import BackendError, EngineDeadError, ModelError, StreamRagError


@contextmanager
def vllm_errors_translated(why_dead: Callable[[], str]) -> Iterator[None]:
    """Translate errors of vLLM; pass ours through. `why_dead` returns why the engine's process is gone.

    :raises EngineDeadError: the engine's process is gone.
    :raises BackendError: vLLM refused the request, or failed.
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
    """Translate the errors of vLLM while it creates the configuration of a model.

    :raises ModelError: vLLM cannot load the model.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise ModelError(f"vLLM cannot load {model}: {error}") from error
