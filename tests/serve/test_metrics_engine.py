"""Metrics of a real engine: vLLM's own stand beside ours, and ours agree with the engine's record."""

from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamrag import Append, Chunk, Update
from streamrag.backends.vllm import VllmBackend
from streamrag.serve.observe.live import Live
from streamrag.serve.observe.metrics import Metrics
from streamrag.telemetry import PrefillProgressed
from streamrag.testing import make_tiny_llama
from tests.serve.serving import serving
from tests.serve.test_metrics import scrape

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
LONG = Chunk("Paris is the capital of France, and has been that for long. " * 20, "https://geo.example/france")
OTHER = Chunk("Rome is the capital of Italy. " * 10, "https://geo.example/italy")


async def test_vllms_metrics_stand_beside_ours_and_ours_agree_with_the_record(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model", max_model_len=8192)
    backend = VllmBackend(model, dtype="float32", kv_cache_bytes=1 << 26, collect_stats=True)
    waits = anyio.Event()
    steps = [Append(LONG), waits, Update((OTHER, LONG))]
    async with (
        serving(steps, backend=backend, observers=[Metrics(), Live()]) as served,
        anyio.create_task_group() as group,
    ):
        group.start_soon(lambda: served.http.post("/v1/chat/completions", json=BODY))
        with anyio.fail_after(60):
            while not any(isinstance(event, PrefillProgressed) for event in served.watcher.events):
                served.watcher.has_begun.clear()
                await served.watcher.has_begun.wait()
        (open_query,) = (await served.http.get("/v1/live")).json()["open"]
        prefilled = await scrape(served.http)
        waits.set()
        with anyio.fail_after(60):
            await served.watcher.has_ended.wait()
        seen = await scrape(served.http)
        text = (await served.http.get("/metrics")).text
    # While retrieval waits, its stream is idle and keeps the KV of what there was.
    assert open_query["phase"] == "retrieving"
    assert prefilled.of("kv_requests", state="idle") + prefilled.of("kv_requests", state="running") == 1
    assert prefilled.sum_of("kv_tokens") >= open_query["num_prefilled"] > 1_000 // 4
    assert prefilled["kv_capacity_tokens"] > 8192
    assert seen.sum_of("kv_tokens") == seen.sum_of("kv_requests") == 0
    (answer,) = served.watcher.answers
    assert answer is not None
    record = answer.record
    assert record is not None
    assert seen["computed_tokens_total"] == record.num_computed > 0
    assert seen["invalidated_tokens_total"] == record.num_invalidated > 0
    assert seen["recomputed_tokens_total"] == record.num_recomputed
    assert seen["from_cache_tokens_total"] == record.num_from_cache
    assert seen["query_prompt_tokens_sum"] == record.num_prompt_tokens == answer.num_prompt_tokens
    assert seen["query_output_tokens_sum"] == record.num_output_tokens == 8
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds"} <= names
    generated = next(f for f in text_string_to_metric_families(text) if f.name == "vllm:generation_tokens")
    assert sum(sample.value for sample in generated.samples) >= record.num_output_tokens
