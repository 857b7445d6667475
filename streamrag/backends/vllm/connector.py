"""Our KV connector: vLLM's hooks for KV that is somewhere else, here in host memory.

    scheduler's process     HostMemory      decides what is copied        ──HostCopies──▶
    each worker             HostCopier      copies it                     ◀──CopyReport──

Both sides are thin: this class only passes on what vLLM calls.
"""

from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.backends.vllm.scheduler.host_memory import HostMemory, num_host_blocks
from streamrag.backends.vllm.scheduler.supported import why_no_host_memory
from streamrag.backends.vllm.worker.copier import HostCopier

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["HostKVConnector"]


class HostKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one in the scheduler's process and one in each worker."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.host_memory = HostMemory(vllm_config, kv_cache_config)
            return
        self._is_used = why_no_host_memory(kv_cache_config) is None
        self.copier = HostCopier(
            num_host_blocks(SchedulerOptions.of(vllm_config), kv_cache_config) if self._is_used else 0,
            kv_cache_config.num_blocks,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not saved is recomputed

    # ------------------------------------------------------------------------------------------ scheduler's process

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.host_memory.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return self.host_memory.num_matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self.host_memory.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> HostCopies:
        return self.host_memory.copies(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, CopyReport):
            self.host_memory.reported(report)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.host_memory.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        self.host_memory.forget()
        return True

    # ------------------------------------------------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        if self._is_used:
            self.copier.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: HostCopies) -> None:
        self.copier.save(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        assert isinstance(copies, HostCopies)
        # A graph of the whole model is replayed without asking for its layers; the second model runner then has no
        # context of the forward either, and shows an empty one.
        is_whole = forward_context.cudagraph_runtime_mode == CUDAGraphMode.FULL or forward_context.attn_metadata is None
        self.copier.load(copies, by_layer=not is_whole)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.copier.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        pass  # blocks are saved before they are overwritten, not when they are written

    def wait_for_save(self) -> None:
        self.copier.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.copier.take_failed_loads()

    def build_connector_worker_meta(self) -> CopyReport | None:
        return self.copier.take_report()

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self.copier.close()
