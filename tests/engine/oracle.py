"""Model runners that know of each KV slot what it holds, and fail when a request would read what is not its own.

`OracleRunner` keeps in each KV slot a fingerprint of the prefix that it belongs to and of the weights that computed it,
and raises when attention would read a slot that belongs to others. It follows the bookkeeping of vLLM's runners, so
that what they would remember wrongly it remembers wrongly too:

    V1  vllm/v1/worker/gpu_model_runner.py: _update_states, _update_streaming_request, _bookkeeping_sync
    V2  vllm/v1/worker/gpu/model_runner.py: finish_requests, add_requests, update_requests
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.engine.costs.copy_costs import CopyCosts
from tests.engine.states import MambaStates

__all__ = ["UNKNOWN", "OracleRunner", "StaleKVError", "V1OracleRunner", "V2OracleRunner", "fingerprint", "next_token"]

NULL_BLOCK = 0
"""Stands where a request has no block any more: a window has moved on."""
UNKNOWN = -1
"""A token that only the device knows yet."""
FINGERPRINTS = (1 << 61) - 1
"""How many there are."""
NUM_UNHEARD = 2
"""Reports that the scheduler has not read yet, at most."""


class StaleKVError(AssertionError):
    """Attention would have read KV of another prefix, or the runner was told something impossible."""


def fingerprint(before: int, token: int) -> int:
    """Fingerprint of a prefix, given the fingerprint without its last token. The empty prefix has 0."""
    return (before * 1_000_003 + token + 1) % FINGERPRINTS


def next_token(prefix: int, num_tokens_in_vocabulary: int) -> int:
    """The token that the model "samples" after a prefix."""
    return prefix % num_tokens_in_vocabulary


@dataclass
class Row:
    """What the runner remembers of a request."""

    prompt: list[int]
    blocks: tuple[list[int], ...]
    """One block table per group."""
    num_computed: int
    output: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Prompt and output, as they were when the request entered the batch, and what was sampled since."""
    prefixes: list[int] = field(default_factory=lambda: [0])
    """Fingerprints of the prefixes of `tokens`: one more than tokens, as far as computed."""

    def append_blocks(self, new: tuple[list[int], ...]) -> None:
        for table, blocks in zip(self.blocks, new, strict=True):
            table.extend(blocks)


class OracleRunner(ABC):
    """What the two kinds of runner have in common."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocabulary: int,
        is_async: bool,
        windows: tuple[int | None, ...] = (None,),
        has_cached_states: bool | None = None,
    ) -> None:
        self.states: MambaStates | None = None
        """Those of the last group, if it is of Mamba layers: its states are kept for each block, or only for now."""
        if has_cached_states is not None:
            self.states = MambaStates(
                block_size, StaleKVError, is_cached=has_cached_states, has_v2_runner=isinstance(self, V2OracleRunner)
            )
        self.windows = windows
        """Per group, how many tokens attention reaches back; None for all."""
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.is_async = is_async
        self.rows: dict[str, Row] = {}
        self.slots = [[UNKNOWN] * block_size for _ in range(num_blocks + 1)]
        self.host: dict[int, list[int]] = {}
        """What each slot of host memory holds."""
        self.save_fails: Callable[[int], bool] = lambda slot: False
        """Whether the next copy of a block into that host slot fails."""
        self.load_fails: Callable[[int], bool] = lambda slot: False
        """Whether the next copy of a block out of that host slot fails."""
        self.num_host_slots: int | None = None
        """How many there are, if fewer than the scheduler was promised; told with each report."""
        self.copy_costs: CopyCosts | None = None
        """How long copies take; None if nothing is told of that."""
        self.num_saved = self.num_loaded = self.num_not_loaded = self.num_failed = 0
        """Blocks; the last counts both directions."""
        self.num_written_through = 0
        """The saved blocks that were written through."""
        self.tainted: dict[int, int] = {}
        """Blocks that were not loaded, or computed from such, and for how many steps more the scheduler cannot know."""
        self.last_sampled: dict[str, int] = {}
        """What the step before has sampled; on the device only, if scheduling is asynchronous."""
        self.proposed: Mapping[str, Sequence[int]] = {}
        """The tokens of drafts that the present step verifies."""
        self._weights = 0  # added to the fingerprints of all KV that these weights compute
        self._num_reports = 0

    def load_weights(self) -> None:
        """From now on other weights compute, for which the KV of the ones before is of no use. Tokens are the same."""
        self._weights += FINGERPRINTS

    def copy(self, copies: HostCopies) -> KVConnectorOutput | None:
        saved: list[int] = []
        failed: list[int] = []
        invalid: set[int] = set()
        self.tainted = {block_id: num - 1 for block_id, num in self.tainted.items() if num > 1}
        for block_id, slot in copies.saves + copies.held_saves:
            if block_id in self.tainted:
                raise StaleKVError(f"block {block_id} is saved, of which nobody can know whether it was loaded")
            fails = self._has_no(slot) or self.save_fails(slot)
            (failed if fails else saved).append(slot)
            self.host[slot] = [UNKNOWN] * self.block_size if fails else self.slots[block_id].copy()
        for slot, block_id in copies.loads:
            if self._has_no(slot) or self.load_fails(slot):
                invalid.add(block_id)
            else:
                self.slots[block_id] = self.host[slot].copy()
                self.tainted.pop(block_id, None)
        self.num_saved += len(saved)
        self.num_written_through += len(copies.held_saves)
        self.num_loaded += len(copies.loads) - len(invalid)
        self.num_not_loaded += len(invalid)
        self.num_failed += len(failed) + len(invalid)
        self._taint(invalid)
        if not (copies.saves or copies.held_saves or copies.loads):
            return None
        self._num_reports += 1
        report = CopyReport(saved, failed, num_slots=self.num_host_slots)
        if self.copy_costs is not None:
            report.num_blocks_out, report.out_s = len(saved), self.copy_costs.out_s(len(saved))
            report.num_blocks_in = len(copies.loads) - len(invalid)
            report.in_s = self.copy_costs.in_s(report.num_blocks_in)
        return KVConnectorOutput(kv_connector_worker_meta=report, invalid_block_ids=invalid)

    def _has_no(self, slot: int) -> bool:
        """Whether there is no such slot, which the scheduler must not try for ever."""
        if self.num_host_slots is None or slot < self.num_host_slots:
            return False
        if self._num_reports > NUM_UNHEARD:
            raise StaleKVError(f"host slot {slot} of {self.num_host_slots} is used after {self._num_reports} reports")
        return True

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.update(step)
        if self.states is not None:
            self.states.start(step, self.rows)
        if not step.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        counts, self.proposed = step.num_scheduled_tokens, step.scheduled_spec_decode_tokens
        # As in each layer of a model: all write, then all read.
        for request_id, num_tokens in counts.items():
            self._write(request_id, num_tokens)
            if self.states is not None:
                self.states.compute(request_id, self.rows[request_id], num_tokens, self._weights)
        is_tainted = [self._read(request_id, num_tokens) for request_id, num_tokens in counts.items()]
        sampled = [
            self._sample(request_id, num_tokens, is_wrong=is_wrong)
            for (request_id, num_tokens), is_wrong in zip(counts.items(), is_tainted, strict=True)
        ]
        self.last_sampled = {r: tokens[0] for r, tokens in zip(counts, sampled, strict=True) if tokens}
        return ModelRunnerOutput(list(counts), {r: i for i, r in enumerate(counts)}, sampled)

    @abstractmethod
    def update(self, step: SchedulerOutput) -> None:
        """Take in what the scheduler says."""

    @abstractmethod
    def remember_sample(self, request_id: str, token: int) -> None:
        """A token was sampled."""

    def _token_at(self, request_id: str, position: int) -> int:
        row = self.rows[request_id]
        guesses = self.proposed.get(request_id, ())
        if len(row.tokens) <= position < len(row.tokens) + len(guesses):
            return guesses[position - len(row.tokens)]
        if position >= len(row.tokens):
            raise StaleKVError(f"{request_id}: token {position} is computed, but only {len(row.tokens)} are known")
        token = row.tokens[position]
        if token != UNKNOWN:
            return token
        if position != len(row.tokens) - 1 or request_id not in self.last_sampled:
            raise StaleKVError(f"{request_id}: token {position} is read, but it is a placeholder")
        return self.last_sampled[request_id]

    def _write(self, request_id: str, num_tokens: int) -> None:
        row = self.rows[request_id]
        end = row.num_computed + num_tokens
        del row.prefixes[row.num_computed + 1 :]
        while len(row.prefixes) <= end:
            position = len(row.prefixes) - 1
            row.prefixes.append(fingerprint(row.prefixes[-1], self._token_at(request_id, position)))
        for blocks in row.blocks[: len(self.windows)]:
            for position in range(row.num_computed, end):
                index, offset = divmod(position, self.block_size)
                if index >= len(blocks) or blocks[index] == NULL_BLOCK:
                    raise StaleKVError(f"{request_id}: no block for token {position} in {blocks}")
                self.slots[blocks[index]][offset] = row.prefixes[position + 1] + self._weights
                if offset == 0:
                    self.tainted.pop(blocks[index], None)

    def _read(self, request_id: str, num_tokens: int) -> bool:
        """Whether it reads what was not loaded, of which the scheduler has not heard: all that follows is wrong."""
        row = self.rows[request_id]
        end = row.num_computed + num_tokens
        for blocks, window in zip(row.blocks, self.windows, strict=False):
            start = 0 if window is None else max(row.num_computed - window + 1, 0)
            while start < end:
                index, offset = divmod(start, self.block_size)
                if blocks[index] in self.tainted:
                    self._taint(blocks[row.num_computed // self.block_size : (end - 1) // self.block_size + 1])
                    return True
                last = min((index + 1) * self.block_size, end)
                found = self.slots[blocks[index]][offset : offset + last - start]
                if found != [prefix + self._weights for prefix in row.prefixes[start + 1 : last + 1]]:
                    raise StaleKVError(
                        f"{request_id}: block {blocks[index]}, tokens [{start}, {last}), holds KV of another prefix, "
                        "or of other weights"
                    )
                start = last
        return False

    def _taint(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.slots[block_id] = [UNKNOWN] * self.block_size
            self.tainted[block_id] = 2 if self.is_async else 1

    def _sample(self, request_id: str, num_tokens: int, *, is_wrong: bool) -> list[int]:
        row = self.rows[request_id]
        end = row.num_computed + num_tokens
        guesses = self.proposed.get(request_id, ())
        if end < len(row.tokens):
            if guesses:
                raise StaleKVError(f"{request_id}: a draft is verified before the prompt is computed")
            return []
        if end != len(row.tokens) + len(guesses):
            raise StaleKVError(f"{request_id}: {num_tokens} tokens are computed to verify {len(guesses)}")
        tokens: list[int] = []
        for position, guess in enumerate((*guesses, None), start=len(row.tokens)):
            tokens.append(self.choose(request_id, row.prefixes[position]))
            if is_wrong:
                tokens[-1] = (tokens[-1] + 1) % self.vocabulary
            if tokens[-1] != guess:
                break
        for token in tokens:
            self.remember_sample(request_id, token)
        return tokens

    def choose(self, request_id: str, prefix: int) -> int:
        """The token that follows a prefix."""
        return next_token(prefix, self.vocabulary)


class V1OracleRunner(OracleRunner):
    """Remembers requests while they exist, and a batch of those that were scheduled in the last step."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.batch: set[str] = set()

    def update(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self.rows.pop(request_id, None)
            self.batch.discard(request_id)
        cached = step.scheduled_cached_reqs
        self.batch &= step.num_scheduled_tokens.keys() - cached.resumed_req_ids
        entering: list[str] = []
        for new in step.scheduled_new_reqs:
            self._add_or_replace(new)
            entering.append(new.req_id)
        for index, request_id in enumerate(cached.req_ids):
            self._continue(cached, index)
            if request_id not in self.batch:
                entering.append(request_id)
        for request_id in entering:
            row = self.rows[request_id]
            row.tokens = row.prompt + row.output
            row.prefixes = [0]
            self.batch.add(request_id)

    def _add_or_replace(self, new: NewRequestData) -> None:
        assert new.prompt_token_ids is not None
        self.batch.discard(new.req_id)
        self.rows[new.req_id] = Row(new.prompt_token_ids, new.block_ids, new.num_computed_tokens)

    def _continue(self, cached: CachedRequestData, index: int) -> None:
        request_id = cached.req_ids[index]
        row = self.rows[request_id]
        row.num_computed = cached.num_computed_tokens[index]
        new_blocks = cached.new_block_ids[index]
        num_output = cached.num_output_tokens[index]
        if num_output < len(row.output):  # the scheduler has dropped some
            del row.output[num_output:]
            del row.tokens[len(row.prompt) + num_output :]
        if request_id in cached.resumed_req_ids:
            assert new_blocks is not None
            row.blocks = new_blocks
        elif new_blocks is not None:
            row.append_blocks(new_blocks)
        if request_id not in self.batch and self.is_async and num_output > 0:
            tokens = cached.all_token_ids[request_id]  # as in vLLM, a KeyError if the scheduler did not send them
            if num_output > len(tokens) - len(row.prompt):
                raise StaleKVError(f"{request_id}: resumed while its output is not known")
            row.output = tokens[-num_output:]

    def remember_sample(self, request_id: str, token: int) -> None:
        known = UNKNOWN if self.is_async else token
        row = self.rows[request_id]
        row.output.append(known)
        row.tokens.append(known)


class V2OracleRunner(OracleRunner):
    """Remembers requests as long as they have one of `num_slots` slots; tokens stay on the device."""

    def __init__(self, *arguments: Any, num_slots: int, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.num_slots = num_slots

    def update(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids | (step.preempted_req_ids or set()):
            self.rows.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            assert new.prefill_token_ids is not None
            assert new.prompt_token_ids is not None
            assert len(new.prefill_token_ids) >= len(new.prompt_token_ids)
            self.rows.pop(new.req_id, None)
            if len(self.rows) >= self.num_slots:
                raise StaleKVError(f"{new.req_id}: no free slot, all {self.num_slots} are taken")
            row = Row(new.prompt_token_ids, tuple(map(list, new.block_ids)), new.num_computed_tokens)
            row.tokens = list(new.prefill_token_ids)
            self.rows[new.req_id] = row
        cached = step.scheduled_cached_reqs
        for request_id, num_computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.rows[request_id]
            row.num_computed = num_computed
            if blocks is not None:
                row.append_blocks(blocks)

    def remember_sample(self, request_id: str, token: int) -> None:
        self.rows[request_id].tokens.append(token)
