"""Routers and tickets; what a replica says of itself; and how many of them there should be."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from in_process import Fewest
from ray_calls import call_of, replica_of_ray, router_of

pytest.importorskip("ray")

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import RequestRouter

from streamrag.backends.ray.options import QUEUED_TOKENS, QueuedTokensPolicy, ReplicaOptions
from streamrag.backends.ray.request_router import StreamRouter
from streamrag.backends.replicas.replica import EngineReplica
from streamrag.backends.replicas.replica_chooser import ReplicaCandidate, ReplicaChooser
from streamrag.backends.replicas.wire import Delta, Failed, Open, Opened, Refused
from streamrag.core import AnswerChunk, Prefilled, Prompt, SamplingParams
from streamrag.errors import ConfigurationError, PromptTooLongError
from streamrag.records import RequestRecord
from streamrag.routing import Opening, ReplicaState
from streamrag.routing.soonest import LASTS_S, QUERY_TOKENS
from streamrag.testing import ScriptedBackend

FIRST = Prompt((1, 2, 3), 0, is_complete=False, source_name="search")
STATS = {
    "max_open": 4, "kv_usage": 0.5, "cache_hit_rate": 0.25, "queued_tokens": 7, "num_kv_tokens": 100,
    "tokens_per_s": 9.0,
}  # fmt: skip


class Seeing(Fewest):
    """Keeps what it was asked with."""

    def rank(self, opening, replicas, now_s):  # type: ignore[no-untyped-def, override]
        self.opening, self.states = opening, list(replicas)
        return super().rank(opening, replicas, now_s)


def test_a_router_is_told_what_replicas_told_when_it_was_heard_and_what_is_open_there_now() -> None:
    now_s = 5.0
    router = Seeing()
    chooser = ReplicaChooser(router, clock=lambda: now_s)
    there = [ReplicaCandidate("a", 3, {}), ReplicaCandidate("b", 3, {**STATS, "reported_s": 77.0})]
    assert chooser.ticket("1", replace(FIRST, conversation_id="of alice")).rank(there) == ["a", "b"]
    assert router.opening == Opening(FIRST.token_ids, "search", "of alice")
    told = ReplicaState(
        "b", max_open=4, kv_usage=0.5, cache_hit_rate=0.25, queued_tokens=7, num_kv_tokens=100, tokens_per_s=9.0
    )
    assert router.states == [ReplicaState("a", max_open=3), replace(told, measured_s=5.0)]
    now_s = 6.0
    chooser.ticket("2", FIRST).rank(there)
    assert router.states[0] == ReplicaState("a", num_queued=1, num_open=1, max_open=3, num_new_tokens=3)
    assert router.states[1].measured_s == 5.0  # it has told nothing new
    there[1] = ReplicaCandidate("b", 3, {**STATS, "reported_s": 78.0})
    chooser.ticket("3", FIRST).rank(there)
    assert router.states[1].measured_s == 6.0


def test_full_replicas_are_left_out_and_a_stream_counts_where_it_went() -> None:
    router = Seeing()
    chooser = ReplicaChooser(router, clock=lambda: 0.0)
    there = [ReplicaCandidate("a", 1, {}), ReplicaCandidate("b", 1, {})]
    ticket = chooser.ticket("1", FIRST)
    assert ticket.rank(there) == ["a", "b"]
    ticket.record_opened("b")
    assert chooser.ticket("2", FIRST).rank(there) == ["a"]
    assert chooser.ticket("3", FIRST).rank(there) == []
    chooser.record_ended("1")
    assert chooser.ticket("3", FIRST).rank(there) == ["b"]
    chooser.record_computed("2", (1, 2, 3, 4), "a")
    assert router.computed == [((1, 2, 3, 4), "a")]


def test_a_stream_that_is_ranked_once_more_after_it_has_ended_counts_nowhere() -> None:
    """Ray's router has a thread of its own, and asks again until it hears that nobody waits."""
    chooser = ReplicaChooser(Fewest(), clock=lambda: 0.0)
    there = [ReplicaCandidate("a", 1, {})]
    ticket = chooser.ticket("1", FIRST)
    assert ticket.rank(there) == ["a"]
    chooser.record_ended("1")
    assert ticket.rank(there) == ["a"]
    ticket.record_opened("a")
    assert chooser.in_use() == set()
    assert chooser.ticket("2", FIRST).rank(there) == ["a"]


def test_a_replica_of_another_version_may_tell_less_or_more() -> None:
    router = Seeing()
    told = {"cache_hit_rate": 0.5, "num_wings": 2, "reported_s": 1.0}
    ReplicaChooser(router, clock=lambda: 0.0).ticket("1", FIRST).rank([ReplicaCandidate("a", 3, told)])
    assert router.states == [ReplicaState("a", max_open=3, cache_hit_rate=0.5, measured_s=0.0)]


async def test_stats_are_as_old_as_they_are_when_a_query_comes_and_not_as_new_as_the_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody asked anything for a while."""
    now_s = 10.0
    # Not of the module: once Ray has unpickled the class here, its functions have copies of the module's names.
    monkeypatch.setitem(StreamRouter.update_replicas.__globals__, "monotonic", lambda: now_s)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    router, seeing = router_of(StreamRouter), Seeing()
    chooser = ReplicaChooser(seeing, clock=lambda: now_s)
    there = [replica_of_ray("a", reported_s=77.0), replica_of_ray("b")]
    router.update_replicas(there)
    now_s = 12.0
    there[1].routing_stats = {"reported_s": 50.0}
    router.update_replicas(there)
    now_s = 15.0
    call = Open("1", Delta.of(FIRST, number=1, num_shared=0), SamplingParams(), "me", chooser.ticket("1", FIRST))
    assert await router.choose_replicas(there, call_of(call)) == [[there[0]], [there[1]]]
    assert [state.measured_s for state in seeing.states] == [10.0, 12.0]
    router.update_replicas(there[1:])
    router.update_replicas(there)  # one that was gone meanwhile has told anew
    assert router._reports == {"a": (77.0, 15.0), "b": (50.0, 12.0)}


async def test_a_router_that_fails_does_not_hold_up_queries(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Fewest):
        def rank(self, opening, replicas, now_s):  # type: ignore[no-untyped-def, override]
            raise ZeroDivisionError

    replica = replica_of_ray("a")
    ticket = ReplicaChooser(Failing(), clock=lambda: 0.0).ticket("1", FIRST)
    call = Open("1", Delta.of(FIRST, number=1, num_shared=0), SamplingParams(), "me", ticket)
    pending = call_of(call)
    assert await router_of(StreamRouter).choose_replicas([replica], pending) == [[replica]]
    assert pending.routing_context.should_backoff
    assert "goes to any replica" in caplog.text


async def test_no_query_fails_with_a_router_whose_callbacks_raise(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(Fewest):
        def fail(self, *args: object) -> Any:
            raise ZeroDivisionError

        routed = completed = prefilled = lost = fail

    chooser = ReplicaChooser(Deaf(), clock=lambda: 0.0)
    there = [ReplicaCandidate("a", 9, {}), ReplicaCandidate("b", 9, {})]
    assert chooser.ticket("1", FIRST).rank(there) == ["a", "b"]
    assert chooser.ticket("2", FIRST).rank(there) == ["b", "a"]  # the tracker knows of the first
    chooser.ticket("3", FIRST).record_opened("a")
    chooser.record_computed("1", (1,), "a")
    chooser.record_computed("1", (1,), "a", is_complete=False)
    chooser.record_dead("a")
    assert chooser.in_use() == {"a", "b"}
    assert caplog.text.count("the router failed to process") == 6


def test_a_stream_that_another_router_has_sent_counts_where_it_is() -> None:
    chooser = ReplicaChooser(Fewest(), clock=lambda: 0.0)
    chooser.ticket("1", FIRST).record_opened("a")
    assert chooser.in_use() == {"a"}
    assert chooser.ticket("2", FIRST).rank([ReplicaCandidate("a", 1, {}), ReplicaCandidate("b", 1, {})]) == ["b"]


def test_prompts_held_by_a_replica_that_is_gone_or_dead_are_forgotten() -> None:
    router = Seeing()
    chooser = ReplicaChooser(router, clock=lambda: 0.0)
    there = [ReplicaCandidate("a", 9, {}), ReplicaCandidate("b", 9, {})]
    chooser.ticket("1", FIRST).rank(there)
    chooser.record_dead("a")
    assert chooser.ticket("2", FIRST).rank(there) == ["b"]
    assert chooser.ticket("3", FIRST).rank(there[1:]) == ["b"]
    chooser.record_computed("1", (1,), "a")
    assert router.computed == []
    assert chooser.ticket("4", FIRST).rank([ReplicaCandidate("c", 9, {})]) == ["c"]
    assert set(router.gone) == {"a", "b"}


async def test_a_replica_reports_its_queued_tokens_and_refuses_without_room() -> None:
    hold = anyio.Event()
    replica = EngineReplica(lambda: ScriptedBackend(hold=hold), max_open=1, replica_id="a")
    await replica.start()
    call = Open("1", Delta.of(FIRST, number=1, num_shared=0), SamplingParams(), "me")
    async with aclosing(replica.generate(call)) as batches:
        assert await anext(batches) == (Opened("a"),)
        assert (replica.num_open, replica.num_queued_tokens) == (1, 3)
        async with aclosing(replica.generate(call)) as refused:
            assert [batch async for batch in refused] == [(Refused(),)]
        assert replica.report().queued_tokens == replica.stats()["queued_tokens"] == 3
        hold.set()
        assert await anext(batches) == (Prefilled(3),)
        assert replica.num_queued_tokens == 0
        longer = Prompt((1, 2, 9, 9, 9), 2, is_complete=True)
        assert replica.update("1", Delta.of(longer, number=2, num_shared=2))
        assert not replica.update("2", Delta.of(longer, number=2, num_shared=2))
        assert replica.num_queued_tokens == 3
        events = [event async for batch in batches for event in batch]
    assert "".join(event.text for event in events if isinstance(event, AnswerChunk)) == "An answer."
    assert (replica.num_open, replica.facts().model_name) == (0, "scripted")
    await replica.aclose()


async def test_the_speed_of_a_replica_counts_tokens_computed_while_prompts_waited() -> None:
    """Whoever waits for retrieval, and what lies in the cache, does not make it slow."""
    now_s = 0.0

    class Timed(ScriptedBackend):
        async def generate(self, prompts, params):  # type: ignore[no-untyped-def, override]
            nonlocal now_s
            async for prompt in prompts:
                now_s += 0.5
                yield Prefilled(len(prompt.token_ids))
            yield AnswerChunk("a", (1,))
            now_s += 5
            record = RequestRecord("1", "finished", True, 0, 0, 0, 0, 0, 0, 1_616, 2, 616, 0, 0, 1_000)
            yield AnswerChunk("b", (2,), "stop", record=record)

    replica = EngineReplica(Timed, max_open=9, replica_id="a", clock=lambda: now_s)
    call = Open("1", Delta.of(Prompt((1,) * 800, 0, is_complete=False), number=1, num_shared=0), SamplingParams(), "me")
    async with aclosing(replica.generate(call)) as batches:
        assert [await anext(batches), await anext(batches)] == [(Opened("a"),), (Prefilled(800),)]
        assert replica.report().tokens_per_s == 0
        now_s += 100
        replica.update("1", Delta.of(Prompt((1,) * 1_616, 800, is_complete=True), number=2, num_shared=800))
        async for _ in batches:
            pass
    assert replica.report().tokens_per_s == 616 + QUERY_TOKENS
    now_s += LASTS_S
    assert replica.report().tokens_per_s == 0


async def test_an_engine_s_error_is_the_last_thing_that_a_replica_says_of_a_stream() -> None:
    backend = ScriptedBackend(error=PromptTooLongError("no"))
    replica = EngineReplica(lambda: backend, max_open=1, replica_id="a")
    call = Open("1", Delta.of(replace(FIRST, is_complete=True), number=1, num_shared=0), SamplingParams(), "me")
    async with aclosing(replica.generate(call)) as batches:
        *_, last = [event async for batch in batches for event in batch]
    assert last == Failed("PromptTooLongError", "no")
    replica.check_health()


async def test_events_that_come_between_two_reads_are_taken_together() -> None:
    class Quick(ScriptedBackend):
        async def generate(self, prompts, params):  # type: ignore[no-untyped-def, override]
            for number in range(1, 4):
                yield Prefilled(number)
            yield AnswerChunk("a", (1,))
            yield AnswerChunk("b", (2,), "stop")

    replica = EngineReplica(Quick, max_open=1, replica_id="a")
    call = Open("1", Delta.of(FIRST, number=1, num_shared=0), SamplingParams(), "me")
    async with aclosing(replica.generate(call)) as batches:
        assert [batch async for batch in batches] == [
            (Opened("a"),),
            (Prefilled(3), AnswerChunk("a", (1,)), AnswerChunk("b", (2,), "stop")),
        ]


async def test_streams_of_a_caller_that_is_not_heard_of_any_more_are_ended() -> None:
    now_s = 0.0
    backend = ScriptedBackend(is_endless=True)
    replica = EngineReplica(lambda: backend, max_open=9, replica_id="a", clock=lambda: now_s)

    async def read(name: str, *, is_complete: bool) -> None:
        first = Delta.of(replace(FIRST, is_complete=is_complete), number=1, num_shared=0)
        async with aclosing(replica.generate(Open(f"{name} {is_complete}", first, SamplingParams(), name))) as batches:
            async for _ in batches:
                pass

    reading = {
        name: [asyncio.create_task(read(name, is_complete=is_complete)) for is_complete in (True, False)]
        for name in ("gone", "here")
    }
    await anyio.wait_all_tasks_blocked()
    assert replica.num_open == backend.num_requests == 4
    now_s = 9.0
    replica.record_heartbeat("here")
    replica.end_abandoned()
    now_s = 11.0
    replica.end_abandoned()
    await asyncio.gather(*reading["gone"])
    assert replica.num_open == backend.num_requests == 2
    now_s = 20.0
    replica.end_abandoned()
    await asyncio.gather(*reading["here"])
    assert replica.num_open == backend.num_requests == 0


def test_the_autoscaler_s_policy_reads_what_replicas_told_it() -> None:
    def context(told: dict[str, float]) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=None, deployment_name="engines", app_name="streamrag", current_num_replicas=2,
            target_num_replicas=2, running_replicas=[], total_num_requests=0, total_queued_requests=0,
            aggregated_metrics={QUEUED_TOKENS: told} if told else {}, raw_metrics={}, policy_state={},
            capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=9, last_scale_up_time=None,
            last_scale_down_time=None, current_time=None, config=None,
        )  # fmt: skip

    policy = QueuedTokensPolicy(target=100)
    assert policy(context({"a": 250, "b": 50})) == (3, {})
    assert policy(context({})) == (2, {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"number": 3, "max_number": 2}, "max_number=2 must be at least number=3"),
        ({"max_open": 0}, "max_open=0 must be greater than or equal to 1"),
    ],
)
def test_options_that_cannot_work_are_refused(values: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ReplicaOptions(**values)  # type: ignore[arg-type]


def test_the_resources_that_an_engine_needs_are_passed_to_ray() -> None:
    options = ReplicaOptions(num_cpus=4, num_gpus=1, resources={"rack_7": 1, "accelerator_type:H100": 0.001})
    assert options.actor_options == {
        "num_cpus": 4, "num_gpus": 1, "resources": {"rack_7": 1, "accelerator_type:H100": 0.001},
    }  # fmt: skip
    assert ReplicaOptions().actor_options == {"num_cpus": 1.0, "resources": {}}


def test_sources_and_the_service_take_no_cpus_that_engines_may_have_taken(tmp_path: Path) -> None:
    from streamrag.serve.config.factories import make_sources
    from streamrag.serve.config.layers import load
    from streamrag.serve.ray_app import application

    (tmp_path / "search.jsonl").touch()
    options = {
        "model.name": str(tmp_path),
        "source.trace": str(tmp_path / "search.jsonl"),
        "replicas.number": "2",
        "replicas.sources": "1",
    }

    def cpus(**more: str) -> list[float]:
        settings = load(None, {}, {**options, **more}).settings
        deployed = (
            make_sources(settings.source, settings.replicas),
            application(settings, make_engine=ScriptedBackend),
        )
        return [each._bound_deployment.ray_actor_options["num_cpus"] for each in deployed]

    assert cpus() == [0, 0]
    assert cpus(**{"replicas.front_num_cpus": "2"}) == [0, 2]


def test_the_autoscaler_looks_back_no_further_than_it_is_to_wait() -> None:
    from streamrag.backends.ray.deployment import engines

    def scaling(**options: float) -> tuple[float, ...]:
        deployed = engines(ScriptedBackend, ReplicaOptions(number=1, max_number=2, **options))._bound_deployment  # type: ignore[arg-type]
        told = deployed._deployment_config.autoscaling_config
        return told.upscale_delay_s, told.downscale_delay_s, told.metrics_interval_s, told.look_back_period_s

    assert scaling() == (10, 600, 10, 30)
    assert scaling(upscale_delay_s=60.0) == (60, 600, 10, 30)
    assert scaling(upscale_delay_s=1.0, downscale_delay_s=2.0) == (1, 2, 1, 3)
