"""vLLM's executor on a CPU, with a worker that is forked from the engine's process, which has imported all it needs.

The start of an engine then takes two thirds of its time. Only for tests: the worker's threads are not bound to cores.
"""

import importlib.util
import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

NIXL_POLL_US = 1_000


class ForkingExecutor(MultiprocExecutor):
    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if self.vllm_config.kv_transfer_config and importlib.util.find_spec("nixl"):
            let_nixl_sleep()
        super()._init_executor()


def let_nixl_sleep() -> None:
    """Have a thread of NIXL, which else keeps a core busy, look for messages every `NIXL_POLL_US`."""
    bindings = importlib.import_module("nixl._api").nixlBind
    make_agent = bindings.nixlAgent

    def make(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_POLL_US
        return make_agent(name, config)

    bindings.nixlAgent = make
