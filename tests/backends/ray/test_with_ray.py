"""Replicas of Ray Serve itself, with engines that answer at once."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from in_process import Fewest, after, growing
from lane_replicas import Decode, Prefill
from obedient_engine import Engine

pytest.importorskip("ray")

from ray import serve

from streamrag import Chunk, Pipeline
from streamrag.backends.lanes.ray_backend import RayDisaggregatedBackend
from streamrag.backends.ray import RayBackend
from streamrag.backends.ray.cluster import Cluster
from streamrag.backends.ray.deployment import engines, lane_engines
from streamrag.backends.ray.options import ReplicaOptions
from streamrag.backends.ray.source import RaySource
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import AnswerChunk, Append, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, SourceError
from streamrag.serve.config.factories import make_pooled
from streamrag.serve.config.layers import load
from streamrag.serve.server import listen
from streamrag.telemetry import DraftChanged, DraftUse
from streamrag.testing import ScriptedSource
from streamrag.trace import Trace, TracedAppend, TracedChunk, TracedQuery, write_trace

pytestmark = pytest.mark.asyncio(loop_scope="module")


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, and the same as an IPv6 address."""


def processes() -> set[int]:
    """That were started with this test's mark in their environment, but this one."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:  # it has just ended, or is another user's
                continue
            if f"STREAMRAG_TEST_RAY={os.getpid()}".encode() in environment:
                found.add(int(folder.name))
    return found


def listening(process_ids: set[int]) -> set[str]:
    """Addresses that these processes listen on, as the kernel writes them."""
    address_of = {}
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
        address_of |= {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    found = set()
    for process_id in process_ids:
        for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found.add(address_of.get(os.readlink(descriptor)))
    return {address for address in found if address is not None}


@pytest.fixture(scope="module")
def port() -> int:
    with listen("127.0.0.1", 0) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def environment(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("STREAMRAG_TEST_FOLDER", str(tmp_path_factory.mktemp("ray")))
        patch.setenv("RAY_raylet_start_wait_time_s", "120")
        patch.setenv("RAY_worker_niceness", "0")  # else other tests on a busy machine starve the replicas
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("STREAMRAG_TEST_RAY", str(os.getpid()))
        start = serve.start  # the application is asked over HTTP
        at = {"host": "127.0.0.1", "port": port}
        patch.setattr(serve, "start", lambda **_: start(proxy_location="HeadOnly", http_options=at))
        yield


OPTIONS = ReplicaOptions(number=2, num_cpus=0.5, health_s=0.5, max_open=8, drain_s=20)
CLUSTER = Cluster(partial(engines, Engine, OPTIONS), num_cpus=4)


@pytest.fixture(scope="module")
async def backend(environment: None) -> AsyncIterator[RayBackend]:
    backend = RayBackend(CLUSTER, make_tokenizer=CodePointTokenizer, router=Fewest())
    await backend.start(lambda line: None)
    yield backend
    await backend.aclose()
    assert processes() == set()


async def ask(backend: RayBackend, *texts: str, waits: tuple[asyncio.Event, ...] = ()) -> str:
    text = ""
    async with aclosing(backend.generate(after(growing(*texts), *waits), SamplingParams())) as events:
        async for event in events:
            text += event.text if isinstance(event, AnswerChunk) else ""
    return text


async def who(backend: RayBackend) -> dict[int, int]:
    """By process id of each replica: queries that are open in its engine."""
    found: dict[int, int] = {}
    while len(found) < 2:
        told = await asyncio.gather(*[ask(backend, "how many") for _ in range(6)])
        found = {int(pid): int(num) for num, pid in map(str.split, told)}
    return found


async def until_nothing_is_open(backend: RayBackend) -> None:
    """Whoever leaves a query does not wait until its replica has heard of it."""
    while sum((await who(backend)).values()):
        pass


async def test_answers_come_from_both_replicas_and_prompts_reach_the_one_that_has_the_stream(
    backend: RayBackend,
) -> None:
    assert backend.model.name.startswith("engine ")
    assert backend.model.max_model_len == 100_000
    assert await asyncio.gather(*[ask(backend, "W", "Why", "Why?") for _ in range(12)]) == ["An answer."] * 12
    assert len(await who(backend)) == 2


async def test_an_answer_is_drafted_in_a_replica_and_the_stream_of_its_query_is_aborted_there(
    backend: RayBackend,
) -> None:
    is_drafted = anyio.Event()
    source = ScriptedSource([Append(Chunk("It is damp.", "printers.md")), is_drafted])
    async with Pipeline(source, backend, owns_backend=False, overlap=True, answer_ahead=True) as pipeline:
        stream = pipeline.events("Why?")
        async for event in stream:
            if isinstance(event, DraftChanged) and event.text == "An answer.":
                is_drafted.set()
    assert stream.result.text == "An answer."
    assert stream.result.draft == DraftUse(*[len("An answer.")] * 3)
    await until_nothing_is_open(backend)


async def test_ray_listens_on_loopback(backend: RayBackend) -> None:
    replicas = set(await who(backend))
    assert listening(replicas), "they have a server each"
    assert replicas <= processes()
    assert listening(processes()) <= LOOPBACK


@pytest.mark.parametrize("question", ["hold", "endless", "slower"])
async def test_cancelled_queries_leave_nothing_in_the_replicas(backend: RayBackend, question: str) -> None:
    asking = [asyncio.create_task(ask(backend, question)) for _ in range(4)]
    while sum((await who(backend)).values()) < 4:
        pass
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    await until_nothing_is_open(backend)


async def test_a_query_whose_prompts_are_still_to_come_is_replayed_when_its_replica_is_killed(
    backend: RayBackend,
) -> None:
    last = asyncio.Event()
    asking = [asyncio.create_task(ask(backend, "Wh", "Why?", waits=(last,))) for _ in range(6)]
    killed = min(await who(backend))
    os.kill(killed, signal.SIGKILL)
    replayed = backend.counts.num_replayed
    last.set()
    assert await asyncio.gather(*asking) == ["An answer."] * 6
    assert backend.counts.num_replayed > replayed
    assert backend.counts.num_lost == 0
    assert killed not in await who(backend)


async def test_a_query_that_has_shown_tokens_ends_with_an_error_when_its_replica_is_killed(backend: RayBackend) -> None:
    shown: list[str] = []

    async def ask_one() -> None:
        async with aclosing(backend.generate(after(growing("endless")), SamplingParams())) as events:
            async for event in events:
                shown.append(event.text if isinstance(event, AnswerChunk) else "")  # noqa: PERF401

    asking = [asyncio.create_task(ask_one()) for _ in range(2)]
    while "".join(shown).count("r") < 2:
        replicas = await who(backend)
    os.kill(min(replicas), signal.SIGKILL)
    done, still = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(BackendError, match="lost after 9 tokens of the answer were shown: ask again"):
        raise done.pop().exception() or AssertionError
    for task in still:
        task.cancel()
    await asyncio.wait(still)


@pytest.mark.long
async def test_a_replica_whose_engine_has_died_is_started_again(backend: RayBackend) -> None:
    before = await who(backend)
    assert await ask(backend, "die once") == "An answer."
    while len(set(before) & set(await who(backend))) > 1:
        pass


async def test_a_rolling_restart_under_load_fails_no_query(backend: RayBackend) -> None:
    before = set(await who(backend))
    is_done = asyncio.Event()
    num_answered = 0

    async def keep_asking(number: int) -> None:
        nonlocal num_answered
        while not is_done.is_set():
            assert await ask(backend, "W", "Why", "slow" if number % 2 else "Why?") == "An answer."
            num_answered += 1

    asking = [asyncio.create_task(keep_asking(number)) for number in range(6)]
    await CLUSTER._in_thread(CLUSTER._deploy)
    is_done.set()
    await asyncio.gather(*asking)
    assert num_answered > 6
    assert not before & set(await who(backend))


async def start(cluster: Cluster, **options: Any) -> RayBackend:
    """Engines of another application, on the same cluster."""
    other = RayBackend(cluster, make_tokenizer=CodePointTokenizer, router=Fewest(), **options)
    await other.start(lambda line: None)
    return other


@pytest.mark.long
async def test_a_start_that_no_node_has_room_for_ends_with_what_is_missing(backend: RayBackend) -> None:
    large = partial(engines, Engine, replace(OPTIONS, number=3, num_cpus=2.0))
    with pytest.raises(ConfigurationError, match="fit on this machine: 3 engines need 6 CPU, and it has 4 CPU"):
        await start(Cluster(large, app_name="large"))
    with pytest.raises(ConfigurationError, match=r"no node of the cluster had room within 5 s for . of 'engines'"):
        await start(Cluster(large, address="auto", app_name="large", place_s=5.0))
    assert "large" not in serve.status().applications


@pytest.mark.long
async def test_engines_come_and_go_with_the_tokens_that_wait(backend: RayBackend) -> None:
    options = replace(
        OPTIONS, number=1, max_number=2, num_cpus=0.1, queued_tokens=20, upscale_delay_s=1.0, downscale_delay_s=1.0
    )

    async def until(num: int) -> None:
        while serve.status().applications["scaling"].deployments["engines"].replica_states != {"RUNNING": num}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # Serve tells nobody

    other = await start(Cluster(partial(engines, Engine, options), app_name="scaling"))
    await until(1)
    holding = [asyncio.create_task(ask(other, f"hold {'x' * 30}")) for _ in range(2)]
    await until(2)
    for task in holding:
        task.cancel()
    await asyncio.wait(holding)
    await until(1)
    await other.aclose()


def process_of(app: str, deployment: str) -> int:
    there = serve.context._get_global_client().get_serve_details()["applications"][app]["deployments"]
    return next(each["pid"] for each in there[deployment]["replicas"] if each["state"] == "RUNNING")


@pytest.mark.long
async def test_a_decode_lane_that_is_killed_is_replaced_beside_prefill_lanes_that_go_on(backend: RayBackend) -> None:
    options = replace(OPTIONS, number=1, num_cpus=0.1, queued_tokens=None)
    app = Cluster(partial(lane_engines, Prefill, Decode, options, options), app_name="lanes")
    other = RayDisaggregatedBackend(app, make_tokenizer=CodePointTokenizer, router="soonest")
    await other.start(lambda line: None)

    async def ask_lanes(*texts: str) -> list[int]:
        text = ""
        async with aclosing(other.generate(after(growing(*texts)), SamplingParams())) as events:
            async for event in events:
                text += event.text if isinstance(event, AnswerChunk) else ""
        return [int(process_id) for process_id in text.split()]

    assert other.model.name == "prefill"
    processes_of = [process_of("lanes", lane) for lane in ("prefill", "decode")]
    assert await ask_lanes("W", "Why?") == processes_of
    events = other.generate(after(growing("endless")), SamplingParams())
    while not isinstance(await anext(events), AnswerChunk):
        pass
    asking = asyncio.create_task(ask_lanes("ho", "hold once"))
    while not (Path(os.environ["STREAMRAG_TEST_FOLDER"]) / "held").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    os.kill(processes_of[1], signal.SIGKILL)
    with pytest.raises(BackendError, match="lost after 1 tokens of the answer were shown: ask again"):
        await anext(events)
    prefill, decode = await asking
    assert (prefill, decode) == (processes_of[0], process_of("lanes", "decode"))
    assert decode != processes_of[1]
    await other.aclose()


@pytest.mark.long
async def test_a_source_whose_replica_is_killed_while_it_retrieves_is_asked_anew(
    backend: RayBackend, tmp_path: Path
) -> None:
    pages = [
        TracedAppend(at_s, TracedChunk(f"{at_s}", 4, f"page {at_s}", f"{at_s}.md", title="P")) for at_s in (0.0, 4.0)
    ]
    write_trace(Trace((TracedQuery("1", 0.0, "Why?", tuple(pages), 4.0),)), tmp_path / "slow.jsonl")
    told = {"source.trace": str(tmp_path / "slow.jsonl"), "replicas.sources": "1", "model.name": "x"}
    settings = load(None, {}, told).settings
    source = make_pooled(settings.source, settings.replicas)
    assert isinstance(source, RaySource)
    await source.start(lambda line: None)
    assert source.name == "ReplaySource(slow.jsonl)"
    found: list[str] = []
    async with aclosing(source.stream("Why?")) as events:
        async for event in events:
            assert isinstance(event, Append)
            if not found:
                os.kill(process_of("streamrag-sources", "sources"), signal.SIGKILL)
            found.append(event.chunk.uri)
    assert found == ["0.0.md", "4.0.md"]
    with pytest.raises(SourceError, match="What"):
        await anext(source.stream("What?"))
    await source.aclose()


async def test_the_whole_service_as_an_application_with_a_pool_of_sources(
    backend: RayBackend, port: int, tiny_model: Path, tmp_path: Path
) -> None:
    from streamrag.serve.ray_app import application

    page = TracedAppend(0.0, TracedChunk("a", 4, "The printer jams.", "printer.md", title="Printers"))
    write_trace(Trace((TracedQuery("1", 0.0, "Why?", (page,), 0.0),)), tmp_path / "search.jsonl")
    options = {
        "model.name": str(tiny_model),
        "source.trace": str(tmp_path / "search.jsonl"),
        "replicas.number": "1",
        "replicas.num_cpus": "0.5",
        "replicas.sources": "1",
        "limits.drain_s": "300",  # what a replica of before has begun, it ends, however slow the machine is
    }
    app = application(load(None, {}, options).settings, make_engine=Engine)
    serve.run(app, name="service", route_prefix="/")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
        assert (await client.get("/readyz")).text == "ready\n"
        asked = {"messages": [{"role": "user", "content": "Why?"}]}
        answer = (await client.post("/v1/chat/completions", json=asked)).json()
        assert answer["choices"][0]["message"]["content"] == "An answer."
        assert "printer.md" in str(answer)
        assert listening(processes()) <= LOOPBACK  # also the service, and replicas of sources
        asked_else = {"messages": [{"role": "user", "content": "What?"}]}
        failed = (await client.post("/v1/chat/completions", json=asked_else)).json()
        assert "retrieval failed" in failed["error"]["message"]
        async with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 3
        before, statuses, is_done = process_of("service", "front"), [], asyncio.Event()

        async def keep_asking() -> None:
            while not is_done.is_set():
                statuses.append((await client.post("/v1/chat/completions", json=asked)).status_code)

        asking = asyncio.create_task(keep_asking())  # one at a time: replicas that start need the processor as well
        await asyncio.to_thread(serve.run, app, name="service", route_prefix="/")  # a rolling restart of all of it
        is_done.set()
        await asking
        assert set(statuses) == {200}
        assert process_of("service", "front") != before
    serve.delete("service")
