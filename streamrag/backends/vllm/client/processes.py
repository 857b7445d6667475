"""Starts and stops an embedded vLLM engine without side effects in the program that embeds it.

vLLM sets environment variables, leaves sockets in the temporary folder, reconfigures logging and prints to the
terminal. We restore the environment once the engine's processes have started, put its files into a folder that is
deleted, and redirect its output to a log that is searched when the engine fails. The engine's processes end with this
process, however it ends.
"""

import asyncio
import gc
import importlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from streamrag.backends.vllm.client.calls import start_error, vllm_model_errors_translated
from streamrag.backends.vllm.client.host_memory import without_faulty_host_memory
from streamrag.backends.vllm.client.log import EngineLog
from streamrag.backends.vllm.facts import cpu_capabilities, emulated_dtypes, num_allowed_cores
from streamrag.backends.vllm.version import INSTALL, check_version
from streamrag.errors import ConfigurationError, ModelError
from streamrag.support.tasks import run_shielded
from streamrag.support.temp_dirs import ScratchFolder, remove_left_behind

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

SCRATCH = "vllm"
SPAWN_POLL_S = 0.01
SHUTDOWN_GRACE_S = 15.0  # seconds for the engine's processes to shut down. Their requests have been aborted by then.
DEFAULT_CPU_KV_CACHE_BYTES = 4 << 30  # vLLM's own default is nearly all of the memory
CPU_BLOCK_SIZE = 32
"""The smallest block of vLLM's CPU attention, whose default is 128. Warming can only reuse full blocks."""

_environment_lock = threading.Lock()  # global, as the environment is


def check_can_start(model: Path | str) -> None:
    """Check what can be checked without importing vLLM, which takes seconds. A name on the hub is not checked, and
    neither is a path that does not exist.

    :raises MissingDependencyError: when vLLM is not installed.
    :raises UnsupportedVersionError: when another series is installed.
    :raises ModelError: when `model` is the Path of a folder without `config.json`.
    :raises ConfigurationError: in an engine's process that is still importing the program's main module.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "the engine's processes import the program's main module, which starts an engine at import. "
            "Start it under  if __name__ == '__main__':"
        )
    check_version()
    if isinstance(model, Path) and model.is_dir() and not (model / "config.json").is_file():
        raise ModelError(f"{model} is not a model: it has no config.json. Give the folder that has one")


def import_vllm() -> Any:
    """Import all that an engine needs, which takes seconds, and return `vllm`; ConfigurationError if it is broken."""
    with _environment({"VLLM_CONFIGURE_LOGGING": "0"}), _no_collections():
        try:
            importlib.import_module("vllm.v1.engine.async_llm")
            return importlib.import_module("vllm")
        except ImportError as error:
            raise ConfigurationError(f"vLLM cannot be imported: {error}. Reinstall it with:  {INSTALL}") from error


def num_reserved_cores(num_workers: int) -> int:
    """Return the number of CPU cores to leave to the program when the CPU is the device: one per worker, as in vLLM.

    With a KV connector, vLLM would reserve twice as many. Our connector needs none, and engines with and without it
    should run on equally many cores.
    """
    num_physical = importlib.import_module("psutil").cpu_count(logical=False) or 1
    num_cores = min(num_physical, num_allowed_cores())
    return num_workers if num_cores > 2 * num_workers else 0


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable the garbage collector inside, if it was enabled: it takes a quarter of the time of an import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Set `changes` inside, under a lock for all threads, and restore the environment at the end.

    The yielded dict, empty inside, then has all variables that were set or changed, `changes` included.
    """
    changed: dict[str, str] = {}
    with _environment_lock:
        before = dict(os.environ)
        os.environ.update(changes)
        try:
            yield changed
        finally:
            changed.update((name, value) for name, value in os.environ.items() if before.get(name) != value)
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Whether to log a record: while an engine is stopped, vLLM logs a traceback as if it had died."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "EngineDeadError"


class EngineProcesses:
    """The processes, the folder and the log of one engine. A model is a folder, or a name on the hub.

        async with aclosing(EngineProcesses(model)) as processes:
            engine = await processes.start(engine_args)

    :raises StreamRagError: as `check_can_start`.
    """

    def __init__(self, model: Path | str) -> None:
        check_can_start(model)
        self._model = model
        self._engine: Any = None
        self._scratch = ScratchFolder(SCRATCH)
        self._folder = self._scratch.path
        self._log = EngineLog(self._folder)
        # Lives as long as the engine, because the kernel ends processes with the thread that started them.
        self._parent = ThreadPoolExecutor(1, "parent of a vLLM engine")
        self._processes: list[BaseProcess] = []
        self._is_started = threading.Event()

    async def start(
        self,
        engine_args: Mapping[str, Any],
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        stat_loggers: Sequence[Callable[..., Any]] = (),
    ) -> "AsyncLLM":
        """Start the engine and return it. Not to be called twice. If cancelled, kill the engine's processes and wait.

        `environment` has further environment variables for the engine's processes. `stat_loggers` are factories of
        vLLM's stat loggers; without one, vLLM counts nothing.

        :raises ModelError: when the model cannot be loaded.
        :raises ConfigurationError: when vLLM refuses the arguments, or there is not enough memory.
        :raises BackendError: when the engine fails otherwise.
        """
        await anyio.to_thread.run_sync(import_vllm, abandon_on_cancel=True)
        engine_args = await without_faulty_host_memory(engine_args)
        start = partial(self._start, engine_args, environment, list(stat_loggers))
        starting = asyncio.ensure_future(anyio.to_thread.run_sync(start))
        try:
            self._engine = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await run_shielded(self._give_up(starting), "vLLM engine gives up its start")
            raise
        return self._engine

    async def _give_up(self, starting: "asyncio.Future[Any]") -> None:
        """Kill the processes until the start in its thread has ended. An engine that started anyway is for `aclose`."""
        while not starting.done():
            await anyio.to_thread.run_sync(self._kill)
            await asyncio.wait([starting], timeout=0.5)
        if not starting.exception():  # the engine started before it could be killed
            self._engine = starting.result()

    async def aclose(self) -> None:
        """Stop the engine, whose requests have been aborted, and delete its files."""
        await run_shielded(self._aclose(), "vLLM engine stops")

    async def _aclose(self) -> None:
        """Stop the engine, if it was started; then in any case close the log and delete the folder."""
        try:
            if self._engine is not None:
                await self._stop(self._engine)
        finally:
            await asyncio.to_thread(self._close)

    async def _stop(self, engine: Any) -> None:
        """Shut the engine down, wait for its tasks and close its sockets. vLLM's log of its death is suppressed."""
        resources = engine.engine_core.resources
        tasks = [task for task in (engine.output_handler, resources.output_queue_task) if task]
        log = logging.getLogger("vllm.v1.engine.async_llm")
        log.addFilter(_is_unexpected)
        try:
            await anyio.to_thread.run_sync(lambda: engine.shutdown(timeout=SHUTDOWN_GRACE_S))
            if tasks:
                await asyncio.wait(tasks)
        finally:
            log.removeFilter(_is_unexpected)
        await anyio.to_thread.run_sync(resources.ctx.destroy, 0)  # its sockets, which vLLM leaves open

    def why_dead(self) -> str:
        """Return a sentence with the exit codes of the engine's processes, and the reason, if the log has one."""
        manager = self._engine.engine_core.resources.engine_manager
        codes = ", ".join(str(process.exitcode) for process in manager.processes)
        reason = self._log.fatal_error()
        return f"the engine's process is gone (exit code {codes})" + (f": {reason}" if reason else "")

    def _start(
        self, engine_args: Mapping[str, Any], more: Mapping[str, str], stat_loggers: list[Callable[..., Any]]
    ) -> Any:
        """Configure the engine in this thread, start it in the parent thread, wait until it has started, and return it.

        Until the engine's processes exist, this process's environment is changed, and its children print to the log. If
        the start in the parent thread fails, raises our error, with a reason from the log.
        """
        remove_left_behind(SCRATCH)
        with _environment({}) as environment:
            # Sets its own variable, so that compiled code does not go to the temporary folder that TMPDIR will name.
            importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
            config = make_config(str(self._model), engine_args)
            num_reserved = num_reserved_cores(config.parallel_config.local_world_size)
            os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", str(num_reserved))
            if config.device_config.device_type == "cpu":
                # Linux then keeps weights and KV in pages of 2 MiB, if its setting is "madvise": quicker to read.
                os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
                if config.model_config.enforce_eager:
                    # vLLM would compile what ranks log-probabilities all the same, in the first query for them: 20 s.
                    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        environment |= {
            "TMPDIR": str(self._folder),
            "VLLM_RPC_BASE_PATH": str(self._folder),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a program with threads may hang
            "VLLM_NO_USAGE_STATS": "1",
            **more,
        }
        if isinstance(self._model, Path):
            environment["HF_HUB_OFFLINE"] = "1"
        borrowed = ExitStack()
        borrowed.enter_context(_environment(environment))
        borrowed.enter_context(self._log.redirected())
        others = set(multiprocessing.active_children())
        num_processes = config.parallel_config.data_parallel_size_local
        returning = threading.Thread(target=self._give_back_once_spawned, args=(borrowed, others, num_processes))
        returning.start()
        try:
            async_llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
            make_engine = partial(async_llm.from_vllm_config, disable_log_stats=True, stat_loggers=stat_loggers)
            return self._parent.submit(make_engine, config).result()
        except Exception as error:
            raise start_error(error, self._model, self._log.fatal_error(), self._log.last_lines()) from error
        finally:
            self._is_started.set()
            returning.join()

    def _give_back_once_spawned(self, borrowed: ExitStack, others: set[BaseProcess], num_processes: int) -> None:
        """Keep the processes in `_processes` once they exist; then, or when the start ends, leave `borrowed`."""
        with borrowed:
            while len(self._processes) < num_processes and not self._is_started.wait(SPAWN_POLL_S):
                new = set(multiprocessing.active_children()) - others
                self._processes = [process for process in new if process.name.startswith("EngineCore")]

    def _kill(self) -> None:
        """Kill the processes of a `_start` in another thread, which then fails soon."""
        for process in self._processes:
            if process.pid and not self._is_started.is_set():
                importlib.import_module("vllm.utils.system_utils").kill_process_tree(process.pid)

    def _close(self) -> None:
        self._parent.shutdown(wait=False)
        self._log.close()
        self._scratch.remove()


def make_config(model: str, engine_args: Mapping[str, Any]) -> Any:
    """Return vLLM's configuration of an engine, with our defaults for arguments that `engine_args` does not have.

    Our defaults are a prefix cache and, on a CPU, no compilation, small blocks and 4 GiB of KV. On a CPU, the dtype
    "auto" is float32 where the CPU lacks vLLM's choice, unless weights are quantized. Raises ConfigurationError for an
    unknown argument, and ModelError for a model that vLLM cannot load.
    """
    vllm = importlib.import_module("vllm")
    logging_config = importlib.import_module("vllm.config.logging").LoggingConfig
    defaults = {
        "enable_prefix_caching": True,
        # vLLM would close this program's log handlers. Without configuration, it prints warnings and errors.
        "logging_config": logging_config(configure_logging=False, pylogging_config_file=None),
    }
    is_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    if is_cpu:
        # Compilation would triple the time to start and needs a C++ compiler, for a tenth of the prefill time.
        defaults |= {"block_size": CPU_BLOCK_SIZE, "enforce_eager": True}
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & engine_args.keys():
            defaults["kv_cache_memory_bytes"] = DEFAULT_CPU_KV_CACHE_BYTES
    try:
        args = vllm.AsyncEngineArgs(model=model, **(defaults | dict(engine_args)))
    except TypeError as error:
        raise ConfigurationError(f"engine_args: {error}. They are the arguments of vllm.AsyncEngineArgs") from error
    with vllm_model_errors_translated(model):
        if is_cpu and args.dtype == "auto" and (emulated := emulated_dtypes(cpu_capabilities())):
            config = args.create_model_config()
            # Kernels for quantized weights support few dtypes, and seldom float32.
            if str(config.dtype).removeprefix("torch.") in emulated and config.quantization is None:
                args.dtype = "float32"
        return args.create_engine_config()
