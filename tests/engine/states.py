"""States of Mamba layers, as the model runners keep them: each in a block, each a fingerprint of its whole prefix.

A step continues from the state in one block and leaves its own in the same or in a later one. Between the two a runner
copies the state, and what it remembers of where it left it may be wrong:

    V1  vllm/v1/worker/mamba_utils.py: preprocess_mamba, cleanup_mamba_state_idx
    V2  vllm/v1/worker/gpu/model_states/mamba_hybrid.py: add_request, preprocess_state
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["MambaStates"]


class MambaStates:
    """The states in all blocks, and the index of the block in which the last one of each request is.

    `is_cached` says whether there is one for each block of tokens, or a single one for each request.
    """

    def __init__(
        self, block_size: int, fail: Callable[[str], Exception], *, is_cached: bool, has_v2_runner: bool
    ) -> None:
        self._block_size = block_size
        self._fail = fail
        self._is_cached = is_cached
        self._has_v2_runner = has_v2_runner
        self._states: dict[int, int] = {}
        self._last: dict[str, int] = {}

    def start(self, step: SchedulerOutput, rows: Mapping[str, Any]) -> None:
        """Copy the state of each request into the block in which this step leaves the next one."""
        if step.kv_cache_block_copies:
            raise self._fail("vLLM copies blocks, which this runner does not know")
        for block in step.new_block_ids_to_zero or ():
            self._states.pop(block, None)
        if self._has_v2_runner:
            for new in step.scheduled_new_reqs:
                self._last.pop(new.req_id, None)
        if not step.num_scheduled_tokens or not self._is_cached:
            return
        gone = step.finished_req_ids | (step.preempted_req_ids or set()) | step.scheduled_cached_reqs.resumed_req_ids
        for request_id in gone:
            self._last.pop(request_id, None)
        copies: dict[int, int | None] = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = rows[request_id]
            last = self._last.get(request_id, (row.num_computed - 1) // self._block_size)
            index = self._last[request_id] = cdiv(row.num_computed + num_tokens, self._block_size) - 1
            if last not in (-1, index):
                copies[self._block(request_id, row, index)] = self._states.get(self._block(request_id, row, last))
        for block, state in copies.items():
            self._put(block, state)

    def compute(self, request_id: str, row: Any, num_tokens: int, weights: int) -> None:
        """Continue from the state of a request, which must be that of its prefix, and leave the next one."""
        start, end = row.num_computed, row.num_computed + num_tokens
        index = cdiv(end, self._block_size) - 1 if self._is_cached else 0
        block = self._block(request_id, row, index)
        if start and self._states.get(block) != row.prefixes[start] + weights:
            raise self._fail(f"{request_id}: block {block} has no state of its first {start} tokens")
        if self._is_cached:
            self._keep_checkpoint(row, start, end, weights)
        self._states[block] = row.prefixes[end] + weights

    def _keep_checkpoint(self, row: Any, start: int, end: int, weights: int) -> None:
        size = self._block_size
        (offset,), (column,) = compute_mamba_prefill_checkpoints([end], [end - start], size, size, 1, False, size)
        if offset:
            self._put(row.blocks[-1][column], row.prefixes[start + offset] + weights)

    def _put(self, block: int, state: int | None) -> None:
        if block and state is not None:  # what is left in the null block is lost
            self._states[block] = state
        else:
            self._states.pop(block, None)

    def _block(self, request_id: str, row: Any, index: int) -> int:
        blocks: Sequence[int] = row.blocks[-1]
        if not 0 <= index < len(blocks) or not blocks[index]:
            raise self._fail(f"{request_id}: there is no block {index} for a state in {blocks}")
        return blocks[index]
