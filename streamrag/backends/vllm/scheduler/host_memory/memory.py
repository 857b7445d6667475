"""The scheduler's side of host memory: which KV blocks are copied out, and which are copied back.

vLLM reuses the block that was freed first, and frees a victim's blocks from the last to the first. So only the tail of
a victim's KV is saved, and no more than necessary.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.backends.vllm.scheduler.host_memory.costs import HostCosts, Match, parts_of
from streamrag.backends.vllm.scheduler.host_memory.loads import LoadsInFlight, Suspects
from streamrag.backends.vllm.scheduler.request import PromptUpdate, StreamRequest
from streamrag.engine.costs.price import Price
from streamrag.engine.host_pool import HostPool
from streamrag.engine.recompute_or_swap import CostChoice, CostComparison, SwapAlways, SwapChoice

MOST_OVERCOMMITTED = 1.5
"""Most KV that all requests may need, in multiples of host memory: the device holds some of it as well."""


class _Released(NamedTuple):
    """KV in a block that its request has lost."""

    request: StreamRequest
    position: int  # position of the block in its request
    key: Any  # hash of the block, by which the host pool finds it


class HostMemory:
    """Tracks the blocks of evicted requests, and answers vLLM's questions about KV that its prefix cache lacks.

    The connector constructs it and forwards vLLM's calls; the scheduler reports what it does.
    """

    def __init__(self, manager: KVCacheManager, num_slots: int, price: Price | None) -> None:
        self._block_pool = manager.block_pool
        (self._group,) = manager.coordinator.single_type_managers
        self._block_size = self._group.block_size
        self.pool = HostPool(num_slots)
        self.choice: SwapChoice = SwapAlways() if price is None else CostChoice(price)
        self.costs = HostCosts(price, self._block_size)
        self.num_saved = self.num_loaded = self.num_failed = 0  # total numbers of blocks
        self._now_s = 0.0
        self._released: dict[int, _Released] = {}
        self._loads: list[tuple[int, int, Any]] = []  # of the current step: slot, device block, key
        self._in_flight = LoadsInFlight(self._group.req_to_blocks)
        self._unwritten: dict[str, StreamRequest] = {}  # partial prompts with blocks to write through
        self._prefix_hits: set[str] = set()  # requests that found blocks in the prefix cache in this step
        self._num_written: dict[str, int] = {}  # leading blocks of each that have been written through

    def start_step(self, now_s: float) -> None:
        self._now_s = now_s

    def compare(self, request: StreamRequest) -> CostComparison:
        """Choose between dropping the KV of a victim and saving it, of which only unsaved blocks cost anything."""
        num_blocks = self._num_full_blocks(request)
        num_saved = self.pool.num_valid(request.block_hashes[:num_blocks])
        return self.choice.evict(num_blocks, num_blocks - num_saved, self._now_s)

    def is_worth_keeping(self, num_tokens: int, num_requests: int) -> bool:
        """Whether 1.5 times host memory holds `num_tokens`, and for a request of mean size copying costs less."""
        num_blocks = num_tokens // self._block_size
        if num_blocks > MOST_OVERCOMMITTED * self.pool.num_slots:
            return False
        typical = num_blocks // max(num_requests, 1)
        return self.choice.evict(typical, typical, self._now_s).choice == "swap"

    def on_release(self, request: StreamRequest) -> None:
        """Track the full blocks that a victim is about to lose, so that they are saved before they are overwritten."""
        blocks = self._group.req_to_blocks.get(request.request_id, ())
        num_blocks = min(self._num_full_blocks(request), len(blocks))
        for index in range(num_blocks):
            block_id = blocks[index].block_id
            self._released[block_id] = _Released(request, index, request.block_hashes[index])
            request.released_blocks.add(block_id)

    def on_chunk(self, request: StreamRequest, update: PromptUpdate) -> None:
        """Release KV in host memory that a new prompt lacks, and report to the costs how much KV stays valid."""
        num_computed, num_shared = update.record.num_computed, update.record.num_shared
        if num_computed:
            self.costs.on_chunk(num_computed, min(num_computed, num_shared))
        if self.pool.keys_of(request.request_id):
            self.pool.release(request.request_id, but=set(request.block_hashes))
        if num_written := self._num_written.get(request.request_id):
            self._num_written[request.request_id] = min(num_written, num_shared // self._block_size)

    def on_partial(self, request: StreamRequest) -> None:
        """Register a partial prompt that a step computes, for write-through."""
        self._unwritten[request.request_id] = request

    def on_step_end(self, step: SchedulerOutput, output: KVConnectorOutput | None, duration_s: float) -> None:
        """End the oldest step in flight; if it computed tokens, report its parts, its time and that of copies."""
        self._in_flight.on_step_end()
        if step.num_scheduled_tokens:
            report = output.kv_connector_worker_meta if output else None
            copies_s = report.out_s + report.in_s if isinstance(report, CopyReport) else 0.0
            copies = step.kv_connector_metadata
            waited_for_copies = isinstance(copies, HostCopies) and bool(copies.saves or copies.loads)
            self.costs.on_step_end(list(parts_of(step)), duration_s, copies_s, waited_for_copies=waited_for_copies)

    def on_failed_loads(self, block_ids: set[int]) -> Suspects:
        """Return all KV that may be wrong since these loads of the last ended step failed, also of steps in flight.

        Drops the KV of the failed loads from host memory, and saves none of the wrong blocks.
        """
        wrong = self._in_flight.suspects_if_failed(block_ids)
        self.num_failed += len(wrong.keys)
        self.costs.on_failed_copies()
        self.pool.drop(wrong.keys.values())
        for block_id in wrong.blocks:  # a request that has lost such a block does not want it back
            self._released.pop(block_id, None)
        return wrong

    def clear(self) -> None:
        """Drop all KV, which is invalid now, for example after new weights were loaded. No request holds any."""
        self._released.clear()
        self.pool.clear()
        self._num_written.clear()

    def _num_full_blocks(self, request: StreamRequest) -> int:
        """Return how many leading blocks are computed and hashed, so that they can be stored."""
        return min(request.num_computed_tokens // self._block_size, len(request.block_hashes))

    def look_up(self, request: StreamRequest, num_local: int) -> Match | None:
        """Return the match in host memory after `num_local` cached tokens; 0 tokens to load if computing costs less.

        None if host memory has nothing and the request was never evicted, or if the request may not read caches.
        """
        if num_local:
            self._prefix_hits.add(request.request_id)
        start, end = num_local // self._block_size, (request.num_tokens - 1) // self._block_size
        num_blocks = self.pool.num_valid(request.block_hashes[start:end]) if end > start else 0
        if request.skip_reading_prefix_cache or (num_blocks == 0 and not request.was_evicted):
            return None
        comparison = self.choice.resume(start, num_blocks, self._now_s) if num_blocks else None
        is_loaded = comparison is not None and comparison.choice == "swap"
        return Match(start, num_blocks, comparison, num_blocks * self._block_size if is_loaded else 0)

    def commit(self, request: StreamRequest, match: Match | None, num_tokens: int) -> None:
        """Record that a request was admitted to this step and loads `num_tokens` tokens of the match.

        Logs the restore, pins the blocks to load in host memory and schedules their loads. Without a match, only the
        number is recorded.
        """
        request.num_loaded_tokens = num_tokens
        if match is None:
            return
        self.costs.on_resume(request, match, self._now_s)
        start, end = match.start, match.start + num_tokens // self._block_size
        keys = request.block_hashes[start:end]
        blocks = self._group.req_to_blocks[request.request_id][start:end]
        for slot, key, block in zip(self.pool.pin(keys), keys, blocks, strict=True):
            self._loads.append((slot, block.block_id, key))

    def take_copies(self, step: SchedulerOutput) -> HostCopies:
        """Choose this step's saves and write-through; return them with the loads. vLLM makes no further lookups."""
        uncertain = self._in_flight.uncertain_blocks()
        num_saved_of: Counter[StreamRequest] = Counter()
        saves = list(self._saves(step, uncertain, num_saved_of)) if self._released else []
        loads, self._loads = self._loads, []
        held_saves = list(self._write_through(uncertain)) if self._unwritten else []
        self._prefix_hits.clear()
        self.pool.unpin()
        self._in_flight.on_step(step.num_scheduled_tokens, {block_id: key for _, block_id, key in loads})
        self.num_loaded += len(loads)
        for request, num_blocks in num_saved_of.items():
            self.costs.on_saves_sent(request, num_blocks, len(saves))
        if held_saves:
            self.costs.on_write_through(len(held_saves))
        self.costs.on_sent(len(saves) + len(held_saves), len(loads), self._now_s)
        return HostCopies(saves, [(slot, block_id) for slot, block_id, _ in loads], held_saves)

    def on_report(self, report: CopyReport) -> None:
        """Make saved blocks valid, free failed slots, shrink the pool to `num_slots`, and report the times."""
        if report.num_slots is not None:
            self.pool.limit(report.num_slots)
        for slot in report.saved:
            self.pool.on_saved(slot, is_valid=True)
        for slot in report.failed:
            self.pool.on_saved(slot, is_valid=False)
        self.num_saved += len(report.saved)
        self.num_failed += len(report.failed)
        if report.failed:
            self.costs.on_failed_copies()
        self.costs.on_copied(report.num_blocks_out, report.out_s, report.num_blocks_in, report.in_s)

    def on_finish(self, request: StreamRequest) -> None:
        """Release the blocks of a request that ended, and forget all that was registered for it."""
        self.pool.release(request.request_id)
        self.costs.on_finish(request.request_id)
        self._unwritten.pop(request.request_id, None)
        self._num_written.pop(request.request_id, None)
        for block_id in request.released_blocks:
            released = self._released.get(block_id)
            if released is not None and released.request is request:
                self._released.pop(block_id)

    def _saves(
        self, step: SchedulerOutput, uncertain: set[int], num_saved_of: Counter[StreamRequest]
    ) -> Iterator[tuple[int, int]]:
        """Yield (block, slot) of released blocks that the step overwrites, and track these blocks no more.

        Leaves out blocks that keep their KV in the prefix cache, and are tracked on; that are uncertain, not wanted,
        in host memory already, or without a free slot. Counts yielded blocks by request in `num_saved_of`.
        """
        for block_id in _blocks_in(step):
            released = self._released.get(block_id)
            if released is None:
                continue
            block_hash = self._block_pool.blocks[block_id].block_hash
            if block_hash is not None and get_block_hash(block_hash) == released.key:
                continue  # still in the prefix cache
            del self._released[block_id]
            owner = released.request.request_id
            if not self._is_wanted(released) or self.pool.claim(owner, released.key):
                continue
            if block_id not in uncertain:
                slot = self.pool.reserve(owner, released.key)
                if slot is not None:
                    num_saved_of[released.request] += 1
                    yield block_id, slot

    def _is_wanted(self, released: _Released) -> bool:
        """Whether its request is unfinished and still without that KV, and the prompt still has that block."""
        request, index = released.request, released.position
        if request.is_finished() or request.num_computed_tokens > index * self._block_size:
            return False
        return index < len(request.block_hashes) and request.block_hashes[index] == released.key

    def _write_through(self, uncertain: set[int]) -> Iterator[tuple[int, int]]:
        """Yield (block, slot) for full blocks that partial prompts hold, oldest first, while there is time and a slot.

        The first uncertain block ends this for all prompts. Prompts with prefix hits in this step wait for the next.
        """
        pool = self._block_pool
        num_left = self.choice.num_to_write_through(pool.get_num_free_blocks() / pool.num_gpu_blocks)
        for request_id, request in list(self._unwritten.items()):
            if num_left <= 0:
                return
            if request_id in self._prefix_hits:
                continue  # another request may compute these blocks in this very step
            if request.is_complete or request.num_computed_tokens == 0:
                del self._unwritten[request_id]
                continue
            blocks = self._group.req_to_blocks[request_id]
            for index in range(self._num_written.get(request_id, 0), self._num_full_blocks(request)):
                if num_left == 0:
                    return
                key = request.block_hashes[index]
                if not self.pool.claim(request_id, key, is_spare=True):
                    if blocks[index].block_id in uncertain:
                        return
                    slot = self.pool.reserve(request_id, key, is_spare=True)
                    if slot is None:
                        return
                    num_left -= 1
                    request.log.num_written_through += self._block_size
                    yield blocks[index].block_id, slot
                self._num_written[request_id] = index + 1
            del self._unwritten[request_id]


def host_memory_of(connector: Any) -> HostMemory | None:
    """Return the host memory of our KV connector; None without our connector, or if it cannot copy this model's KV."""
    memory = getattr(connector, "host_memory", None)
    return memory if isinstance(memory, HostMemory) else None


def _blocks_in(step: SchedulerOutput) -> Iterator[int]:
    """Yield all blocks that the step allocates, and some that its requests held before."""
    for new in step.scheduled_new_reqs:
        yield from new.block_ids[0]
    for blocks in step.scheduled_cached_reqs.new_block_ids:
        if blocks is not None:
            yield from blocks[0]
