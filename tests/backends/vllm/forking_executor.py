"""vLLM's executor on a CPU, with a worker that is forked from the engine's process, which has imported all it needs.

The start of an engine then takes two thirds of its time. Only for tests: the worker's threads are not bound to cores.
"""

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class ForkingExecutor(MultiprocExecutor):
    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        super()._init_executor()
