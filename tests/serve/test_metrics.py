"""What `GET /metrics` says, compared with what happened."""

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import anyio
import httpx
import pytest
import websockets
from prometheus_client.parser import text_string_to_metric_families

from streamrag import Append, BackendError, Skipped, Update
from streamrag.records import KvHeld, KvUse, PreemptionRecord, RequestRecord, RestoreRecord
from streamrag.serve import Limits, RestartBudget
from streamrag.serve.observe.metrics import Metrics
from streamrag.serve.observe.observer import Phase
from streamrag.telemetry import ChunkArrived, ContextChanged
from streamrag.testing import ScriptedBackend
from tests.serve.raw import raw
from tests.serve.scripted_server import MortalBackend
from tests.serve.serving import CHUNKS, PARIS, ROME, Serving, serving

BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@dataclass(frozen=True)
class Scrape:
    """Samples by name and labels."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def __getitem__(self, name: str) -> float:
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        return self.samples.get((f"streamrag:{name}", frozenset(labels.items())), math.nan)

    def sum_of(self, name: str) -> float:
        return sum(value for (each, _), value in self.samples.items() if each == f"streamrag:{name}")


async def scrape(http: httpx.AsyncClient) -> Scrape:
    answer = await http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return Scrape({(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples})


async def ask(served: Serving, **more: Any) -> httpx.Response:
    return await served.http.post("/v1/chat/completions", json={**BODY, **more})


async def test_histograms_and_counters_are_those_of_the_answers() -> None:
    steps = [Append(PARIS), Skipped("https://gone.example", "404"), Append(ROME), Update((ROME, PARIS))]
    async with serving(steps, observers=[Metrics()]) as served:
        for stream in (False, True):
            assert (await ask(served, stream=stream)).status_code == 200
        seen = await scrape(served.http)
    answers = [answer for answer in served.watcher.answers if answer is not None]
    assert len(answers) == 2
    assert seen.of("queries_total", interface="chat", outcome="answered") == 2
    for name, timing in (
        ("queue_seconds", "queued_s"),
        ("first_chunk_seconds", "first_chunk_s"),
        ("retrieval_seconds", "retrieval_s"),
        ("ttft_seconds", "ttft_s"),
    ):
        assert seen.of(f"{name}_count", interface="chat") == 2
        expected = sum(getattr(answer.timings, timing) for answer in answers)
        assert math.isclose(seen.of(f"{name}_sum", interface="chat"), expected), name
    after = sum(answer.timings.ttft_s - answer.timings.retrieval_s for answer in answers)
    assert math.isclose(seen.of("ttft_after_retrieval_seconds_sum", interface="chat"), after)
    assert seen.of("query_seconds_sum", interface="chat") >= sum(answer.timings.total_s for answer in answers)
    changes = [event for event in served.watcher.events if isinstance(event, ContextChanged)]
    assert seen["query_prompts_sum"] == len(changes)
    assert seen["query_updates_sum"] == sum(event.num_invalidated > 0 for event in changes) > 0
    assert seen["query_chunks_sum"] == sum(isinstance(event, ChunkArrived) for event in served.watcher.events)
    assert seen["documents_skipped_total"] == 2
    assert seen["shared_tokens_total"] == sum(event.num_shared for event in changes)
    assert seen["replaced_tokens_total"] == sum(answer.num_invalidated for answer in answers)
    assert seen["query_prompt_tokens_sum"] == sum(answer.num_prompt_tokens for answer in answers)
    assert seen["query_output_tokens_sum"] == sum(len(answer.token_ids) for answer in answers)
    assert seen.sum_of("open_queries") == seen["queued_tokens"] == 0


async def test_an_open_query_stands_in_its_phase() -> None:
    retrieves = anyio.Event()
    async with serving([Append(PARIS), retrieves], observers=[Metrics()]) as served:
        asking = asyncio.create_task(ask(served))
        await served.watcher.has_begun.wait()
        admission, num_queued, num_before = served.service.admission, 1, 0
        while num_queued != num_before:  # its first chunk may come meanwhile
            num_before = admission.num_queued_tokens
            seen = await scrape(served.http)
            num_queued = admission.num_queued_tokens
        assert seen.of("open_queries", phase="retrieving") == 1
        assert seen["queued_tokens"] == num_queued > 0
        assert seen["ready"] == 1
        assert {each for (name, labels) in seen.samples if name == "streamrag:open_queries" for _, each in labels} == {
            *get_args(Phase)
        }
        retrieves.set()
        assert (await asking).status_code == 200


async def test_a_query_that_is_left_counts_once_and_so_does_one_that_fails() -> None:
    waits = anyio.Event()
    async with serving([Append(PARIS), waits], observers=[Metrics()]) as served:
        asking = asyncio.create_task(ask(served, stream=True))
        await served.watcher.has_begun.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await served.watcher.has_ended.wait()
        seen = await scrape(served.http)
        assert seen.of("queries_total", interface="chat", outcome="left") == seen.sum_of("queries_total") == 1
        assert seen.sum_of("open_queries") == 0
        assert math.isnan(seen.of("ttft_seconds_count", interface="chat"))
        assert seen.of("query_seconds_count", interface="chat") == 1
    backend = ScriptedBackend(error=BackendError("out of memory"))
    async with serving(backend=backend, observers=[Metrics()]) as served:
        assert (await ask(served)).status_code == 502
        seen = await scrape(served.http)
        assert seen.of("queries_total", interface="chat", outcome="backend_error") == seen.sum_of("queries_total") == 1
        assert seen.of("ttft_seconds_count", interface="chat") == 1  # it had one, whatever came then


async def test_refusals_count_by_reason_and_are_no_queries() -> None:
    waits = anyio.Event()
    limits = Limits(max_queries=1)
    async with serving([Append(PARIS), waits], limits=limits, observers=[Metrics()]) as served:
        asking = asyncio.create_task(ask(served))
        await served.watcher.has_begun.wait()
        for _ in range(3):
            assert (await ask(served)).status_code == 429
        waits.set()
        assert (await asking).status_code == 200
        seen = await scrape(served.http)
    assert seen.of("refusals_total", interface="chat", reason="queries") == seen.sum_of("refusals_total") == 3
    assert seen.sum_of("queries_total") == 1
    assert served.watcher.refused == [("anonymous", "chat", "queries")] * 3


async def test_failed_requests_count_by_route_and_status_in_every_layer() -> None:
    keys = {"key-of-ada": "ada"}
    broken = ScriptedBackend(error=ZeroDivisionError("broken"))
    async with serving(backend=broken, keys=keys, observers=[Metrics()]) as served:
        assert (await ask(served)).status_code == 500
        assert (await ask(served, n=2)).status_code == 400
        assert (await served.http.post("/v1/chat/completions", content=b"{")).status_code == 400
        assert (await served.http.get("/v1/chat/completions")).status_code == 405
        assert (await served.http.get("/v1/sessions/a-name-of-a-client")).status_code == 404
        assert (await served.http.get("/a-name-of-a-client")).status_code == 404
        assert (await served.http.post("/v1/ask", headers={"authorization": "none"})).status_code == 401
        assert (await served.http.get("/readyz")).status_code == 200
        async with raw(served.url) as connection:
            await connection.send(b"no HTTP\r\n\r\n")
            assert await connection.status() == 400
        address, auth = served.url.replace("http", "ws"), {"authorization": "Bearer key-of-ada"}
        async with websockets.connect(f"{address}/v1/ask/socket", additional_headers=auth, close_timeout=1) as socket:
            await socket.send('{"type": "open"}')
            assert json.loads(await socket.recv())["status"] == 400
        for path, headers in (("/v1/ask/socket", {}), ("/no-socket", auth)):
            with pytest.raises(websockets.InvalidStatus):
                await websockets.connect(f"{address}{path}", additional_headers=headers)
        seen = await scrape(served.http)
    errors = {labels: num for (name, labels), num in seen.samples.items() if name == "streamrag:request_errors_total"}
    assert {(dict(each)["route"], dict(each)["status"]): num for each, num in errors.items()} == {
        ("/v1/chat/completions", "500"): 1,
        ("/v1/chat/completions", "400"): 2,
        ("/v1/chat/completions", "405"): 1,
        ("/v1/sessions/{id}", "404"): 1,
        ("other", "404"): 1,
        ("/v1/ask", "401"): 1,
        ("other", "400"): 1,
        ("/v1/ask/socket", "400"): 1,
        ("/v1/ask/socket", "401"): 1,
        ("other", "403"): 1,
    }


async def test_clients_are_named_if_they_are_configured_and_metrics_want_a_key_then() -> None:
    keys = {"key-of-ada": "ada", "key-of-bob": "bob"}
    async with serving(keys=keys, observers=[Metrics(clients=["ada"])]) as served:
        for key in keys:
            headers = {"authorization": f"Bearer {key}", "x-request-id": "evil"}
            assert (await served.http.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 200
        seen = await scrape(served.http)
        assert seen.of("queries_total", interface="chat", outcome="answered", client="ada") == 1
        assert seen.of("queries_total", interface="chat", outcome="answered", client="other") == 1
        assert (await served.http.get("/metrics", headers={"authorization": ""})).status_code == 401


def record() -> RequestRecord:
    return RequestRecord(
        "r", "finished", True, 0.0, 0.0, 0.1, 0.2, 0.3, 0.4,
        num_prompt_tokens=100, num_output_tokens=5, num_computed=130, num_recomputed=20, num_invalidated=10,
        num_from_cache=7, num_loaded=3, num_written_through=2,
        preemptions=(PreemptionRecord(0.1, "swap", 40, num_tokens_saved=30), PreemptionRecord(0.1, "recompute", 20)),
        restores=(RestoreRecord(0.2, "swap", 30, 0.2, 0.1, 0.1),),
    )  # fmt: skip


@dataclass
class RecordingBackend(ScriptedBackend):
    """Ends its answers with a record, and tells of its memory."""

    kv_use: KvUse | None = None

    def __post_init__(self) -> None:
        ScriptedBackend.__init__(self)

    async def generate(self, prompts: Any, params: Any) -> Any:
        async for event in super().generate(prompts, params):
            if getattr(event, "finish_reason", None):
                event = type(event)(event.text, event.token_ids, event.finish_reason, record())
            yield event


async def test_the_engines_record_is_counted() -> None:
    async with serving(CHUNKS, backend=RecordingBackend(), observers=[Metrics()]) as served:
        assert (await ask(served)).status_code == 200
        seen = await scrape(served.http)
    expected = {
        "computed": 130, "recomputed": 20, "invalidated": 10, "from_cache": 7, "loaded": 3, "written_through": 2,
    }  # fmt: skip
    assert {name: seen[f"{name}_tokens_total"] for name in expected} == expected
    assert seen.of("preemptions_total", fate="swap") == seen.of("preemptions_total", fate="recompute") == 1
    assert seen.of("preempted_tokens_total", fate="swap") == 40
    assert seen["saved_tokens_total"] == 30
    assert seen.of("restores_total", choice="swap") == 1
    assert math.isnan(seen["kv_capacity_tokens"]), "nothing is said of what nobody knows"


async def test_the_engines_memory_is_shown_if_it_tells() -> None:
    use = KvUse(KvHeld(1, 100), KvHeld(2, 20), KvHeld(3, 300), 1_000, 50, 5_000)
    async with serving(CHUNKS, backend=RecordingBackend(kv_use=use), observers=[Metrics()]) as served:
        seen = await scrape(served.http)
    for state, held in use.by_state.items():
        assert seen.of("kv_tokens", state=state) == held.num_tokens
        assert seen.of("kv_requests", state=state) == held.num_requests
    assert seen["kv_capacity_tokens"] == 1_000
    assert (seen["host_kv_tokens"], seen["host_kv_capacity_tokens"]) == (50, 5_000)


PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


async def test_prometheus_gets_the_names_that_are_documented_and_other_codes_metrics_too() -> None:
    async with serving(observers=[Metrics()]) as served:
        await ask(served)
        answer = await served.http.get("/metrics", headers={"accept": PROMETHEUS_ACCEPTS})
        samples = {sample.name for family in text_string_to_metric_families(answer.text) for sample in family.samples}
        assert {"streamrag:queries_total", "streamrag:ttft_seconds_bucket", "process_open_fds"} <= samples
        assert not any(name.startswith("streamrag_") for name in samples)
        assert "_created" not in answer.text
    async with serving(observers=[Metrics(with_default_registry=False)]) as served:
        answer = await served.http.get("/metrics")
        assert all("streamrag:" in line for line in answer.text.splitlines())
    async with serving() as served:
        assert (await served.http.get("/metrics")).status_code == 404, "off unless it is switched on"


async def test_restarts_of_the_engine_are_counted() -> None:
    backend = MortalBackend(answer="It is Paris.")
    async with serving(backend=backend, observers=[Metrics()], restarts=RestartBudget()) as served:
        backend.died.set()
        async with asyncio.timeout(120):
            while not served.service.num_restarts:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0)
        assert [(await scrape(served.http))["engine_restarts_total"] for _ in range(2)] == [1, 1]


@dataclass
class Failing:
    """An observer that cannot do anything."""

    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("query_", "request_")):
            raise AttributeError(name)
        self.calls.append(name)
        raise ZeroDivisionError(name)


async def test_an_observer_that_fails_hurts_no_query_and_no_other_observer(caplog: Any) -> None:
    failing, limits = Failing(), Limits(max_requests_per_minute=2)
    async with serving(limits=limits, observers=[failing, Metrics()]) as served:
        assert [(await ask(served)).status_code for _ in range(3)] == [200, 200, 429]
        seen = await scrape(served.http)
    assert seen.of("queries_total", interface="chat", outcome="answered") == 2
    assert seen.of("refusals_total", interface="chat", reason="client_rate") == 1
    assert set(failing.calls) == {"query_started", "query_event", "query_ended", "query_refused", "request_failed"}
    told = [line.message for line in caplog.records if "failed; this is logged once" in line.message]
    assert len(told) == 5
