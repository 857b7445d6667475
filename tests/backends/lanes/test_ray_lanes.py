"""Lanes in replicas, without Ray and without engines: who waits, what is computed again, what ends with an error."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import InProcess, after, growing
from lane_replicas import RECORD, Decode, Prefill

pytest.importorskip("ray")

from streamrag.backends.lanes import ray_backend, replica_engines
from streamrag.backends.lanes.kv_transfer import MAX_KV_AGE_S
from streamrag.backends.lanes.ray_backend import RayDisaggregatedBackend
from streamrag.backends.lanes.replica_engines import ENDED_AT, DecodeEngine, PrefillEngine, without_old_kv
from streamrag.backends.ray import backend as ray_module
from streamrag.backends.replicas.replica import ModelFacts
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.backends.vllm.client.lane_engine import MAX_READ_S, READ_BY_KEY
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, SamplingParams
from streamrag.errors import BackendError, ConfigurationError
from streamrag.serve.config.checks import check
from streamrag.serve.config.factories import make_engines, make_replica_lane, make_replicated
from streamrag.serve.config.layers import load
from streamrag.serve.ray_app import application
from streamrag.support.clock import seconds_since_boot

ANSWER = f"{os.getpid()} {os.getpid()}"


class Replicas(InProcess):
    async def facts(self) -> ModelFacts:
        return next(iter(self.replicas.values())).facts()


class FakeCluster:
    is_open = False

    async def start(self, progress: Any) -> Any:
        self.is_open = True
        return SimpleNamespace(app_name="app")

    async def aclose(self) -> None:
        self.is_open = False


class LanesInProcess:
    """A backend of lanes in replicas of this process."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, prefill: Mapping[str, Prefill], decode: Mapping[str, Decode]
    ) -> None:
        self.replicas = {"prefill": Replicas(prefill, max_open=2), "decode": Replicas(decode, max_open=2)}  # type: ignore[arg-type]
        self.cluster = FakeCluster()
        monkeypatch.setattr(ray_backend, "DeploymentHandle", lambda lane, app_name: lane)
        monkeypatch.setattr(ray_module, "RayReplicas", self.replicas.__getitem__)
        self.backend = RayDisaggregatedBackend(
            self.cluster,  # type: ignore[arg-type]
            make_tokenizer=CodePointTokenizer,
            router="round_robin",
            max_open=2,
            max_replays=2,
        )

    async def __aenter__(self) -> "LanesInProcess":
        await self.backend.start(lambda line: None)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.backend.aclose()
        assert not self.cluster.is_open

    async def ask(
        self, *texts: str, waits: tuple[asyncio.Event, ...] = (), seen: list[BackendEvent] | None = None
    ) -> str:
        text = ""
        async with aclosing(self.backend.generate(after(growing(*texts), *waits), SamplingParams())) as events:
            async for event in events:
                if seen is not None:
                    seen.append(event)
                text += event.text if isinstance(event, AnswerChunk) else ""
        return text


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_prompt_grows_in_a_prefill_replica_and_is_answered_in_a_decode_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode, second = Prefill(), Decode(), asyncio.Event()
    async with LanesInProcess(monkeypatch, {"p": prefill}, {"d": decode}) as lanes:
        assert lanes.backend.model.name == "prefill"
        transfers: list[Any] = []
        lanes.backend.on_transfer = transfers.append
        seen: list[BackendEvent] = []
        asking = asyncio.create_task(lanes.ask("Wh", "Why?", waits=(second,), seen=seen))
        await until(lambda: prefill.prompts)
        second.set()
        assert await asking == ANSWER
        assert prefill.prompts[0] == ("Wh", False)
        assert prefill.prompts[-1] == ("Why?", True)
        assert decode.prompts == ["Why?"]
        assert prefill.params == [SamplingParams()]
        assert isinstance(seen[0], Prefilled)
        assert seen[-1] == AnswerChunk(f" {os.getpid()}", (2,), "length", RECORD)
        assert [(each.num_tokens, each.num_blocks) for each in transfers] == [(4, 2)]
        lanes.backend.check_health()
    with pytest.raises(BackendError, match="not running"):
        await lanes.ask("Why?")


async def test_a_query_without_output_is_computed_again_when_a_replica_of_either_kind_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = {"p1": Prefill(), "p2": Prefill()}, {"d1": Decode(), "d2": Decode()}
    async with LanesInProcess(monkeypatch, *engines) as lanes:
        second = asyncio.Event()
        asking = asyncio.create_task(lanes.ask("ho", "hold", waits=(second,)))
        await until(lambda: engines[0]["p1"].prompts or engines[0]["p2"].prompts)
        lanes.replicas["prefill"].kill("p1" if engines[0]["p1"].prompts else "p2")
        second.set()
        await until(lambda: engines[1]["d1"].prompts or engines[1]["d2"].prompts)
        killed, left = ("d1", "d2") if engines[1]["d1"].prompts else ("d2", "d1")
        engines[1][left].goes_on.set()
        lanes.replicas["decode"].kill(killed)
        assert await asking == ANSWER
        assert engines[1][left].prompts == ["hold"]


async def test_an_answer_that_has_shown_tokens_ends_with_an_error_and_replays_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = {name: Decode() for name in ("d1", "d2", "d3", "d4")}
    async with LanesInProcess(monkeypatch, {"p": Prefill()}, decode) as lanes:
        events = lanes.backend.generate(after(growing("endless")), SamplingParams())
        while not isinstance(await anext(events), AnswerChunk):
            pass
        lanes.replicas["decode"].kill(next(name for name, engine in decode.items() if engine.prompts))
        with pytest.raises(BackendError, match="lost after 1 tokens of the answer were shown: ask again"):
            await anext(events)
        asking = asyncio.create_task(lanes.ask("hold"))
        for _ in range(3):
            await until(lambda: any("hold" in decode[name].prompts for name in lanes.replicas["decode"].replicas))
            name = next(name for name in lanes.replicas["decode"].replicas if "hold" in decode[name].prompts)
            lanes.replicas["decode"].kill(name)
        with pytest.raises(
            BackendError, match=r"3 lanes were lost, one after another: decode-0 was lost: .* was killed"
        ):
            await asking


async def test_a_prefill_replica_that_dies_while_a_decode_replica_answers_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = Decode()
    async with LanesInProcess(monkeypatch, {"p": Prefill()}, {"d": decode}) as lanes:
        asking = asyncio.create_task(lanes.ask("hold"))
        await until(lambda: decode.prompts)
        lanes.replicas["prefill"].kill("p")
        decode.goes_on.set()
        assert await asking == ANSWER


async def test_queries_wait_with_open_prompts_for_decode_replicas_and_more_of_these_have_more_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = {name: Prefill() for name in "abcde"}, {"d1": Decode(), "d2": Decode()}

    def num_complete() -> int:
        return sum(is_complete for engine in prefill.values() for _, is_complete in engine.prompts)

    async with LanesInProcess(monkeypatch, prefill, decode) as lanes:
        assert await lanes.ask("Why?") == ANSWER  # by now it is known that there are two decode replicas
        asking = [asyncio.create_task(lanes.ask("hold")) for number in range(6)]
        await until(lambda: sum(len(engine.prompts) for engine in decode.values()) == 5)
        await asyncio.sleep(0.05)
        assert num_complete() == 1 + 4
        assert sum(engine.prompts.count(("hold", False)) for engine in prefill.values()) >= 2
        for engine in decode.values():
            engine.goes_on.set()
        assert await asyncio.gather(*asking) == [ANSWER] * 6


async def test_a_decode_replica_gets_no_more_queries_than_its_engine_answers_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = Prefill(), Decode(max_num_seqs=1)
    async with LanesInProcess(monkeypatch, {"p": prefill}, {"d": decode}) as lanes:
        asking = [asyncio.create_task(lanes.ask("hold")) for number in range(2)]
        await until(lambda: decode.prompts and len(prefill.prompts) >= 2)
        await asyncio.sleep(0.1)
        assert [is_complete for _, is_complete in prefill.prompts].count(True) == 1
        decode.goes_on.set()
        assert await asyncio.gather(*asking) == [ANSWER] * 2


async def test_a_query_reserves_no_decode_replica_before_a_prefill_replica_has_opened_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LanesInProcess(monkeypatch, {"p": Prefill()}, {"d": Decode()}) as lanes:
        open_prompt = asyncio.Event()
        holding = [asyncio.create_task(lanes.ask("Wh", "Why?", waits=(open_prompt,))) for _ in range(2)]
        await asyncio.sleep(0.02)
        asking = [asyncio.create_task(lanes.ask("Why?")) for _ in range(4)]  # wait until a prefill replica has room
        await asyncio.sleep(0.02)
        open_prompt.set()
        async with asyncio.timeout(120):
            assert await asyncio.gather(*holding, *asking) == [ANSWER] * 6


async def test_queries_that_are_cancelled_leave_no_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LanesInProcess(monkeypatch, {"p": Prefill()}, {"d": Decode()}) as lanes:
        asking = [asyncio.create_task(lanes.ask(text)) for text in ("hold", "endless")]
        await until(lambda: lanes.replicas["decode"].replicas["d"].num_open == 2)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert await lanes.ask("Why?") == ANSWER
        assert [
            replicas.replicas[name].num_open for replicas, name in zip(lanes.replicas.values(), "pd", strict=True)
        ] == [0, 0]


async def test_lanes_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = LanesInProcess(monkeypatch, {"p": Prefill()}, {"d": Decode("bfloat16")})
    with pytest.raises(ConfigurationError, match="lanes differ in dtype: float32 in prefill-0, bfloat16 in decode-0"):
        await lanes.backend.start(lambda line: None)
    assert not lanes.cluster.is_open


async def test_parameters_are_checked_before_the_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, params, computed = PrefillEngine("model", lane="prefill"), SamplingParams(top_k=3), []

    def check(self: Any, params: SamplingParams) -> None:
        if params.top_k != 3:
            raise ConfigurationError("vLLM refuses these SamplingParams")

    async def compute(prompts: Any, streams: Any, params: SamplingParams, end: Any) -> AsyncIterator[BackendEvent]:
        computed.append(params)
        yield Prefilled(0)

    monkeypatch.setattr(PrefillEngine, "check_params", check)
    monkeypatch.setattr(PrefillEngine, "streams", None)
    monkeypatch.setattr(replica_engines, "stream_then_generate", compute)
    with pytest.raises(ConfigurationError, match="vLLM refuses"):
        await anext(engine.generate(after(growing("Why?")), SamplingParams()))
    assert not computed
    assert [event async for event in engine.generate(after(growing("Why?")), params)] == [Prefilled(0)]
    assert [each.max_tokens for each in computed] == [1]
    assert computed[0].extra == {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}


async def test_parameters_for_vllm_that_are_no_mapping_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LanesInProcess(monkeypatch, {"p": Prefill()}, {"d": Decode()}) as lanes:
        params = SamplingParams(extra={"extra_args": 5})
        with pytest.raises(ConfigurationError, match="extra_args=5 must be a mapping"):
            await anext(lanes.backend.generate(after(growing("Why?")), params))


@pytest.mark.parametrize(
    ("age_s", "is_read"),
    [(0.0, True), (MAX_KV_AGE_S - 1, True), (MAX_KV_AGE_S + 1, False), (-0.5, True), (-5.0, False)],
)
def test_kv_whose_lease_may_have_ended_is_not_read(
    caplog: pytest.LogCaptureFixture, age_s: float, is_read: bool
) -> None:
    given = {"kv_transfer_params": {"remote_port": 1, ENDED_AT: time.time() - age_s}, "theirs": 2}
    kept = without_old_kv(SamplingParams(top_k=3, extra={"extra_args": given})).extra["extra_args"]
    if is_read:
        read_by_s = kept["kv_transfer_params"].pop(READ_BY_KEY)
        assert read_by_s == pytest.approx(seconds_since_boot() + MAX_READ_S - age_s, abs=0.5)
    assert kept == {"theirs": 2, **({"kv_transfer_params": {"remote_port": 1}} if is_read else {})}
    expected = ["the clock of a prefill lane's node is 5.0 s ahead: its KV is not read"] if age_s == -5.0 else []
    assert [record.message for record in caplog.records] == expected
    assert without_old_kv(SamplingParams(top_k=3)).extra == {}


def test_a_service_has_lanes_on_ray_by_one_word_and_both_kinds_scale_apart() -> None:
    options = {
        "model.name": "org/model",
        "engine.policy": "fcfs",
        "replicas.number": "2",
        "replicas.max_number": "8",
        "replicas.decode": "1",
        "replicas.max_decode": "3",
        "replicas.max_open": "32",
    }
    settings = load(None, {}, options).settings
    parts = settings.model, settings.engine, settings.replicas
    assert isinstance(make_replicated(*parts), RayDisaggregatedBackend)
    prefill = make_engines(*parts)._bound_deployment
    decode = prefill.init_args[2]._bound_deployment
    scaling = [each._deployment_config.autoscaling_config for each in (prefill, decode)]
    assert [(each.min_replicas, each.initial_replicas, each.max_replicas) for each in scaling] == [(2, 2, 8), (1, 1, 3)]
    assert scaling[1].target_ongoing_requests == 16
    assert (prefill.name, decode.name) == ("prefill", "decode")
    engines = prefill.init_args[0](), decode.init_args[0]()
    assert [type(engine) for engine in engines] == [PrefillEngine, DecodeEngine]
    assert [engine.lane for engine in engines] == ["prefill", "decode"]
    assert engines[0]._engine_args["additional_config"]["streamrag"]["policy"] == "fcfs"
    fixed = make_engines(*parts[:2], settings.replicas.model_copy(update={"max_number": None}))
    assert fixed._bound_deployment.num_replicas == 2


def test_a_number_of_decode_lanes_above_their_maximum_is_one_problem() -> None:
    options = {"model.name": "org/model", "replicas.number": "1", "replicas.decode": "3", "replicas.max_decode": "2"}
    loaded = load(None, {}, options)
    assert [str(each) for each in check(loaded) if "max_" in str(each)] == [
        "option --replicas.max_decode: max_decode=2 must be at least decode=3"
    ]
    with pytest.raises(ConfigurationError, match="max_decode=2 must be at least decode=3"):
        make_engines(loaded.settings.model, loaded.settings.engine, loaded.settings.replicas)


def test_an_application_has_either_decode_lanes_or_an_engine_of_the_caller() -> None:
    settings = load(None, {}, {"model.name": "org/model", "replicas.number": "1", "replicas.decode": "1"}).settings
    with pytest.raises(ConfigurationError, match=r"replicas\.decode=1 and make_engine exclude each other"):
        application(settings, make_engine=Prefill)


def test_an_engine_that_cannot_be_a_lane_is_refused() -> None:
    settings = load(None, {}, {"model.name": "org/model", "engine.answer_ahead": "true"}).settings
    with pytest.raises(ConfigurationError, match="lane='prefill' and answer_ahead=True exclude each other"):
        make_replica_lane(settings.model, settings.engine, "prefill")
