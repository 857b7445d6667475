"""A third-party KV connector with a script: which KV it has, when it says so, how it loads, what fails, what it sends.

The connector is vLLM's interface on the scheduler's side. `Connected` is its other side, in the runner: it writes what
is loaded into the KV slots, reports what failed, and checks that what was handed over stays as it was until it is sent.

| a connector that                      | as for example                                   |
|---------------------------------------|--------------------------------------------------|
| has no answer for some steps          | LMCache and others that ask a remote index       |
| loads before the step computes        | LMCache, vLLM's ExampleConnector                 |
| loads while other steps compute       | NIXL in a decode engine, vLLM's offloading       |
| reports blocks that were not loaded   | any: `invalid_block_ids`                         |
| keeps the blocks of an ended request  | NIXL in a prefill engine: until they are read    |
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.engine.oracle import NULL_BLOCK, UNKNOWN, OracleRunner, StaleKVError, fingerprint

__all__ = ["Connected", "NixlConnector", "Remote", "ScriptedConnector", "with_connector"]


ENDED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(frozen=True, slots=True)
class Remote:
    """What a connector does in one scenario. What it does for one request follows from the request's id."""

    seed: int
    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    share_found: float = 0.0
    """Share of the requests of which it has KV."""
    most_deferrals: int = 0
    """Steps for which it has no answer."""
    share_async: float = 0.0
    """Share of the loads that take several steps."""
    most_load_steps: int = 1
    share_of_faults: float = 0.0
    """Share of the loads of which blocks fail."""
    failure_policy: Literal["recompute", "fail"] = "recompute"
    most_send_steps: int = 1

    @property
    def may_load(self) -> bool:
        return self.role != "kv_producer"

    def script(self, request_id: str) -> "Script":
        rng = random.Random(f"{self.seed} {request_id}")
        is_async = rng.random() < self.share_async
        return Script(
            share=rng.choice([0.3, 0.7, 1.0]) if rng.random() < self.share_found else 0.0,
            num_deferrals=rng.randrange(self.most_deferrals + 1),
            is_async=is_async,
            num_load_steps=rng.randrange(1, self.most_load_steps + 1),
            share_bad=rng.choice([0.3, 1.0]) if rng.random() < self.share_of_faults else 0.0,
            num_send_steps=rng.randrange(1, self.most_send_steps + 1),
        )


class Script(NamedTuple):
    """What a connector does for one request."""

    share: float  # of the prompt that it has
    num_deferrals: int
    is_async: bool
    num_load_steps: int
    share_bad: float  # of the blocks that fail
    num_send_steps: int


class Load(NamedTuple):
    """KV of `tokens` from token `start` on, to be written into the blocks of a request."""

    request_id: str
    tokens: tuple[int, ...]
    start: int
    block_ids: list[int]
    script: Script


@dataclass
class Transfers(KVConnectorMetadata):
    """What the runner's side is told with a step."""

    loads: list[Load] = field(default_factory=list)
    sends: list[tuple[str, int]] = field(default_factory=list)
    """Requests whose blocks are read from now on, and the steps that it takes."""


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.remote: Remote = self._kv_transfer_config.kv_connector_extra_config["remote"]
        self.on_hand_over: Callable[[Request, list[int], bool], None] = lambda request, block_ids, is_sent: None
        """Told of each request that ends with the blocks that it hands over, and whether they will be read."""
        self.num_answers = self.num_deferrals = 0
        self.deferred: set[str] = set()
        """Requests that have no answer yet."""
        self.asked: set[str] = set()
        """Requests that were asked about in the present step."""
        self._step = 0
        self._asked_at: dict[str, int] = {}
        self._num_local: dict[str, int] = {}
        self._transfers = Transfers()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        script, name = self.remote.script(request.request_id), request.request_id
        self.asked.add(name)
        if self._step < self._asked_at.setdefault(name, self._step) + script.num_deferrals:
            self.num_deferrals += 1
            self.deferred.add(name)
            return None, False
        self.num_answers += 1
        self.deferred.discard(name)
        num_tokens = request.num_prompt_tokens
        if not script.is_async:  # one token is left to compute
            num_tokens -= 1
        if request.num_prompt_tokens == 1:  # vLLM computes the last token, and would ask again
            num_tokens = 0
        block_size = self._vllm_config.cache_config.block_size
        num_found = int(script.share * num_tokens)
        if not script.is_async or num_found < num_tokens:
            num_found = num_found // block_size * block_size
        self._num_local[name] = num_computed_tokens
        num_new = max(num_found - num_computed_tokens, 0)
        return num_new, num_new > 0 and script.is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        name = request.request_id
        self.deferred.discard(name)
        self._asked_at.pop(name, None)
        start = self._num_local.pop(name, 0)
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            tokens = tuple(request.all_token_ids[: start + num_external_tokens])
            self._transfers.loads.append(Load(name, tokens, start, block_ids, self.remote.script(name)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        self._step += 1
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        name, (block_ids_of_group,) = request.request_id, block_ids
        self.deferred.discard(name)
        self._asked_at.pop(name, None)
        self._num_local.pop(name, None)
        is_sent = self.remote.role != "kv_consumer" and request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if self.remote.role != "kv_consumer" and request.status in ENDED:
            self.on_hand_over(request, block_ids_of_group, is_sent)
        if not is_sent:
            return False, None
        self._transfers.sends.append((name, self.remote.script(name).num_send_steps))
        return True, {"remote_block_ids": block_ids}

    def _runs_in_the_worker(self, *arguments: Any, **keywords: Any) -> None:
        raise AssertionError("the scheduler's side is asked to copy")

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _runs_in_the_worker


class NixlConnector(ScriptedConnector):
    """A connector under the name by which our scheduler knows that a producer loads nothing."""


class Connected(OracleRunner):
    """The runner's side, mixed into a runner."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.is_computing: Callable[[], bool] = lambda: False
        """Whether the step before is still in flight."""
        self.must_not_race = False
        """Whether the scheduler keeps what a step in flight writes from loads that do not wait for that step."""
        self.keeps_first_block = False
        """Whether no load fails as a whole."""
        self.num_blocks_loaded = self.num_blocks_bad = self.num_sent = 0
        self.kept: dict[str, tuple[list[int], list[int]]] = {}
        """The blocks of each request that is being sent, and what each of their slots holds."""
        self.affected: set[str] = set()
        """Requests that were to load what failed."""
        self._loading: dict[str, tuple[Load, int, list[int]]] = {}  # with the steps and the bad blocks that are left
        self._sending: dict[str, int] = {}
        self._written: set[int] = set()

    def hand_over(self, request: Request, block_ids: list[int], *, is_sent: bool) -> None:
        """Check that a request that has ended hands over right KV of its whole prompt, and keep it if it is sent."""
        name, tokens, prefix = request.request_id, request.prompt_token_ids or [], 0
        expected = [prefix := fingerprint(prefix, token) for token in tokens]
        expected = [prefix + self._weights for prefix in expected]
        if len(block_ids) * self.block_size < len(tokens) or NULL_BLOCK in block_ids:
            raise StaleKVError(f"{name} hands over the blocks {block_ids} for {len(tokens)} tokens")
        if self._content(block_ids, len(tokens)) != expected:
            raise StaleKVError(f"{name} hands over KV of another prefix, or of other weights, in {block_ids}")
        if is_sent:
            self.kept[name] = (block_ids, expected)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.tainted = {block_id: num - 1 for block_id, num in self.tainted.items() if num > 1}
        transfers = step.kv_connector_metadata
        assert isinstance(transfers, Transfers)
        invalid = {block_id for load in transfers.loads for block_id in self._start(load)}
        self._sending.update(transfers.sends)
        self._written = set()
        output = super().execute(step)
        for name, (block_ids, expected) in self.kept.items():
            if self._content(block_ids, len(expected)) != expected:
                raise StaleKVError(f"{name}: what it has handed over was overwritten before it was sent")
        received, bad = self._advance_loads()
        report = KVConnectorOutput(self._advance_sends(), received, invalid_block_ids=invalid | bad)
        return output if report.is_empty() else replace(output, kv_connector_output=report)

    def _write(self, request_id: str, num_tokens: int) -> None:
        super()._write(request_id, num_tokens)
        row = self.rows[request_id]
        first, end = row.num_computed // self.block_size, cdiv(row.num_computed + num_tokens, self.block_size)
        self._written.update(row.blocks[0][first:end])

    def _start(self, load: Load) -> list[int]:
        """Begin a load, or do it if the step waits for it. Return the blocks of the latter that are bad."""
        blocks = load.block_ids[load.start // self.block_size : cdiv(len(load.tokens), self.block_size)]
        if load.script.is_async and self.must_not_race and self.is_computing() and self._written.intersection(blocks):
            raise StaleKVError(f"{load.request_id}: blocks are loaded that a step in flight still writes: {blocks}")
        bad: list[int] = []
        if load.request_id not in self.affected:  # the next time it works, or nobody would ever come to an end
            rng = random.Random(f"{load.request_id} {len(load.tokens)}")
            # Of several that keep nothing, vLLM puts one without blocks before the others, for whose blocks it waits.
            keeps_first = load.start == 0 and self.keeps_first_block
            bad = [block_id for block_id in blocks[keeps_first:] if rng.random() < load.script.share_bad]
        if bad:
            self.affected.add(load.request_id)
        self.num_blocks_bad += len(bad)
        self.num_blocks_loaded += len(blocks) - len(bad)
        for block_id in blocks:
            self.slots[block_id] = [UNKNOWN] * self.block_size
            self.tainted.pop(block_id, None)
        if load.script.is_async:
            self._loading[load.request_id] = (load, load.script.num_load_steps, bad)
            return []
        self._fill(load, bad)
        self._taint(bad)
        return bad

    def _fill(self, load: Load, bad: Collection[int]) -> None:
        prefix = 0
        for position, token in enumerate(load.tokens):
            prefix = fingerprint(prefix, token)
            block_id = load.block_ids[position // self.block_size]
            if position >= load.start and block_id not in bad:
                self.slots[block_id][position % self.block_size] = prefix + self._weights

    def _advance_loads(self) -> tuple[set[str], set[int]]:
        """Return the requests of which a load has ended, and the blocks that are found to be bad in this step."""
        ended: set[str] = set()
        bad: set[int] = set()
        for name, (load, num_left, found) in list(self._loading.items()):
            if num_left > 1:
                bad.update(found[: num_left % 2])  # some are found before the load has ended
                self._loading[name] = (load, num_left - 1, found)
                continue
            del self._loading[name]
            self._fill(load, found)
            bad.update(found)
            ended.add(name)
        return ended, bad

    def _advance_sends(self) -> set[str]:
        self._sending = {name: num - 1 for name, num in self._sending.items()}
        ended = {name for name, num in self._sending.items() if num <= 0}
        for name in ended:
            del self._sending[name]
            del self.kept[name]
        self.num_sent += len(ended)
        return ended

    def _content(self, block_ids: list[int], num_tokens: int) -> list[int]:
        return [slot for block_id in block_ids for slot in self.slots[block_id]][:num_tokens]


def with_connector(make_scheduler: Callable[..., Any], remote: Remote) -> Callable[..., Any]:
    """Return a `make_scheduler` of an engine with a scripted connector."""

    def make(vllm_config: VllmConfig, **arguments: Any) -> Any:
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="ScriptedConnector" if remote.may_load else "NixlConnector",
            kv_role=remote.role,
            kv_connector_module_path=__name__,
            kv_connector_extra_config={"remote": remote},
            kv_load_failure_policy=remote.failure_policy,
        )
        scheduler = make_scheduler(vllm_config=vllm_config, **arguments)
        if vllm_config.scheduler_config.async_scheduling and remote.role != "kv_producer":
            assert scheduler.defer_block_free
        return scheduler

    return make
