"""What must hold beside a third-party KV connector: in each plan and step, and when a request hands over its KV."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from .clients import check
from .connector import Connected, ScriptedConnector

if TYPE_CHECKING:
    from .run import Run

__all__ = ["TransferChecks"]

MOST_UNASKED = 2
"""Such steps, at most: a request that has just come, and one whose slot was not known to be free."""


def reaches_max_tokens(request: Request) -> bool:
    """Return whether the step in flight samples a request's last token: vLLM's rule, in `schedule`."""
    num_placeholders = request.num_output_placeholders
    last = request.num_prompt_tokens + request.max_tokens
    return num_placeholders > 0 and request.num_computed_tokens + 2 - num_placeholders >= last


class TransferChecks:
    """Looks at the plans, the steps and the connector of a run."""

    def __init__(self, run: "Run") -> None:
        assert isinstance(run.runner, Connected)
        assert isinstance(run.scheduler.connector, ScriptedConnector)
        self.run, self.runner, self.scheduler, self.met = run, run.runner, run.scheduler, run.met
        self.connector = run.scheduler.connector
        self.connector.on_hand_over = self._on_hand_over
        self.runner.must_not_race = self.scheduler.defer_block_free
        self.runner.keeps_first_block = self.scheduler.recompute_kv_load_failures
        self.runner.is_computing = lambda: bool(run.engine._in_flight)
        self.must_ask_all = run.scenario.asks_all
        self.ever_asked: set[str] = set()
        self.num_unasked: Counter[str] = Counter()
        """Steps with room, per request, in which the connector was not asked about it."""
        handle = self.scheduler._handle_invalid_blocks

        def watch(block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
            self._on_failed_loads(block_ids)
            return handle(block_ids, num_scheduled_tokens)

        self.scheduler._handle_invalid_blocks = watch  # type: ignore[method-assign]

    def check_plan(self, step: Any) -> None:
        """Check that each eviction frees blocks, and that no token is planned which is never sampled."""
        requests = self.scheduler.requests
        for eviction in step.plan.evictions:
            name = eviction.request.request_id
            check(self.scheduler._request_blocks_can_be_freed(requests[name]), f"{name} is evicted, but frees nothing")
        self.connector.asked.clear()
        for grant in step.plan.grants:
            name = grant.request.request_id
            check(not reaches_max_tokens(requests[name]), f"{name} is granted a token that is never sampled")
        memory = self.scheduler.plugin.kv_memory
        ending = [request for request in step.decoding if reaches_max_tokens(request)]
        self.met["plans beside a last token in flight"] += bool(ending) or any(
            map(reaches_max_tokens, requests.values())
        )
        num_taken = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - memory.num_free_blocks
        decoding = [request for request in step.decoding if not reaches_max_tokens(request)]
        num_needed = sum(request.num_computed_tokens % memory.smallest_block_size == 0 for request in decoding)
        is_exact = num_taken == num_needed * len(memory.groups)
        check(is_exact, f"{num_taken} blocks are planned for tokens that need {num_needed}: {ending} end")

    def check_step(self, step: SchedulerOutput) -> None:
        """Check that, as in vLLM, the connector was asked about all that could start beside those that wait for it."""
        scheduler = self.scheduler
        has_room = step.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
        if not (self.must_ask_all and has_room and len(scheduler.running) < scheduler.max_num_active_reqs):
            return
        for request in scheduler.waiting:
            name = request.request_id
            if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                continue
            is_free = request.num_computed_tokens == 0 and not request.num_stale_output_tokens
            if is_free and name not in self.connector.asked and name not in self.ever_asked:
                self.num_unasked[name] += 1
                is_soon = self.num_unasked[name] <= MOST_UNASKED
                check(is_soon, f"{name} is not asked about, although there is room for it")
        self.ever_asked |= self.connector.asked

    def _on_hand_over(self, request: Request, block_ids: list[int], is_sent: bool) -> None:
        self.met["hand-overs"] += is_sent
        self.met["hand-overs of one token"] += is_sent and request.max_tokens == 1
        self.met["hand-overs after an eviction"] += is_sent and request.num_preemptions > 0
        self.runner.hand_over(request, block_ids, is_sent=is_sent)
        pool = self.scheduler.kv_cache_manager.block_pool
        free = [block_id for block_id in block_ids if pool.blocks[block_id].ref_cnt == 0]
        check(not free, f"{request.request_id} hands over free blocks: {free}")

    def _on_failed_loads(self, block_ids: set[int]) -> None:
        """Under the policy "fail", whoever holds such a block may fail."""
        self.met["failed loads"] += 1
        for name, request in self.scheduler.requests.items():
            (held,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            if not block_ids.isdisjoint(held) and not request.is_finished():
                self.met["requests with failed loads"] += 1
                if not self.scheduler.recompute_kv_load_failures:
                    self.run.current[name].may_fail = True
