"""A vLLM engine embedded in a program. Each folder has the modules of one process.

    client/       the program's           sends growing prompts, reads tokens; starts and stops the other processes
                    ── chunk_wire ─▶
    scheduler/    vLLM's engine's         decides which requests compute, and whose KV is evicted, saved, loaded
                    ◀─ copy_wire ──▶
    worker/       vLLM's workers'         copies KV between the device and host memory

vLLM calls `connector` for copies, in the scheduler's process and in the workers, and `nixl_connector` there in decode
lanes. Client and scheduler share `scheduler_options`, vLLM's `version` and the `facts` of an engine. These, `client`
and `chunk_wire` do not import vLLM before an engine starts.
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import attributes

if TYPE_CHECKING:
    from streamrag.backends.vllm.client.backend import VllmBackend as VllmBackend
    from streamrag.backends.vllm.scheduler_options import SchedulerOptions as SchedulerOptions
else:  # imported on first use: the engine's own processes never need it
    __getattr__ = attributes(
        __name__,
        {
            "SchedulerOptions": "streamrag.backends.vllm.scheduler_options",
            "VllmBackend": "streamrag.backends.vllm.client.backend",
        },
    )
