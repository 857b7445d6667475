"""The scheduler's side of host memory: which KV blocks are copied out, and which come back.

    evicted ─▶ blocks in vLLM's free list ─reused by somebody else─▶ saved in that very step, before it is overwritten
                       │ still there                                      │
    resumed ◀──────────┴── prefix cache                    host memory ───┴─▶ resumed, past what the prefix cache has

vLLM reuses the block that was freed first, and of a victim the last: so what is saved is the tail, and no more of it
than was needed. Blocks are known by vLLM's hashes, of their content and all before it: changed prompts have others.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_block_hash

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.backends.vllm.scheduler.host_costs import HostCosts
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.step_parts import parts_of
from streamrag.backends.vllm.scheduler.supported import why_no_host_memory
from streamrag.engine.host_pool import HostPool
from streamrag.engine.swapping import Comparison, SwapChoice

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

__all__ = ["HostMemory", "Suspects", "host_memory_of", "num_host_blocks"]

logger = init_logger(__name__)


class _Released(NamedTuple):
    """What a block holds that its request had to give up."""

    request_id: str
    position: int
    """Which block of the request it was."""
    key: Any
    """Its hash."""


class Suspects(NamedTuple):
    """What is wrong if a load of a step, or of one before it, has failed."""

    keys: dict[int, Any]
    """What the step loads, by the device block that it loads it into."""

    blocks: set[int]
    """Those, and what is computed from them."""
    requests: set[str]
    """Those that read them."""


class HostMemory:
    """Follows the blocks of evicted requests, and answers vLLM's questions about KV beyond its prefix cache.

    The connector makes it and passes on what vLLM asks; the scheduler attaches it and tells what it does.
    """

    def __init__(self, config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        options = SchedulerOptions.of(config)
        why_not = why_no_host_memory(kv_cache_config)
        self.is_supported = why_not is None
        """Whether blocks can be copied. What models lose whose blocks cannot is recomputed, and nobody is attached."""
        if why_not is not None:
            logger.warning("This model has %s: what is evicted is recomputed, not copied.", why_not)
        self.block_bytes = _block_bytes(kv_cache_config)
        self.pool = HostPool(num_host_blocks(options, kv_cache_config) if self.is_supported else 0)
        self.num_saved = self.num_loaded = self.num_failed = 0
        """Blocks, all in all."""
        self._now_s = 0.0
        self._released: dict[int, _Released] = {}
        self._starts: dict[str, int] = {}  # of requests that may load, their first block past the prefix cache
        self._loads: list[tuple[int, int, Any]] = []  # slot, device block, key
        self._in_flight: deque[Suspects] = deque()  # of each step whose output is still to come
        self._unwritten: dict[str, None] = {}  # partial prompts with blocks that are not written through

    def bind(self, manager: "KVCacheManager") -> None:
        """Told by vLLM."""
        self._block_pool = manager.block_pool
        if not self.is_supported:
            return
        (self._group,) = manager.coordinator.single_type_managers
        self._block_size = self._group.block_size

    def attach(self, requests: Mapping[str, Any], choice: SwapChoice) -> None:
        """Told by the scheduler, once. `requests` are those that live."""
        self._requests = requests
        self.choice = choice
        self.costs = HostCosts(choice, self._block_size)

    # ------------------------------------------------------------------------------------- what the scheduler tells

    def start_step(self, now_s: float) -> None:
        self._now_s = now_s

    def compare(self, request: StreamRequest) -> Comparison:
        """Dropping the KV of a victim with saving it."""
        num_blocks = self._num_known(request)
        num_saved = self.pool.num_valid(request.block_hashes[:num_blocks])
        return self.choice.evict(num_blocks, num_blocks - num_saved, self._now_s)

    def releases(self, request: StreamRequest) -> None:
        """A victim is about to give up its blocks, and is to have them back."""
        blocks = self._group.req_to_blocks.get(request.request_id, ())
        num_blocks = min(self._num_known(request), len(blocks))
        for index in range(num_blocks):
            block_id = blocks[index].block_id
            self._released[block_id] = _Released(request.request_id, index, request.block_hashes[index])
            request.released_blocks.add(block_id)

    def changes(self, request: StreamRequest, num_computed: int, num_shared: int) -> None:
        """Of the prompt of `request`, which had `num_computed` tokens computed, the first `num_shared` are left."""
        if num_computed:
            self.choice.observe_chunk(num_computed, min(num_computed, num_shared))
        if self.pool.owned(request.request_id):
            self.pool.release(request.request_id, but=set(request.block_hashes))
        request.num_written_blocks = min(request.num_written_blocks, num_shared // self._block_size)

    def computes(self, request: StreamRequest) -> None:
        """A step computes some of a partial prompt."""
        self._unwritten[request.request_id] = None

    def has_run(self, step: "SchedulerOutput", output: "KVConnectorOutput | None", duration_s: float) -> None:
        """A step has ended."""
        self._suspects = self._in_flight.popleft()
        if step.num_scheduled_tokens:
            report = output.kv_connector_worker_meta if output else None
            copies_s = report.out_s + report.in_s if isinstance(report, CopyReport) else 0.0
            copies = step.kv_connector_metadata
            is_held_up = isinstance(copies, HostCopies) and bool(copies.saves or copies.loads)
            parts = list(parts_of(step))
            self.choice.observe_step([part for _, part in parts], duration_s, copies_s, is_held_up=is_held_up)
            self.costs.has_run(parts, duration_s if self.choice.is_overlapped else duration_s - copies_s)

    def not_loaded(self, block_ids: set[int]) -> "Suspects":
        """Of the step that has just ended, these loads failed. Returns what may be wrong, of later steps too."""
        # Those of that step: the next one may have loaded something else into the same blocks already.
        keys = [self._suspects.keys[block_id] for block_id in block_ids]
        self.num_failed += len(keys)
        self.costs.lost_count()
        self.pool.drop(keys)
        suspects = [self._suspects, *self._in_flight]
        wrong = Suspects({}, set().union(*(s.blocks for s in suspects)), set().union(*(s.requests for s in suspects)))
        for block_id in wrong.blocks:  # whoever has lost such a block since does not want it back
            self._released.pop(block_id, None)
        return wrong

    def forget(self) -> None:
        """All KV is invalid from now on, as after other weights were loaded. Nobody holds any, or gives it up later."""
        if not self.is_supported:
            return
        self._released.clear()
        self.pool.clear()
        for request in self._requests.values():
            request.num_written_blocks = 0

    def _num_known(self, request: StreamRequest) -> int:
        """Whole blocks that are computed, or being computed, and whose hash is known."""
        return min(request.num_computed_tokens // self._block_size, len(request.block_hashes))

    # ------------------------------------------------------------------------------------------- what vLLM asks for

    def num_matched_tokens(self, request: StreamRequest, num_local: int) -> int:
        """Tokens past the first `num_local`, which the prefix cache has, that are to be loaded. Whole blocks."""
        if not self.is_supported:
            return 0
        start, end = num_local // self._block_size, (request.num_tokens - 1) // self._block_size
        self._starts[request.request_id] = start
        num_blocks = self.pool.num_valid(request.block_hashes[start:end]) if end > start else 0
        if request.skip_reading_prefix_cache or (num_blocks == 0 and not request.was_evicted):
            return 0
        is_loaded = self.costs.considers(request, start, num_blocks, self._now_s)
        return num_blocks * self._block_size if is_loaded else 0

    def allocated(self, request: StreamRequest, num_external: int) -> None:
        """There are blocks for `num_external` tokens that are to be loaded."""
        if not self.is_supported:
            return
        request.num_loaded_tokens = num_external
        self.costs.begins(request)
        if num_external == 0:
            return
        start = self._starts[request.request_id]
        end = start + num_external // self._block_size
        keys = request.block_hashes[start:end]
        blocks = self._group.req_to_blocks[request.request_id][start:end]
        for slot, key, block in zip(self.pool.pin(keys), keys, blocks, strict=True):
            self._loads.append((slot, block.block_id, key))

    def copies(self, step: "SchedulerOutput") -> HostCopies:
        """What is to be copied for this step, for which vLLM asks nothing more."""
        if not self.is_supported:
            return HostCopies()
        self._starts.clear()
        self.costs.end_step()
        losers: Counter[str] = Counter()
        saves = list(self._saves(step, losers)) if self._released else []
        loads, self._loads = self._loads, []
        held_saves = list(self._write_through()) if self._unwritten else []
        self.pool.unpin()
        self._in_flight.append(self._suspects_of(step, {block_id: key for _, block_id, key in loads}))
        self.num_loaded += len(loads)
        for request_id, num_blocks in losers.items():
            self.costs.saves(self._requests[request_id], num_blocks, len(saves))
        if held_saves:
            self.costs.writes_through(len(held_saves))
        self.choice.sends(len(saves) + len(held_saves), len(loads), self._now_s)
        return HostCopies(saves, [(slot, block_id) for slot, block_id, _ in loads], held_saves)

    def reported(self, report: CopyReport) -> None:
        """Copies have ended."""
        if report.num_slots is not None:
            self.pool.limit(report.num_slots)
        for slot in report.saved:
            self.pool.saved(slot, is_valid=True)
        for slot in report.failed:
            self.pool.saved(slot, is_valid=False)
        self.num_saved += len(report.saved)
        self.num_failed += len(report.failed)
        if report.failed:
            self.costs.lost_count()
        self.costs.copied(report.num_blocks_out, report.out_s, report.num_blocks_in, report.in_s)
        self.choice.observe_copies(report.num_blocks_out, report.out_s, report.num_blocks_in, report.in_s)

    def finished(self, request: StreamRequest) -> None:
        """Nothing of it is kept."""
        if not self.is_supported:
            return
        self.pool.release(request.request_id)
        self.costs.finished(request.request_id)
        self._unwritten.pop(request.request_id, None)
        # Another request may come to have the same id, and would be taken for the one that has lost them.
        for block_id in request.released_blocks:
            released = self._released.get(block_id)
            if released is not None and released.request_id == request.request_id:
                self._released.pop(block_id)

    def _saves(self, step: "SchedulerOutput", losers: Counter[str]) -> Iterator[tuple[int, int]]:
        """Of the released blocks that are overwritten in this step, those that somebody wants back. Counts for whom."""
        unheard_of = self._unheard_of()
        for block_id in _blocks_in(step):
            released = self._released.get(block_id)
            if released is None:
                continue
            block_hash = self._block_pool.blocks[block_id].block_hash
            if block_hash is not None and get_block_hash(block_hash) == released.key:
                continue  # found in the prefix cache, as it is
            del self._released[block_id]
            if not self._is_wanted(released) or self.pool.claim(released.request_id, released.key):
                continue
            if block_id not in unheard_of:
                slot = self.pool.reserve(released.request_id, released.key)
                if slot is not None:
                    losers[released.request_id] += 1
                    yield block_id, slot

    def _suspects_of(self, step: "SchedulerOutput", loaded: dict[int, Any]) -> "Suspects":
        found = Suspects(loaded, set(loaded), set())
        known = found.blocks | self._unheard_of()
        if not known:
            return found
        for request_id in step.num_scheduled_tokens:
            block_ids = [block.block_id for block in self._group.req_to_blocks[request_id]]
            first = next((i for i, block_id in enumerate(block_ids) if block_id in known), None)
            if first is not None:
                found.blocks.update(block_ids[first:])
                found.requests.add(request_id)
        return found

    def _unheard_of(self) -> set[int]:
        """Blocks of which it is not known yet whether they hold what they should."""
        return set().union(*(suspects.blocks for suspects in self._in_flight))

    def _is_wanted(self, released: _Released) -> bool:
        request, index = self._requests.get(released.request_id), released.position
        if request is None or request.is_finished() or request.num_computed_tokens > index * self._block_size:
            return False
        return index < len(request.block_hashes) and request.block_hashes[index] == released.key

    def _write_through(self) -> Iterator[tuple[int, int]]:
        """Blocks of partial prompts, which hold them still, as many as there is time for. Computed long ago first."""
        pool = self._block_pool
        num_left = self.choice.num_to_write_through(pool.get_num_free_blocks() / pool.num_gpu_blocks)
        while num_left > 0 and self._unwritten:
            request_id = next(iter(self._unwritten))
            request = self._requests.get(request_id)
            if request is None or request.is_complete or request.num_computed_tokens == 0:
                del self._unwritten[request_id]
                continue
            blocks = self._group.req_to_blocks[request_id]
            for index in range(request.num_written_blocks, self._num_known(request)):
                if num_left == 0:
                    return
                key = request.block_hashes[index]
                if not self.pool.claim(request_id, key, is_spare=True):
                    if any(blocks[index].block_id in suspects.blocks for suspects in self._in_flight):
                        return
                    slot = self.pool.reserve(request_id, key, is_spare=True)
                    if slot is None:
                        return
                    num_left -= 1
                    request.log.num_written_through += self._block_size
                    yield blocks[index].block_id, slot
                request.num_written_blocks = index + 1
            del self._unwritten[request_id]


def num_host_blocks(options: SchedulerOptions, config: "KVCacheConfig") -> int:
    """Blocks that host memory has room for."""
    if options.num_host_blocks is not None:
        return options.num_host_blocks
    return options.host_kv_bytes // _block_bytes(config)


def _block_bytes(config: "KVCacheConfig") -> int:
    """Of a block, all layers, on one device. Each tensor tells the size of the allocation that all are part of."""
    return max((tensor.size for tensor in config.kv_cache_tensors), default=0) // config.num_blocks


def host_memory_of(connector: Any) -> HostMemory | None:
    """What our KV connector has made; None if there is another, none, or one that cannot work."""
    memory = getattr(connector, "host_memory", None)
    return memory if isinstance(memory, HostMemory) and memory.is_supported else None


def _blocks_in(step: "SchedulerOutput") -> Iterator[int]:
    """Those that somebody was given for this step, and some that they had before."""
    for new in step.scheduled_new_reqs:
        yield from new.block_ids[0]
    for blocks in step.scheduled_cached_reqs.new_block_ids:
        if blocks is not None:
            yield from blocks[0]
