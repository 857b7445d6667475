"""What must hold between two steps, while the engine sleeps, and when all is over."""

from collections import Counter, defaultdict

from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.records import RequestRecord, read_records
from tests.engine.sizes import what_has_grown

from .clients import Client, FuzzError, check
from .record_checks import problems
from .run import Run

__all__ = ["Checks"]


class Checks:
    """Looks at a run. `step` and `asleep` are called while it plays, `end` afterwards."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.scenario = run.scenario
        self.scheduler = run.scheduler
        self.met = run.met

    # --------------------------------------------------------------------------------------------------- each step

    def step(self) -> None:
        scheduler = self.scheduler
        idle = scheduler.plugin.queues.idle
        queues = (scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting)
        queued = [r.request_id for queue in queues for r in queue]
        remote = self.scenario.remote
        ended = {name for name, request in scheduler.requests.items() if request.is_finished()}  # and not yet sent
        may_hold = remote is not None and remote.may_load
        check(may_hold or not scheduler.kv_holding_waiting, "vLLM's queue of KV holders is in use")
        check(remote is not None or not ended, f"ended requests are kept: {ended}")
        check(len(set(queued)) == len(queued) and not set(queued) & idle.keys(), "a request is in two queues")
        is_exact = {*queued, *idle} == scheduler.requests.keys() - ended
        check(is_exact, "a request is in no queue, or a finished one in some")
        check(len(scheduler.running) <= self.scenario.max_num_seqs, "more running than there are slots")
        check(scheduler.num_waiting_for_streaming_input == 0, "slots of set aside requests are still counted")
        self.met["steps"] += 1
        self.met["steps with more idle streams than slots"] += len(idle) > self.scenario.max_num_seqs
        groups = scheduler.kv_cache_manager.coordinator.single_type_managers
        held = Counter(id(block) for group in groups for blocks in group.req_to_blocks.values() for block in blocks)
        held.update(id(block) for _, blocks in scheduler.deferred_frees for block in blocks)
        pool = scheduler.kv_cache_manager.block_pool
        for block in pool.blocks[1:]:
            if block.ref_cnt != held[id(block)]:  # to say what it is takes longer than to look
                raise FuzzError(f"{block} is held {held[id(block)]} times")
        if self.scenario.has_prefix_cache and self.scenario.sliding_window is None and not self.scenario.has_mamba:
            self._hashes()
        if self.run.host_memory is not None:
            pool = self.run.host_memory.pool
            check(pool.num_used <= pool.num_slots, f"{pool.num_used} of {pool.num_slots} host slots are in use")
            self.met["steps with a full host memory"] += pool.num_used == pool.num_slots
            self.met["steps with blocks in host memory"] += pool.num_used > 0

    def _hashes(self) -> None:
        (group,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        for request in self.scheduler.requests.values():
            name, num_certain = request.request_id, request.num_computed_tokens - request.num_in_flight_tokens
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished():
                continue  # what is loaded is cached when that has ended, if the request is still there
            blocks = group.req_to_blocks.get(name, [])[: max(num_certain, 0) // group.block_size]
            for block, block_hash in zip(blocks, request.block_hashes, strict=False):
                if block.block_hash is None and request.draft is not None:
                    break  # vLLM caches what a step has verified when it allocates for the next one
                check(block.block_hash is not None, f"{name}: {block} is full but not in the prefix cache")
                check(get_block_hash(block.block_hash) == block_hash, f"{name}: {block} has a wrong hash")

    # -------------------------------------------------------------------------------------------- while it sleeps

    def asleep(self) -> None:
        """That nobody waits for something that only the engine can bring."""
        for client in self.run.clients.values():
            # A client does not hear again of what was computed after all.
            is_settled = not client.lacks_memory or client.request_id in self.scheduler.plugin.queues.idle
            if client.is_waiting and not (is_settled and client.num_acknowledged == client.num_chunks):
                self._lacks_memory(client)

    def _lacks_memory(self, client: Client) -> None:
        name, scheduler = client.name, self.scheduler
        check(not client.must_fail, f"{name} was not told of its end")
        request_class, options = self.scenario.request_classes.get(name), self.scenario.options
        is_data = request_class == "stream" and options.get("data_high_water") is not None
        may_wait = not client.is_complete and (is_data or not self.scenario.can_partial_evict)
        # A prompt of which a connector would load KV between steps waits until it is complete.
        waits_for_connector = self.scenario.remote is not None and self.scenario.remote.may_load
        may_wait |= waits_for_connector and not client.is_complete
        check(may_wait, f"{name} was forgotten")
        check(client.num_acknowledged == client.num_chunks, f"{name} does not hear that it waits for memory")
        if waits_for_connector:
            return
        request = scheduler.requests[client.request_id]
        memory = scheduler.plugin.kv_memory
        memory.start_step()
        memory.num_present_tokens(memory.cached_view(request))  # what it needs depends on what it finds
        num_tokens = min(request.num_remaining_tokens, self.scenario.max_num_batched_tokens)
        num_missing = memory.num_blocks_needed(memory.cached_view(request), num_tokens) - memory.num_free_blocks
        memory.end_step()
        num_reserved_free = scheduler.plugin.planner.num_reserved_free if request.was_evicted else 0
        if is_data:
            num_reserved_free = max(num_reserved_free, scheduler.plugin.planner.num_reserved_from_data)
        check(num_missing > -num_reserved_free, f"{name} waits for nothing")
        self.met["partial prompts asleep for want of memory"] += 1

    # ------------------------------------------------------------------------------------------------- when it ends

    def end(self) -> None:
        for client in self.run.clients.values():
            if client.is_aborted or client.ending == FinishReason.ERROR:
                continue
            check(not client.is_waiting, f"{client.name} was never finished")
            client.check_answer()
            self.met["answers checked"] += 1
        scheduler, scenario = self.scheduler, self.scenario
        pool = scheduler.kv_cache_manager.block_pool
        check(not scheduler.requests, "requests are left")
        check(pool.get_num_free_blocks() == scenario.num_blocks, "blocks are leaked")
        if self.run.host_memory is not None:
            self._host_memory(self.run.host_memory)
        check(not self.run.runner.rows, f"the runner still remembers {list(self.run.runner.rows)}")
        grown = what_has_grown(scheduler, self.run.sizes_at_start)
        if scenario.num_true_host_blocks is not None:
            grown.pop("scheduler.plugin.host_memory.pool._free", None)  # fewer than were promised; none is in use
            grown.pop("scheduler.connector.host_memory.pool._free", None)
        check(not grown, f"all are gone, and something of them is remembered: {grown}")
        self.met[f"runs: {scenario.policy}"] += 1
        self.met[f"runs: eviction={scenario.eviction}"] += 1
        self.met["runs: with classes"] += bool(scenario.request_classes)
        for option, value in scenario.options.items():
            self.met[f"runs: with {option}"] += bool(value)
        self.met["runs: with Mamba layers"] += scenario.has_mamba
        self.met["runs: with a sliding window"] += scenario.sliding_window is not None
        self.met["runs: asynchronous" if scenario.is_async else "runs: synchronous"] += 1
        self.met["runs: runner V2" if scenario.has_v2_runner else "runs: runner V1"] += 1
        self.met["runs: with prefix cache" if scenario.has_prefix_cache else "runs: without prefix cache"] += 1
        for name in scenario.situations:
            self.met[f"runs: with {name}"] += 1
        scheduler.shutdown()
        self._records()

    def _host_memory(self, memory: HostMemory) -> None:
        check(memory.pool.num_used == 0, f"{memory.pool.num_used} host slots are leaked")
        num_copies = memory.num_saved, memory.num_loaded, memory.num_failed
        runner = self.run.runner
        check(
            num_copies == (runner.num_saved, runner.num_loaded + runner.num_not_loaded, runner.num_failed), num_copies
        )
        self.met["host blocks saved"] += runner.num_saved
        self.met["host blocks written through"] += runner.num_written_through
        self.met["host blocks loaded"] += runner.num_loaded
        self.met["host blocks not saved"] += runner.num_failed - runner.num_not_loaded
        self.met["host blocks not loaded"] += runner.num_not_loaded

    # ----------------------------------------------------------------------------------------------------- records

    def _records(self) -> None:
        run = self.run
        for client in run.current.values():
            client.counts = run.runner.take_counts(client.request_id)
        records = read_records(run.records) if run.records.exists() else []
        by_id: dict[str, list[RequestRecord]] = defaultdict(list)
        for record in records:
            by_id[record.request_id].append(record)
        for client in run.clients.values():  # those that have had one id, one after the other
            check(by_id[client.request_id], f"{client.name} has no record")
            self._record(by_id[client.request_id].pop(0), client)
        check(not any(by_id.values()), f"there are records of nobody: {by_id}")
        self._what_was_copied(records)

    def _record(self, record: RequestRecord, client: Client) -> None:
        can_copy = self.scenario.num_draft_tokens > 0 and self.scenario.options.get("prompt_lookup", True)
        may_load = self.scenario.remote is not None and self.scenario.remote.may_load
        found = problems(record, client, self.scenario.has_prefix_cache, can_copy=can_copy, may_load=may_load)
        check(not found, f"{found} of {record}")
        for from_s, until_s in self.run.pauses:
            lost_s = [p.at_s for p in record.preemptions if from_s < p.at_s < until_s]
            check(not set(lost_s) - self.run.reset_s, f"{client.name} has lost KV in a pause")
        self.met[f"records: {record.outcome}"] += 1
        self.met["preemptions"] += len(record.preemptions)
        self.met["preemptions with swap"] += sum(p.fate == "swap" for p in record.preemptions)
        self.met["tokens loaded from host memory"] += record.num_loaded
        self.met["tokens from the prefix cache"] += record.num_from_cache
        self.met["tokens recomputed"] += record.num_recomputed
        self.met["tokens invalidated"] += record.num_invalidated
        self.met["tokens of drafts that were accepted"] += record.num_accepted
        self.met["tokens of drafts that were rejected"] += record.num_verified - record.num_accepted
        self.met["tokens copied from prompts"] += record.num_copied
        self.met["tokens copied wrongly"] += record.num_copies_verified - record.num_copied
        self.met["copies of who was preempted"] += bool(record.num_copied and record.preemptions)

    def _what_was_copied(self, records: list[RequestRecord]) -> None:
        runner, block_size = self.run.runner, self.scenario.block_size
        num_written = sum(record.num_written_through for record in records)
        num_saved = sum(p.num_tokens_saved for record in records for p in record.preemptions)
        check(num_written == block_size * runner.num_written_through, f"{num_written} tokens written through")
        num_copied = runner.num_saved + runner.num_failed - runner.num_not_loaded
        check(num_written + num_saved == block_size * num_copied, f"{num_saved} tokens saved of {num_copied} blocks")
