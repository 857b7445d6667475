"""Engines on which any policy of speculation depth can run: vLLM's engine core on this machine, and a simulated one.

    jobs (prompt, draft, answer)  ->  play(engine, policy, jobs, num_streams)  ->  what each step and each answer took

Both have our scheduler, in which `DepthPlanner` gives each draft the depth that a policy chooses.
"""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from speculation_policies import CostModel, DepthPolicy, DraftState, StepState, Verification

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from streamrag.backends.simulated.blind_runner import BlindRunner
from streamrag.backends.simulated.client import by_parts
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, quick_block_hasher
from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.client.arguments import NUM_DRAFT_TOKENS, scheduler_args
from streamrag.backends.vllm.client.processes import CPU_BLOCK_SIZE
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.step import StepPlanner
from streamrag.backends.vllm.scheduler_options import draft_config
from streamrag.engine.costs.step_profiles import AnalyticProfile, StepProfile
from streamrag.engine.drafts import AnswerDraft
from streamrag.engine.policies import DEFAULT_POLICY

MAX_MODEL_LEN = 8_192
NUM_BLOCKS = 8_192
"""Of the simulated engine: enough for all jobs, which share the blocks of their prompts."""
WINDOW_S = 0.5
"""Over which SpecuStream's metrics are taken, as in its paper."""


@dataclass(frozen=True)
class Job:
    """One answer. `end` is the token that ends answers."""

    prompt: tuple[int, ...]
    draft: tuple[int, ...]
    answer: tuple[int, ...]
    end: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step in which nothing but answers was computed."""

    num_decoding: int
    num_rows: int
    num_pairs: float
    num_tokens: int
    seconds: float
    planning_s: float
    """What choosing the depths took of it."""


@dataclass
class Played:
    """What came of all jobs."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the number of the job."""
    latencies_s: list[float] = field(default_factory=list)
    """From when a request is sent to its last token."""
    tpots_s: list[float] = field(default_factory=list)
    """Seconds from the first token to the last, over the tokens after the first."""
    steps: list[Step] = field(default_factory=list)


class Engine(Protocol):
    """The part of an engine that `play` needs."""

    scheduler: Any
    jobs: dict[str, Job]
    """By the ids of their requests."""

    @property
    def now_s(self) -> float: ...

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, chunk: PromptMessage) -> None: ...

    def step(self) -> list[EngineCoreOutput]: ...


class DepthDraft(AnswerDraft):
    """A draft whose depth is given from outside, and which remembers what its verifications gave."""

    most: int
    history: list[Verification]

    @classmethod
    def adopt(cls, draft: AnswerDraft) -> "DepthDraft":
        """Convert a draft that no token has been proposed of, in place."""
        draft.__class__ = cls
        assert isinstance(draft, cls)
        draft.most, draft.history = 0, []
        return draft

    def look(self, answer: Sequence[int], most: int) -> list[int]:
        """Read the new tokens of `answer`, and return at most `most` tokens that may follow."""
        num_new = len(answer) - self._num_read
        has_left = self._follow(answer) > 0
        if num_new > 0 and (self._num_proposed or has_left):
            self.history.append(Verification(self._num_proposed, min(num_new - 1, self._num_proposed), has_left))
        self.most = most
        return self.next_tokens(answer, most)

    def next_tokens(self, answer: Sequence[int], most: int) -> list[int]:
        self._num_proposed, self._depth = 0, self.most
        return super().next_tokens(answer, most)


class DepthPlanner(StepPlanner):
    """A planner whose depths come from a policy."""

    chooser: "DepthChooser"

    def _verify_drafts(self, decoding: list[StreamRequest], depth: int) -> None:
        self.chooser.choose(decoding, depth)
        super()._verify_drafts(decoding, depth)


class DepthChooser:
    """Asks a policy before each step, and gives it what it wants to know.

    cost: returns what a step costs, by the requests that decode and the tokens before them; None to use what the
        scheduler has learnt from its own steps.
    """

    def __init__(self, engine: Engine, policy: DepthPolicy, cost: Callable[[int, float], CostModel] | None) -> None:
        self._engine, self._policy, self._cost = engine, policy, cost
        self._recent: deque[tuple[float, int, int, int]] = deque()  # (at_s, tokens, proposed, accepted)
        self.planning_s = 0.0
        planner = engine.scheduler.plugin.planner
        planner.__class__, planner.chooser = DepthPlanner, self

    def choose(self, decoding: list[StreamRequest], most: int) -> None:
        """Set the depth of each draft."""
        start_s, drafts, states = time.perf_counter(), [], []
        for request in decoding:
            if request.draft is not None:
                draft = request.draft if isinstance(request.draft, DepthDraft) else DepthDraft.adopt(request.draft)
                drafts.append(draft)
                states.append(self._state(request, draft.look(request._output_token_ids, most), draft.history))
        num_pairs = float(sum(request.num_computed_tokens + 1 for request in decoding))
        step = StepState(
            states,
            len(decoding),
            num_pairs,
            self._engine.scheduler.max_num_active_reqs,
            most,
            self._cost(len(decoding), num_pairs) if self._cost else learnt_cost(self._engine),
            *self._shares(),
        )
        for draft, depth in zip(drafts, self._policy.depths(step) if states else (), strict=True):
            draft.most = min(depth, most)
        self.planning_s = time.perf_counter() - start_s

    def note(self, num_tokens: int, num_proposed: int, num_accepted: int) -> None:
        """Take down what a step gave."""
        self._recent.append((self._engine.now_s, num_tokens, num_proposed, num_accepted))

    def _shares(self) -> tuple[float, float]:
        now_s, recent = self._engine.now_s, self._recent
        while recent and recent[0][0] < now_s - WINDOW_S:
            recent.popleft()
        num_proposed = sum(each[2] for each in recent)
        acceptance = sum(each[3] for each in recent) / num_proposed if num_proposed else 0.0
        return acceptance, sum(each[1] for each in recent) / WINDOW_S

    def _state(self, request: StreamRequest, following: Sequence[int], history: Sequence[Verification]) -> DraftState:
        answer = self._engine.jobs[request.request_id].answer[request.num_output_tokens :]
        pairs = zip(following, answer, strict=False)
        num_right = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(following), len(answer)))
        return DraftState(request.num_computed_tokens + 1, len(following), history, num_right)


def learnt_cost(engine: Engine) -> CostModel | None:
    """Return what the scheduler has learnt of its steps, in tokens; None if that is not enough yet."""
    costs = engine.scheduler.plugin.estimates.step_costs.at(engine.now_s)
    if costs is None:
        return None
    return lambda num_rows, num_pairs: costs.overhead + num_rows + costs.pair_cost * num_pairs


def profile_cost(profile: AnalyticProfile) -> Callable[[int, float], CostModel]:
    """Return what a profile says of steps in which requests with `num_before` tokens in all decode, in seconds."""
    model, num_devices = profile.model, profile.tensor_parallel_size
    per_pair = 4 * model.num_layers * model.num_heads * model.head_dim

    def of_step(num_decoding: int, num_before: float) -> CostModel:
        num_bytes = model.weight_bytes + model.kv_bytes_per_token * num_before
        memory_s = num_bytes / (num_devices * profile.bandwidth_bytes_per_s)

        def cost(num_rows: float, num_pairs: float) -> float:
            flops = 2 * model.num_params * num_rows + per_pair * num_pairs
            return max(flops / (num_devices * profile.peak_flops * profile.efficiency), memory_s) + profile.overhead_s

        return cost

    return of_step


def play(
    engine: Engine,
    policy: DepthPolicy,
    jobs: Sequence[Job],
    num_streams: int,
    cost: Callable[[int, float], CostModel] | None = None,
) -> Played:
    """Answer all jobs, so many at a time."""
    chooser, played = DepthChooser(engine, policy, cost), Played()
    left, times = deque(enumerate(jobs)), dict[str, list[float]]()
    start_s = engine.now_s
    with scheduled_steps(engine) as steps:
        while left or times:
            while left and len(times) < num_streams:
                number, job = left.popleft()
                times[_send(engine, number, job)] = [engine.now_s]
            before_s = engine.now_s
            outputs = engine.step()
            answering = [output for output in outputs if output.request_id in times]
            _note(played, chooser, steps[-1], answering, engine.now_s - before_s)
            for output in answering:
                number = int(output.request_id)
                played.answers[number] = (*played.answers.get(number, ()), *output.new_token_ids)
                times[output.request_id] += [engine.now_s] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    sent_s, first_s, *others = times.pop(output.request_id)
                    played.latencies_s.append((others or [first_s])[-1] - sent_s)
                    played.tpots_s += [(others[-1] - first_s) / len(others)] if others else []
    played.seconds = engine.now_s - start_s
    played.num_tokens = sum(map(len, played.answers.values()))
    return played


@contextmanager
def scheduled_steps(engine: Engine) -> Iterator[deque[SchedulerOutput]]:
    """Yield the last step that was scheduled."""
    schedule, steps = engine.scheduler.schedule, deque[SchedulerOutput](maxlen=1)

    def wrapper(*arguments: Any) -> SchedulerOutput:
        steps.append(schedule(*arguments))
        return steps[-1]

    engine.scheduler.schedule = wrapper
    try:
        yield steps
    finally:
        del engine.scheduler.schedule


def _send(engine: Engine, number: int, job: Job) -> str:
    request_id = str(number)
    engine.jobs[request_id] = job
    params = SamplingParams(max_tokens=job.most_tokens, temperature=0.0, stop_token_ids=[job.end], detokenize=False)
    message = PromptMessage(0, 0, is_complete=True, draft=list(job.draft))
    engine.add(request_id, job.prompt, params, message)
    return request_id


def _note(
    played: Played, chooser: DepthChooser, step: SchedulerOutput, outputs: Sequence[EngineCoreOutput], seconds: float
) -> None:
    """Take down a step."""
    drafts, cached = step.scheduled_spec_decode_tokens, step.scheduled_cached_reqs
    num_new = {output.request_id: len(output.new_token_ids) for output in outputs}
    num_proposed = sum(map(len, drafts.values()))
    num_accepted = sum(max(num_new.get(name, 1) - 1, 0) for name in drafts)
    played.num_proposed += num_proposed
    played.num_accepted += num_accepted
    chooser.note(sum(num_new.values()), num_proposed, num_accepted)
    num_rows = step.total_num_scheduled_tokens
    if num_rows and not step.scheduled_new_reqs and all(cached.num_output_tokens):
        num_pairs = sum(
            (num_computed + 1) * step.num_scheduled_tokens[name]
            for name, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        )
        num_decoding = len(step.num_scheduled_tokens)
        played.steps.append(Step(num_decoding, num_rows, num_pairs, sum(num_new.values()), seconds, chooser.planning_s))


class RealEngine:
    """vLLM's engine core in this process, its worker in another. No client and no sockets between us and the steps."""

    def __init__(self, model: Path, *, max_num_seqs: int, kv_tokens: int) -> None:
        args = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            block_size=CPU_BLOCK_SIZE,
            kv_cache_memory_bytes=4 << 30,
            num_gpu_blocks_override=kv_tokens // CPU_BLOCK_SIZE,
            speculative_config=draft_config(NUM_DRAFT_TOKENS),
            **scheduler_args("streaming", DEFAULT_POLICY, None, {}, eviction="recompute"),
        )
        config = args.create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.scheduler: Any = self._core.scheduler
        self.jobs: dict[str, Job] = {}

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, chunk: PromptMessage) -> None:
        params.extra_args = chunk.extra_args()
        hasher = self._core.request_block_hasher
        request = Request(
            request_id, list(token_ids), params, None, arrival_time=time.time(), block_hasher=hasher, resumable=True
        )
        self._core.add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        by_client, has_computed = self._core.step()
        self._core.post_step(has_computed)
        return [output for client_outputs in by_client.values() for output in client_outputs.outputs]

    def close(self) -> None:
        """Stop the worker."""
        self._core.shutdown()


class AnsweringEngine(SimulatedEngine):
    """A simulated engine that gives the answers of its jobs."""

    def __init__(self, profile: StepProfile, *, max_num_seqs: int, budget: int) -> None:
        shape = EngineShape(
            num_blocks=NUM_BLOCKS,
            block_size=profile.block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            num_draft_tokens=NUM_DRAFT_TOKENS,
        )
        self.jobs: dict[str, Job] = {}
        hasher, runner = quick_block_hasher(profile.block_size), BlindRunner(token_at=self._token_at)
        super().__init__(shape, runner, by_parts(profile.step_s), block_hasher=hasher)

    def _token_at(self, request_id: str, position: int) -> int:
        job = self.jobs[request_id]
        return job.answer[position] if position < len(job.answer) else job.end


def repeated(jobs: Sequence[Job], num: int, rng: random.Random) -> Iterator[Job]:
    """Yield `num` jobs in any order, each one about as often as every other."""
    while num > 0:
        yield from rng.sample(jobs, min(num, len(jobs)))
        num -= len(jobs)
