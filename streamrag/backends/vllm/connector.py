"""Our KV connector: vLLM's interface for KV outside the device, here in host memory. It only forwards vLLM's calls.

scheduler's process     HostMemory      decides what is copied        ──HostCopies──▶
each worker             HostCopier      makes the copies              ◀──CopyReport──
"""

from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.backends.vllm.facts import num_host_blocks
from streamrag.backends.vllm.scheduler.host_memory.costs import Match, make_price_of_engine
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.supported import why_no_host_memory
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.backends.vllm.worker.host_copier import HostCopier

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class HostKVConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector, of which vLLM constructs one in the scheduler's process and one in each worker."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_used = why_no_host_memory(kv_cache_config) is None
        if role == KVConnectorRole.WORKER:
            options = EngineOptions.of(vllm_config)
            num_slots = _num_slots(options, vllm_config, kv_cache_config) if self._is_used else 0
            self.copier = HostCopier(num_slots, kv_cache_config.num_blocks)
            return
        self.host_memory: HostMemory | None = None
        """None until vLLM has a KV cache, and for models whose blocks cannot be copied: their KV is recomputed."""
        self._match: tuple[str, Match | None] = ("", None)  # the request of vLLM's last lookup, and its match

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # KV that is not saved is recomputed

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Make `host_memory`; where the model's blocks cannot be copied, log a warning instead."""
        super().bind_kv_cache_manager(kv_cache_manager)
        config, kv_cache_config = self._vllm_config, self._kv_cache_config
        if why_not := why_no_host_memory(kv_cache_config):
            logger.warning("This model has %s: evicted KV is recomputed, not copied.", why_not)
            return
        options = EngineOptions.of(config)
        price = make_price_of_engine(options, config, _block_bytes(kv_cache_config))
        self.host_memory = HostMemory(kv_cache_manager, _num_slots(options, config, kv_cache_config), price)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        match = self.host_memory.look_up(request, num_computed_tokens) if self.host_memory else None
        self._match = request.request_id, match
        return match.num_tokens if match else 0, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Commit an admitted request with the match of the last lookup, or with none if that was of another."""
        (request_id, match), self._match = self._match, ("", None)
        if self.host_memory:
            # A request that holds KV was not looked up.
            self.host_memory.commit(request, match if request_id == request.request_id else None, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> HostCopies:
        return self.host_memory.take_copies(scheduler_output) if self.host_memory else HostCopies()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if self.host_memory and isinstance(report, CopyReport):
            self.host_memory.on_report(report)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.host_memory:
            self.host_memory.on_finish(request)
        return False, None

    def reset_cache(self) -> bool:
        if self.host_memory:
            self.host_memory.clear()
        return True

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        if self._is_used:
            self.copier.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: HostCopies) -> None:
        self.copier.save(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Start the step's loads: layer by layer, or as a whole if the forward makes no call per layer."""
        copies = self._get_connector_metadata()
        assert isinstance(copies, HostCopies)
        # A graph of the whole model is replayed without a call per layer. The second model runner then has no forward
        # context either, and passes an empty one.
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


def _num_slots(options: EngineOptions, config: "VllmConfig", kv_cache: "KVCacheConfig") -> int:
    """Return the number of host slots of one worker: `num_host_blocks`, or else what fits into its host memory."""
    if options.num_host_blocks is not None:
        return options.num_host_blocks
    parallel = config.parallel_config
    num_workers = parallel.world_size * parallel.data_parallel_size_local
    return num_host_blocks(options.host_kv_bytes, _block_bytes(kv_cache), kv_cache.num_blocks, max(num_workers, 1))


def _block_bytes(config: "KVCacheConfig") -> int:
    """Return the bytes of a block of all layers on one device. Each tensor has the size of the shared allocation."""
    return max((tensor.size for tensor in config.kv_cache_tensors), default=0) // config.num_blocks
