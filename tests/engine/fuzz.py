"""Random loads against vLLM's real scheduler and KV cache, with a runner that knows what each KV slot must hold.

    python -m tests.engine.fuzz --seeds 20000

Every run checks: attention reads the KV of its own prefix only; each answer equals that of a fresh request with the
last prompt; every chunk is acknowledged once, in order, before the first token; every request ends once; nothing
stalls or spins; no block, queue entry or runner state is left behind; every request has one record, which says what
its client and the runner saw.
"""

import argparse
import heapq
import itertools
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from streamrag.backends.host_memory import HostMemory
from streamrag.backends.scheduler import StreamingSchedulerMixin, streaming_scheduler
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, always
from streamrag.backends.simulated.runner import fingerprint, next_token
from streamrag.backends.wire import KEY, ChunkMessage
from streamrag.engine.copies import CopyCosts
from streamrag.engine.costs import TableProfile, save_profile
from streamrag.records import RequestRecord, read_records

try:
    from record_checks import Counting, CountingV1Runner, CountingV2Runner, problems
    from scenarios import Abort, Chunk, Evict, Plain, Reset, Scenario, make_scenario
except ImportError:
    from tests.engine.record_checks import Counting, CountingV1Runner, CountingV2Runner, problems
    from tests.engine.scenarios import Abort, Chunk, Evict, Plain, Reset, Scenario, make_scenario

VOCABULARY = 50
COPIES = CopyCosts(((1, 0.5), (9, 0.9)), ((1, 0.5), (9, 0.9)), block_bytes=1, is_overlapped=True)
PROFILE = TableProfile("fuzz", "none", ((1, 0.1), (100, 10.0)), 0.0, 0.0, kv_tokens=0, copies=COPIES)
"""Of an engine on which copying a few blocks takes less time than computing them, and copying one takes more."""
MOST_EMPTY_STEPS = 4


class FuzzError(AssertionError):
    """Something that must never be."""


def check(condition: object, message: str) -> None:
    if not condition:
        raise FuzzError(message)


@dataclass
class Client:
    """What a client sees of its request, checked as it comes."""

    request_id: str
    max_model_len: int
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0
    stop: int | None = None
    num_chunks: int = 0
    is_complete: bool = False
    is_too_long: bool = False
    is_aborted: bool = False
    num_acknowledged: int = 0
    tokens: list[int] = field(default_factory=list)
    ending: FinishReason | None = None
    sent: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """When, and which prompt."""
    record: RequestRecord | None = None

    def send(self, event: Plain | Chunk, now_s: float) -> None:
        self.sent.append((now_s, event.prompt))
        self.prompt, self.max_tokens, self.stop = event.prompt, event.max_tokens, event.stop
        self.num_chunks += 1
        self.is_too_long |= len(event.prompt) >= self.max_model_len
        self.is_complete = isinstance(event, Plain) or event.is_final

    def receive(self, output: EngineCoreOutput) -> None:
        name = self.request_id
        if self.is_aborted:
            return
        check(self.ending is None, f"{name}: output after its end: {output}")
        ours = (output.kv_transfer_params or {}).get(KEY, {})
        if "chunk" in ours:
            check(ours["chunk"] == self.num_acknowledged, f"{name}: {ours} acknowledged out of turn")
            check(not self.tokens, f"{name}: acknowledgement after the first token")
            self.num_acknowledged += 1
            check(self.num_acknowledged <= self.num_chunks - self.is_complete, f"{name}: acknowledged too much")
            return
        if output.finish_reason == FinishReason.ERROR:
            check("error" in ours, f"{name}: error without a reason")
            check(self.is_too_long, f"{name}: failed for no reason: {ours}")
            self.ending = output.finish_reason
            self.record = RequestRecord.from_dict(ours["record"])
            return
        check(self.is_complete, f"{name}: a token of a partial prompt: {output}")
        if self.is_stream:
            check(self.num_acknowledged == self.num_chunks - 1, f"{name}: token before all acknowledgements")
        self.tokens += output.new_token_ids
        self.ending = output.finish_reason
        check(("record" in ours) == (self.ending is not None), f"{name}: a record before the end, or none: {ours}")
        if self.ending is not None:
            self.record = RequestRecord.from_dict(ours["record"])

    @property
    def is_stream(self) -> bool:
        return self.request_id.startswith("s")

    def check_answer(self) -> None:
        """That the tokens are those of a fresh request."""
        prefix = 0
        for token in self.prompt:
            prefix = fingerprint(prefix, token)
        expected: list[int] = []
        room = min(self.max_tokens, self.max_model_len - len(self.prompt))
        while len(expected) < room and (not expected or expected[-1] != self.stop):
            expected.append(next_token(prefix, VOCABULARY))
            prefix = fingerprint(prefix, expected[-1])
        check(self.tokens == expected, f"{self.request_id}: answered {self.tokens}, expected {expected}")


class Run:
    """One scenario, played to its end."""

    def __init__(
        self, scenario: Scenario, make_scheduler: Callable[..., Any], met: Counter[str], records: Path
    ) -> None:
        self.scenario = scenario
        self.records = records
        self.met = met
        save_profile(PROFILE, records.with_name("profile.json"))
        shape = EngineShape(
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            max_model_len=scenario.max_model_len,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            max_num_seqs=scenario.max_num_seqs,
            is_async=scenario.is_async,
            has_prefix_cache=scenario.has_prefix_cache,
            must_fit_whole=scenario.must_fit_whole,
            watermark=scenario.watermark,
            sliding_window=scenario.sliding_window,
            streamrag={
                "policy": scenario.policy,
                "can_partial_evict": scenario.can_partial_evict,
                "num_partial_tokens": scenario.num_partial_tokens,
                "low_water": scenario.low_water,
                "eviction": scenario.eviction,
                "num_host_blocks": scenario.num_host_blocks,
                "profile": str(records.with_name("profile.json")),
                "records": str(records),
            },
        )
        arguments = (scenario.num_blocks, scenario.block_size, VOCABULARY, scenario.is_async)
        windows = (None,) if scenario.sliding_window is None else (None, scenario.sliding_window)
        runner: Counting = CountingV1Runner(*arguments, windows=windows)
        if scenario.has_v2_runner:
            runner = CountingV2Runner(*arguments, windows=windows, num_slots=scenario.max_num_seqs)
        self.runner = runner
        faults = random.Random(scenario.seed)
        runner.fails = lambda: faults.random() < scenario.share_of_faults
        self.engine = SimulatedEngine(
            shape,
            runner,
            always(1.0),
            make_scheduler,
            has_v2_runner=scenario.has_v2_runner,
        )
        assert isinstance(self.engine.scheduler, StreamingSchedulerMixin)
        self.scheduler = self.engine.scheduler
        self.host_memory = self.scheduler.host_memory
        check((self.host_memory is None) == (scenario.eviction == "recompute"), "host memory for nothing, or none")
        self.clients: dict[str, Client] = {}

    def play(self) -> None:
        order = itertools.count()
        events = [(at_s, next(order), event) for at_s, event in self.scenario.events]
        heapq.heapify(events)
        num_empty = 0
        while events or self.engine.has_work:
            if not self.engine.has_work:
                self.check_asleep()
                self.met["the engine slept"] += 1
                self.met["the engine slept beside idle streams"] += bool(self.scheduler.idle)
                self.engine.now_s = max(self.engine.now_s, events[0][0])
            while events and events[0][0] <= self.engine.now_s:
                self._do(heapq.heappop(events)[2])
            before_s = self.engine.now_s
            outputs = self.engine.step()
            for output in outputs:
                self.clients[output.request_id].receive(output)
            self.check_integrity()
            num_empty = 0 if outputs or self.engine.now_s > before_s or not self.engine.has_work else num_empty + 1
            check(num_empty <= MOST_EMPTY_STEPS, "the engine spins: it has work but does nothing")
            check(self.engine.num_steps < 5_000, "the engine does not come to an end")
        self.check_end()
        self.scheduler.shutdown()
        self.check_records()

    def _do(self, event: Any) -> None:
        match event:
            case Plain():
                self._client(event).send(event, self.engine.now_s)
                self.met["plain requests"] += 1
                self.engine.add(event.request_id, event.prompt, self._params(event))
            case Chunk():
                self._add_chunk(event)
            case Abort():
                self._abort(event.request_id)
            case Evict():
                self._evict(event.nth)
            case Reset():
                self.met["prefix cache resets"] += 1
                self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _client(self, event: Plain | Chunk) -> Client:
        default = Client(event.request_id, self.scenario.max_model_len)
        return self.clients.setdefault(event.request_id, default)

    def _params(self, event: Plain | Chunk) -> SamplingParams:
        stop = [] if event.stop is None else [event.stop]
        return SamplingParams(max_tokens=event.max_tokens, temperature=0.0, stop_token_ids=stop, detokenize=False)

    def _add_chunk(self, event: Chunk) -> None:
        client = self._client(event)
        if client.is_aborted or client.ending is not None:
            self.met["chunks after the end"] += 1
        else:
            self._count_chunk(event, client)
            client.send(event, self.engine.now_s)
        message = ChunkMessage(event.index, event.num_kept, event.is_final, self.engine.now_s)
        self.engine.add(event.request_id, event.prompt[event.num_kept :], self._params(event), message)

    def _count_chunk(self, event: Chunk, client: Client) -> None:
        stream = self.scheduler.requests.get(event.request_id)
        met = self.met
        met["chunks"] += 1
        if stream is None:
            return
        is_idle = event.request_id in self.scheduler.idle
        if not is_idle and stream.num_computed_tokens > 0:
            met["chunks in mid-prefill"] += 1
        met["chunks for idle streams"] += is_idle
        met["chunks for idle streams without KV"] += is_idle and stream.num_computed_tokens == 0
        met["chunks for preempted streams"] += stream.status == RequestStatus.PREEMPTED
        met["chunks with steps in flight"] += stream.num_in_flight_tokens > 0
        old, new = client.prompt, event.prompt
        met["identical prompts"] += old == new
        met["identical final prompts"] += old == new and event.is_final
        met["prompts that shrink"] += len(new) < len(old)
        met["prompts that change token 0"] += bool(old) and old[0] != new[0]
        met["prompts that invalidate KV"] += old[: stream.num_computed_tokens] != new[: stream.num_computed_tokens]
        met["prompts that outgrow the model"] += len(new) >= self.scenario.max_model_len

    def _abort(self, request_id: str) -> None:
        client = self.clients.get(request_id)
        if client is None or client.ending is not None:
            return
        client.is_aborted = True
        self.met["aborts"] += 1
        self.met["aborts of idle streams"] += request_id in self.scheduler.idle
        self.engine.abort(request_id)

    def _evict(self, nth: int) -> None:
        memory = self.scheduler.kv_memory
        holders = [r for r in self.scheduler.requests.values() if memory.num_blocks(r)]  # type: ignore[arg-type]
        if holders:
            self.met["forced preemptions"] += 1
            self.scheduler._evict(holders[nth % len(holders)])  # type: ignore[arg-type]

    def check_integrity(self) -> None:
        """What must hold between two steps."""
        scheduler = self.scheduler
        idle = scheduler.idle
        queued = [r.request_id for queue in (scheduler.running, scheduler.waiting) for r in queue]
        check(len(scheduler.kv_holding_waiting) == 0, "vLLM's queue of KV holders is in use")
        check(len(set(queued)) == len(queued) and not set(queued) & idle.keys(), "a request is in two queues")
        check({*queued, *idle} == scheduler.requests.keys(), "a request is in no queue, or a finished one in some")
        check(len(scheduler.running) <= self.scenario.max_num_seqs, "more running than there are slots")
        check(scheduler.num_waiting_for_streaming_input == 0, "slots of set aside requests are still counted")
        self.met["steps"] += 1
        self.met["steps with more idle streams than slots"] += len(idle) > self.scenario.max_num_seqs
        groups = scheduler.kv_cache_manager.coordinator.single_type_managers
        held = Counter(id(block) for group in groups for blocks in group.req_to_blocks.values() for block in blocks)
        pool = scheduler.kv_cache_manager.block_pool
        for block in pool.blocks[1:]:
            check(block.ref_cnt == held[id(block)], f"{block} is held {held[id(block)]} times")
        if self.scenario.has_prefix_cache and self.scenario.sliding_window is None:
            self._check_hashes()
        if self.host_memory is not None:
            pool = self.host_memory.pool
            check(pool.num_used <= pool.num_slots, f"{pool.num_used} of {pool.num_slots} host slots are in use")
            self.met["steps with a full host memory"] += pool.is_full
            self.met["steps with blocks in host memory"] += pool.num_used > 0

    def _check_hashes(self) -> None:
        (group,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        for request in self.scheduler.requests.values():
            num_certain = request.num_computed_tokens - request.num_in_flight_tokens
            blocks = group.req_to_blocks.get(request.request_id, [])[: max(num_certain, 0) // group.block_size]
            for block, block_hash in zip(blocks, request.block_hashes, strict=False):
                check(
                    block.block_hash is not None, f"{request.request_id}: {block} is full but not in the prefix cache"
                )
                check(get_block_hash(block.block_hash) == block_hash, f"{request.request_id}: {block} has a wrong hash")

    def check_asleep(self) -> None:
        """That nobody waits for something that only the engine can bring."""
        for client in self.clients.values():
            if not client.is_aborted and client.ending is None:
                if client.request_id in self.scheduler.idle:
                    check(client.num_acknowledged == client.num_chunks, f"{client.request_id} lacks acknowledgements")
                    continue
                check(not self.scenario.can_partial_evict, f"{client.request_id} was forgotten")
                request = self.scheduler.requests[client.request_id]
                memory = self.scheduler.kv_memory
                memory.start_step()
                num_tokens = min(request.num_remaining_tokens, self.scenario.max_num_batched_tokens)
                num_missing = memory.num_blocks_needed(memory.view(request), num_tokens) - memory.num_free_blocks
                num_kept_free = self.scheduler._num_kept_free if request.was_evicted else 0
                check(request.is_partial and num_missing > -num_kept_free, f"{client.request_id} waits for nothing")
                self.met["partial prompts asleep for want of memory"] += 1

    def check_end(self) -> None:
        for client in self.clients.values():
            if client.is_aborted or client.ending == FinishReason.ERROR:
                continue
            check(client.ending is not None, f"{client.request_id} was never finished")
            client.check_answer()
            self.met["answers checked"] += 1
        scheduler = self.scheduler
        check(not scheduler.requests and not scheduler.deferred_waiting, "requests are left")
        pool = scheduler.kv_cache_manager.block_pool
        check(pool.get_num_free_blocks() == self.scenario.num_blocks, "blocks are leaked")
        check(not scheduler.deferred_frees, "blocks wait for ever to be freed")
        if self.host_memory is not None:
            self._check_host_memory(self.host_memory)
        check(not self.runner.rows, f"the runner still remembers {list(self.runner.rows)}")
        self.met[f"runs: {self.scenario.policy}"] += 1
        self.met[f"runs: eviction={self.scenario.eviction}"] += 1
        self.met["runs: with a sliding window"] += self.scenario.sliding_window is not None
        self.met["runs: asynchronous" if self.scenario.is_async else "runs: synchronous"] += 1
        self.met["runs: runner V2" if self.scenario.has_v2_runner else "runs: runner V1"] += 1
        self.met["runs: with prefix cache" if self.scenario.has_prefix_cache else "runs: without prefix cache"] += 1

    def _check_host_memory(self, memory: HostMemory) -> None:
        check(memory.pool.num_used == 0, f"{memory.pool.num_used} host slots are leaked")
        num_copies = memory.num_saved, memory.num_loaded, memory.num_failed
        runner = self.runner
        check(
            num_copies == (runner.num_saved, runner.num_loaded + runner.num_not_loaded, runner.num_failed), num_copies
        )
        self.met["host blocks saved"] += runner.num_saved
        self.met["host blocks written through"] += runner.num_written_through
        self.met["host blocks loaded"] += runner.num_loaded
        self.met["host blocks not saved"] += runner.num_failed - runner.num_not_loaded
        self.met["host blocks not loaded"] += runner.num_not_loaded

    def check_records(self) -> None:
        records = read_records(self.records) if self.records.exists() else []
        ids = sorted(record.request_id for record in records)
        check(ids == sorted(self.clients), f"records of {ids}, requests of {sorted(self.clients)}")
        for record in records:
            found = problems(record, self.clients[record.request_id], self.runner, self.scenario.has_prefix_cache)
            check(not found, f"{found} of {record}")
            self.met[f"records: {record.outcome}"] += 1
            self.met["preemptions"] += len(record.preemptions)
            self.met["preemptions with swap"] += sum(p.fate == "swap" for p in record.preemptions)
            self.met["tokens loaded from host memory"] += record.num_loaded
            self.met["tokens from the prefix cache"] += record.num_from_cache
            self.met["tokens recomputed"] += record.num_recomputed
            self.met["tokens invalidated"] += record.num_invalidated
        self._check_what_was_copied(records)

    def _check_what_was_copied(self, records: list[RequestRecord]) -> None:
        runner, block_size = self.runner, self.scenario.block_size
        num_written = sum(record.num_written_through for record in records)
        num_saved = sum(p.num_tokens_saved for record in records for p in record.preemptions)
        check(num_written == block_size * runner.num_written_through, f"{num_written} tokens written through")
        num_copied = runner.num_saved + runner.num_failed - runner.num_not_loaded
        check(num_written + num_saved == block_size * num_copied, f"{num_saved} tokens saved of {num_copied} blocks")


def run_seed(seed: int, met: Counter[str], make_scheduler: Callable[..., Any] = streaming_scheduler) -> None:
    """Play one seed. Raises what went wrong, with the scenario noted."""
    scenario = make_scenario(seed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            Run(scenario, make_scheduler, met, Path(folder) / "records.jsonl").play()
    except Exception as error:
        error.add_note(f"reproduce with --first {seed} --seeds 1: {scenario}")
        raise


def run_seeds(seeds: Iterable[int], report: Callable[[], None] = lambda: None) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        run_seed(seed, met)
        report()
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    columns = (TextColumn("fuzz"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("fuzz", total=arguments.seeds)
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        try:
            met = run_seeds(seeds, lambda: progress.advance(task))
        except Exception:
            progress.stop()
            traceback.print_exc()
            return 1
    for name, count in sorted(met.items()):
        print(f"{count:>12,}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
