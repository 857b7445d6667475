"""A vLLM engine embedded in a program, by process: a module is in the folder of the one that runs it.

    client/       the program's           sends prompts that grow, reads tokens; starts and ends the other processes
                    ── chunk_wire ─▶
    scheduler/    vLLM's engine's         decides who is computed, and whose KV is evicted, saved, loaded
                    ◀─ copy_wire ──▶
    worker/       vLLM's workers'         copies KV between the device and host memory

`connector` is what vLLM calls for copies, in the scheduler's process and in the workers. Client and scheduler share the
`options` of the scheduler, vLLM's `version` and the `facts` of an engine; neither these nor `client` nor `chunk_wire`
import vLLM before an engine starts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrag.backends.vllm.client.backend import VllmBackend as VllmBackend


def __getattr__(name: str) -> Any:
    """The backend is the client's: the engine's own processes never load it."""
    if name != "VllmBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamrag.backends.vllm.client.backend import VllmBackend

    return VllmBackend
