"""One scenario, played to its end: the loop of vLLM's `EngineCore`, its clients and its operator."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import RequestStatus

from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, always
from streamrag.backends.vllm.chunk_wire import KEY, PromptMessage
from streamrag.backends.vllm.chunk_wire import EndOfInput as EndMessage
from streamrag.backends.vllm.copy_wire import HostCopies
from streamrag.backends.vllm.scheduler.hooks import StreamingHooks
from streamrag.engine.costs.copy_costs import CopyCosts
from streamrag.engine.costs.profile_files import save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.engine.drafts import DraftSurvival
from streamrag.engine.step_size import LEAST_TOKENS, StepCostEstimator, StepCosts
from tests.engine.oracle import OracleRunner
from tests.engine.sizes import container_sizes

from .clients import AcceptedTokens, Client, check
from .connector import Connected, with_connector
from .counts import count_chunk, count_later_hits
from .events import (
    Abort,
    Chunk,
    EndOfInput,
    Evict,
    Grammar,
    Lost,
    Malformed,
    Pause,
    Plain,
    Reset,
    Resume,
    Session,
)
from .prompt_logprobs import PromptLogprobs
from .record_checks import CountingV1Runner, CountingV2Runner
from .scenarios import Scenario
from .transfer_checks import TransferChecks

__all__ = ["Run", "make_runner", "make_shape"]

R = TypeVar("R", bound=OracleRunner)

COPIES = CopyCosts(((1, 0.5), (9, 0.9)), ((1, 0.5), (9, 0.9)), block_bytes=1, is_overlapped=True)
PROFILE = TableProfile("fuzz", "none", ((1, 0.1), (100, 10.0)), 0.0, 0.0, kv_tokens=0, copies=COPIES)
"""The profile of an engine on which copying a few blocks takes less time than computing them, and copying one takes
more."""
MOST_EMPTY_STEPS = 4
MOST_EVICTING = 500
"""An operator who took from everybody what it has just loaded would never let the engine come to an end."""
MOST_STEPS = 5_000
BY_ARRIVAL = ("fcfs", "arrival")
"""Policies under which of two complete prompts the earlier one is started first."""


class AnyCostEstimates(StepCostEstimator):
    """Of steps that were never that long: any will do, and those of the fuzz all take a second."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(-13 * seed - 5)

    def at(self, now_s: float) -> StepCosts | None:
        overhead, arrivals, pair = map(self._chance.choice, ([0, 2, 20], [0.0, 0.01, 1.0], [0.0, 0.1]))
        return self._chance.choice([None, AnyCosts(overhead, arrivals, pair)])


class AnyCosts(StepCosts):
    def best_length(self, num_waiting: float) -> float:
        return super().best_length(num_waiting) - LEAST_TOKENS + 1


class CheapDrafts(DraftSurvival):
    """As if each token of a draft saved a hundred."""

    def __call__(self) -> float:
        return 100.0


class ConnectedV1Runner(Connected, PromptLogprobs, CountingV1Runner):
    """The first kind of model runner, in an engine with a third-party connector."""


class ConnectedV2Runner(Connected, PromptLogprobs, CountingV2Runner):
    """The second kind of model runner, in an engine with a third-party connector."""


class LogprobsV1Runner(PromptLogprobs, CountingV1Runner):
    """The first kind of model runner, with log-probabilities of prompts."""


class LogprobsV2Runner(PromptLogprobs, CountingV2Runner):
    """The second kind of model runner, with log-probabilities of prompts."""


class Run:
    """One scenario, its engine and its clients. `checks` looks at it."""

    def __init__(
        self, scenario: Scenario, make_scheduler: Callable[..., Any], met: Counter[str], records: Path
    ) -> None:
        self.scenario = scenario
        self.records = records
        self.met = met
        self.runner = make_runner(scenario, *runner_classes(scenario))
        remote = scenario.remote
        self.engine = SimulatedEngine(
            make_shape(scenario, records),
            self.runner,
            always(1.0) if remote is None else lambda step, start_s: 1.0,  # transfers go on in empty steps
            make_scheduler if remote is None else with_connector(make_scheduler, remote),
            has_v2_runner=scenario.has_v2_runner,
        )
        self.engine.on_step = self._on_step
        assert isinstance(self.engine.scheduler, StreamingHooks)
        self.scheduler = self.engine.scheduler
        self._planned: dict[str, tuple[int, int, bool]] = {}
        """Each grant of the last plan: tokens that are there, those after the step, and whether it has shown any."""
        self._plans_evictions = False
        planner = self.scheduler.plugin.planner
        planner.plan_step = self._keep_plan(planner.plan_step)  # type: ignore[method-assign]
        self.scheduler.plugin.estimates.step_costs = AnyCostEstimates(scenario.seed)
        if scenario.seed % 8 == 2:
            self.scheduler.plugin.estimates.survival = CheapDrafts()
        self.host_memory = self.scheduler.plugin.host_memory
        check((self.host_memory is None) == (scenario.eviction == "recompute"), "host memory for nothing, or none")
        count_later_hits(self)
        self.transfers = None if remote is None else TransferChecks(self)
        self.sizes_at_start = container_sizes(self.scheduler)
        self.clients: dict[str, Client] = {}
        """By name: all that there ever were."""
        self.current: dict[str, Client] = {}
        """By request id: to whom outputs go."""
        self.pause: Pause | None = None
        self.is_pause_complete = False
        self.pauses: list[tuple[float, float]] = []
        """From when to when nobody could run."""
        self.reset_s: set[float] = set()
        """When the cache was emptied, or was to be."""
        self._chance = random.Random(scenario.seed)
        self._num_evicting = 0
        self._loaded: set[int] = set()  # blocks, by the step before
        self._leaving: list[str] = []  # who goes away while the next step computes
        self._paused_at = 0

    # --------------------------------------------------------------------------------------------------- the loop

    def play(self, check_step: Callable[[], None], check_asleep: Callable[[], None]) -> None:
        order = itertools.count()
        events = [(at_s, next(order), event) for at_s, event in self.scenario.events]
        heapq.heapify(events)
        engine = self.engine
        num_empty = 0
        while events or engine.has_work:
            if not engine.has_work:
                if self.pause is None:
                    check_asleep()
                else:
                    self._completes_pause()
                self.met["the engine slept"] += 1
                self.met["the engine slept beside idle streams"] += bool(self.scheduler.plugin.queues.idle)
                engine.now_s = max(engine.now_s, events[0][0])
            self._evict_loaders()
            while events and events[0][0] <= engine.now_s:
                self._do(heapq.heappop(events)[2])
            before_s = engine.now_s
            outputs = self._step()
            for output in outputs:
                self.current[output.request_id].receive(output, engine.now_s)
            check_step()
            num_empty = 0 if outputs or engine.now_s > before_s or not engine.has_work else num_empty + 1
            if num_empty and events and self._waits_for_grammar():  # vLLM's loop turns until that is there
                engine.now_s, num_empty = events[0][0], 0
            check(num_empty <= MOST_EMPTY_STEPS, "the engine spins: it has work but does nothing")
            check(engine.num_steps < MOST_STEPS, "the engine does not come to an end")

    def _step(self) -> list[EngineCoreOutput]:
        is_computing = self.engine.launch() is not None
        leaving, self._leaving = self._leaving, []
        for name in leaving:
            self.met["aborts in mid-step"] += self._abort(name)
        return self.engine.collect() if is_computing else []

    def _waits_for_grammar(self) -> bool:
        return any(c.grammar is not None and c.ready_at is None and c.is_waiting for c in self.clients.values())

    def _on_step(self, step: SchedulerOutput, start_s: float, end_s: float) -> None:
        """A step computes. Told before its output is known."""
        num_steps, copies = self.engine.num_steps, step.kv_connector_metadata
        self._loaded = {block_id for _, block_id in copies.loads} if isinstance(copies, HostCopies) else set()
        if self.pause is None:
            if self.transfers is not None:
                self.transfers.check_step(step)
            if self.scenario.remote is None or not self.scenario.remote.may_load:
                self._check_as_planned(step)
        self._check_drafts(step)
        for request_id in step.num_scheduled_tokens:
            client = self.current[request_id]
            client.computed = (client.num_chunks, end_s)
            if client.started_at is None:
                client.started_at = num_steps
                self._check_overtaken(client)
            if self.pause is not None:
                # vLLM starts what a connector has loaded for, as it holds blocks.
                may_load = self.scenario.remote is not None and self.scenario.remote.may_load
                may_run = self.pause.mode == "wait" and (may_load or client.started_at <= self._paused_at)
                check(may_run, f"{client.name} runs in a pause")

    def _keep_plan(self, make_plan: Callable[[], Any]) -> Callable[[], Any]:
        """Keep what each plan grants, to compare it with what vLLM then schedules."""

        def make_and_keep() -> Any:
            step = make_plan()
            present = self.scheduler.plugin.kv_memory.num_present_tokens
            self._planned, self._plans_evictions = {}, bool(step.plan.evictions)
            if self.transfers is not None:
                self.transfers.check_plan(step)
            for grant in step.plan.grants:
                view, start = grant.request, present(grant.request)
                end = start + grant.num_tokens
                self._planned[view.request_id] = (start, end, view.has_output)
                is_part = view.is_complete and not view.is_running and end < view.num_tokens
                self.met["complete prompts that start with a part"] += is_part
            return step

        return make_and_keep

    def _check_as_planned(self, step: SchedulerOutput) -> None:
        """Check that the step computes each prompt exactly to the end that was planned for it.

        Where its computation starts may differ: a request that starts finds what one before it computes in the same
        step, and loses what one before it is given the blocks of. Who has lost may not fit, and then nor may others.
        Nor may they if a victim's blocks are in the prefix hit of one that starts, which no plan knows.
        """
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        is_lost = any(start < self._planned[name][0] for name, start in starts.items() if name in self._planned)
        self.met["steps in which a prefix hit is lost"] += is_lost
        for name, (start, end, has_output) in self._planned.items():
            if name in starts:
                computed = starts[name] + step.num_scheduled_tokens[name]
                # vLLM ends a step once more before the last block of which it keeps the state of a Mamba layer.
                may_end_before = is_lost or self.scenario.has_mamba
                is_as_planned = computed <= end if may_end_before else computed == end
                check(is_as_planned, f"{name} was to compute from {start} to {end}: from {starts[name]} to {computed}")
            elif not has_output:  # else its last token may be in flight
                self.met["starts that did not fit"] += 1
                counted_on_a_hit = start > self.scheduler.requests[name].num_computed_tokens
                # Nor does vLLM start who finds the state of a Mamba layer that one before it computes in this step.
                is_known = is_lost or counted_on_a_hit or self._plans_evictions or self.scenario.has_mamba
                check(is_known, f"{name} was to compute to {end} and computes nothing")

    def _check_drafts(self, step: SchedulerOutput) -> None:
        """Check that only drafts compute to which the plan granted tokens."""
        computing = [self.scheduler.requests[request_id] for request_id in step.num_scheduled_tokens]
        drafts = [request for request in computing if request.request_class == "draft"]
        self.met["steps of drafts"] += bool(drafts)
        self.met["steps of drafts beside others"] += 0 < len(drafts) < len(computing)
        self.met["drafts that were evicted"] += sum(draft.was_evicted for draft in drafts)
        is_granted = self.pause is not None or all(draft.request_id in self._planned for draft in drafts)
        check(is_granted, f"of the drafts {[draft.request_id for draft in drafts]} one computes without a grant")

    def _check_overtaken(self, starting: Client) -> None:
        """That no complete prompt that came before this one, and could run, is still to be started."""
        if starting.is_stream or self.scenario.policy not in BY_ARRIVAL:
            return
        if self.scenario.remote is not None and self.scenario.remote.may_load:
            return  # who starts first depends on the connector
        for other in self.clients.values():
            could_start = other.ready_at is not None and other.is_waiting and not other.must_fail
            if could_start and other.started_at is None and not other.is_stream:
                is_later = starting.sent_at > max(other.ready_at, other.sent_at) + 1
                check(not is_later, f"{starting.name} starts before {other.name}, whose grammar has long been ready")

    # --------------------------------------------------------------------------------------------------- the events

    def _do(self, event: Any) -> None:
        self.met[f"events: {type(event).__name__}"] += 1
        match event:
            case Plain():
                self._add_plain(event)
            case Session():
                self._add_session(event)
            case Grammar():
                self._compile(event)
            case Chunk():
                self._add_chunk(event)
            case Lost():
                self._client(event.chunk.request_id).is_gapped = True
            case Malformed():
                self._add_malformed(event)
            case EndOfInput():
                self._end_input(event.request_id)
            case Abort(is_in_mid_step=True):
                self._leaving.append(event.request_id)
            case Abort():
                self.met["aborts"] += self._abort(event.request_id)
            case Evict():
                self._evict(event.nth)
            case Reset():
                self._reset(event.is_of_running, event.is_of_connector)
            case Pause():
                self._pause(event)
            case Resume():
                self._resume()

    def _client(self, name: str) -> Client:
        if name not in self.clients:
            request_id = self._request_id(name)
            scenario = self.scenario
            unit = scenario.block_size if scenario.has_mamba and scenario.has_prefix_cache else 1
            known = (scenario.max_model_len, scenario.vocabulary, unit)
            client = Client(name, request_id, *known, sent_at=self.engine.num_steps)
            if request_id in self.current:
                self.current[request_id].counts = self.runner.take_counts(request_id)
            self.clients[name] = self.current[request_id] = client
        return self.clients[name]

    def _request_id(self, name: str) -> str:
        """Its own, or that of a request that has ended, of which steps and answers may still be in flight."""
        wanted = self.scenario.reused_ids.get(name)
        if wanted is None or wanted not in self.clients:
            return name
        old = self.current[self.clients[wanted].request_id]
        if old.is_waiting or not old.sent:
            return name
        self.met["request ids used again with a step in flight"] += old.computed[1] > self.engine.now_s
        self.met["request ids used again"] += 1
        return old.request_id

    def _params(self, event: Plain | Chunk) -> SamplingParams:
        stop = [] if event.stop is None else [event.stop]
        params = SamplingParams(max_tokens=event.max_tokens, temperature=0.0, stop_token_ids=stop, detokenize=False)
        if event.has_grammar:
            params.structured_outputs = StructuredOutputsParams(json_object=True)
        if isinstance(event, Plain) and event.has_prompt_logprobs:
            params.prompt_logprobs, params.skip_reading_prefix_cache = 1, True
        return params

    def _add_plain(self, event: Plain) -> None:
        client = self._client(event.request_id)
        client.send(event, self.engine.now_s)
        self.met["plain requests"] += 1
        if event.has_grammar:
            client.grammar = AcceptedTokens()
            self.met["plain requests with a grammar"] += 1
        client.wants_logprobs = event.has_prompt_logprobs
        self.engine.add(client.request_id, event.prompt, self._params(event))

    def _add_session(self, event: Session) -> None:
        client = self._client(event.request_id)
        client.must_fail = True
        client.sent.append((self.engine.now_s, event.prompt))
        self.engine.add(client.request_id, event.prompt, SamplingParams(max_tokens=3, temperature=0.0), is_session=True)

    def _compile(self, event: Grammar) -> None:
        client = self.clients.get(event.request_id)
        if client is None or not client.is_waiting or not client.is_complete:
            return
        if client.must_fail or client.is_too_long:
            return  # its last chunk was refused
        assert client.grammar is not None
        structured = self.scheduler.requests[client.request_id].structured_output_request
        assert structured is not None
        if event.is_good:
            structured._grammar = client.grammar  # type: ignore[assignment]
            client.ready_at = self.engine.num_steps
        else:
            structured._grammar = ValueError("no such grammar")
            client.must_fail = True

    def _add_chunk(self, event: Chunk) -> None:
        client = self._client(event.request_id)
        if client.sent and not client.is_waiting:
            self.met["chunks after the end"] += 1
        else:
            count_chunk(self, event, client)
            client.send(event, self.engine.now_s)
            self.met["streams without a first chunk"] += client.lacks_start
            if event.has_grammar and client.is_complete and not client.must_fail:
                client.grammar = AcceptedTokens()
                self.met["streams with a grammar"] += 1
        if self.current[client.request_id] is not client:
            return  # its id is somebody else's now: vLLM's client would not send it
        request_class = self.scenario.request_classes.get(event.request_id, "pool")
        message = PromptMessage(
            event.index,
            event.num_kept,
            event.is_complete,
            self.engine.now_s,
            request_class=request_class,
            draft=list(event.draft),
        )
        self.engine.add(client.request_id, event.prompt[event.num_kept :], self._params(event), message)

    def _add_malformed(self, event: Malformed) -> None:
        client = self._client(event.request_id)
        if client.must_fail or client.is_too_long or client.is_gapped or (client.sent and not client.is_waiting):
            return
        client.must_fail = True
        if not client.sent:
            client.sent.append((self.engine.now_s, event.prompt))
        params = SamplingParams(max_tokens=3, temperature=0.0, detokenize=False, extra_args={KEY: event.extra_args})
        self.engine.add(client.request_id, event.prompt, params, is_session=client.is_stream)

    def _end_input(self, name: str) -> None:
        client = self.clients[name]
        if self.current[client.request_id] is client:
            self.met["clients that gave up"] += client.end_input()
            params = SamplingParams(max_tokens=1, detokenize=False, extra_args=EndMessage().extra_args())
            self.engine.add(client.request_id, [0], params)

    def _abort(self, name: str) -> bool:
        client = self.clients.get(name)
        if client is None or not client.is_waiting:
            return False
        client.is_aborted = True
        self.met["aborts of idle streams"] += client.request_id in self.scheduler.plugin.queues.idle
        self.engine.abort(client.request_id)
        return True

    # ------------------------------------------------------------------------------------------------- the operator

    def _evict_loaders(self) -> None:
        loaded, self._loaded = self._loaded, set()
        if not loaded or self.pause is not None or self._chance.random() >= self.scenario.share_of_evicted_loaders:
            return
        self._num_evicting += 1
        if self._num_evicting > MOST_EVICTING:
            return
        for request in list(self.scheduler.requests.values()):
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            if not loaded.isdisjoint(block_ids):
                self.met["evictions of who has just loaded"] += 1
                self.scheduler.plugin.evictions.evict(request)  # type: ignore[arg-type]

    def _evict(self, nth: int) -> None:
        memory = self.scheduler.plugin.kv_memory
        holders = [r for r in self.scheduler.requests.values() if memory.num_blocks(r)]  # type: ignore[arg-type]
        # No plan has those that have ended, nor those that a connector loads for.
        holders = [r for r in holders if not (r.is_finished() or r in self.scheduler.kv_holding_waiting)]
        if holders and self.pause is None:
            self.met["forced preemptions"] += 1
            self.scheduler.plugin.evictions.evict(holders[nth % len(holders)])  # type: ignore[arg-type]

    def _reset(self, is_of_running: bool, is_of_connector: bool) -> None:
        is_done = self._empty_cache(is_of_running, is_of_connector)
        check(is_done or not is_of_running or self._holds_transfers(), "the prefix cache was not emptied")
        if is_done:
            self.met["prefix cache resets"] += 1
            self.runner.load_weights()
        self.reset_s.add(self.engine.now_s)

    def _empty_cache(self, is_of_running: bool, is_of_connector: bool) -> bool:
        try:
            return self.scheduler.reset_prefix_cache(is_of_running, is_of_connector)
        except RuntimeError:  # vLLM's, while transfers hold blocks
            check(self._holds_transfers(), "the prefix cache was not emptied")
            return False

    def _holds_transfers(self) -> bool:
        """Whether blocks are held by loads and sends, or until a step in flight has written them."""
        scheduler = self.scheduler
        is_held = bool(scheduler.kv_holding_waiting or scheduler.deferred_frees) or any(
            request.is_finished() for request in scheduler.requests.values()
        )
        self.met["resets while transfers hold blocks"] += is_held
        return is_held

    def _pause(self, event: Pause) -> None:
        """As `EngineCoreProc.pause_scheduler`."""
        self._resume()
        if event.mode == "abort":
            waiting = {client.request_id: client for client in self.clients.values() if client.is_waiting}
            aborted = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            for request in aborted:
                client = waiting.pop(request.request_id)
                client.is_aborted = True
                self.met["aborts by a pause"] += 1
            for client in waiting.values():  # what they hear is on its way
                check(client.must_fail or client.is_too_long, f"{client.name} outlives a pause")
        state = PauseState.PAUSED_ALL if event.mode == "keep" else PauseState.PAUSED_NEW
        self.scheduler.set_pause_state(state)
        self.pause, self.is_pause_complete, self._paused_at = event, False, self.engine.num_steps

    def _completes_pause(self) -> None:
        """The loop has come to rest: `pause_generation` returns."""
        if self.is_pause_complete:
            return
        assert self.pause is not None
        self.is_pause_complete = True
        self._complete_s = self.engine.now_s
        self.met[f"pauses: {self.pause.mode}"] += 1
        if self.pause.clears_cache:
            is_done = self._empty_cache(True, True)
            check(is_done or self._holds_transfers(), "the caches were not emptied in a pause")
            if is_done:
                self.runner.load_weights()

    def _resume(self) -> None:
        if self.is_pause_complete:
            self.pauses.append((self._complete_s, self.engine.now_s))
        self.met["pauses that did not complete"] += self.pause is not None and not self.is_pause_complete
        self.pause, self.is_pause_complete = None, False
        self.scheduler.set_pause_state(PauseState.UNPAUSED)


def runner_classes(scenario: Scenario) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the two kinds of runner of a scenario."""
    if scenario.remote is not None:
        return ConnectedV1Runner, ConnectedV2Runner
    return (LogprobsV1Runner, LogprobsV2Runner) if scenario.has_logprobs else (CountingV1Runner, CountingV2Runner)


def make_runner(
    scenario: Scenario, v1_runner: Callable[..., R] = CountingV1Runner, v2_runner: Callable[..., R] = CountingV2Runner
) -> R:
    arguments = (scenario.num_blocks, scenario.block_size, scenario.vocabulary, scenario.is_async)
    windows = (None,) if scenario.sliding_window is None else (None, scenario.sliding_window)
    options = {"windows": windows, "has_cached_states": scenario.has_prefix_cache if scenario.has_mamba else None}
    if scenario.has_v2_runner:
        runner = v2_runner(*arguments, **options, num_slots=scenario.max_num_seqs)
    else:
        runner = v1_runner(*arguments, **options)
    faults = random.Random(scenario.seed)
    share = scenario.share_of_faults
    runner.save_fails = lambda slot: faults.random() < share or slot in scenario.bad_saves
    runner.load_fails = lambda slot: faults.random() < share or slot in scenario.bad_loads
    runner.num_host_slots = scenario.num_true_host_blocks
    runner.copy_costs = COPIES
    return runner


def make_shape(scenario: Scenario, records: Path) -> EngineShape:
    profile = records.with_name("profile.json")
    save_profile(PROFILE, profile)
    return EngineShape(
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
        num_draft_tokens=scenario.num_draft_tokens,
        has_mamba=scenario.has_mamba,
        streamrag={
            "policy": scenario.policy,
            "can_partial_evict": scenario.can_partial_evict,
            "num_partial_tokens": scenario.num_partial_tokens,
            "late_binding": scenario.late_binding,
            "low_water": scenario.low_water,
            "eviction": scenario.eviction,
            "num_host_blocks": scenario.num_host_blocks,
            "profile": str(profile),
            "records": str(records),
            **scenario.options,
        },
    )
