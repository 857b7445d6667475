"""One real engine behind the service, for the whole module.

Its metrics stand beside ours, what was prepared piece by piece is answered as if it had come at once, a client that
leaves frees its KV, and a killed engine is replaced.
"""

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from streamrag import Append, Chunk, SamplingParams, Update, VllmBackend
from streamrag.backends.tools.parser import ToolCallParser
from streamrag.serve import Limits, RestartBudget
from streamrag.serve.observe.live import Live
from streamrag.serve.observe.metrics import Metrics
from streamrag.telemetry import PrefillProgressed
from streamrag.testing import Step
from tests.backends.tools.tool_model import call, make_tool_llama
from tests.serve import test_ask_socket as ask_socket
from tests.serve import test_session_socket as session_socket
from tests.serve.raw import FINISH, OPEN, append, raw
from tests.serve.responses.talking import client_of, talking
from tests.serve.serving import CHUNKS, Serving, Watcher, serving
from tests.serve.test_metrics import scrape
from tests.serve.test_sessions import opened

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

STEPS: dict[str, Sequence[Step]] = {}
"""What retrieval does for a question, other than for all others."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    model: Path = make_tool_llama(tmp_path_factory.mktemp("models") / "model", max_model_len=8192)
    backend = VllmBackend(
        model, engine_args={"dtype": "float32"}, max_num_batched_tokens=256, kv_cache_bytes=1 << 28, collect_stats=True
    )
    async with serving(
        lambda query: STEPS.get(query, CHUNKS),
        backend=backend,
        params=SamplingParams(max_tokens=24, ignore_eos=True),
        limits=Limits(max_tokens=1500, max_retrievals_ahead=5),
        observers=[Metrics(), Live()],
        restarts=RestartBudget(),
        overlap=True,  # "auto" would learn from one test what the next one may do
        tool_parser=ToolCallParser("hermes"),
    ) as served:
        yield served


@pytest.fixture(autouse=True)
def the_watcher_has_seen_nothing(served: Serving) -> None:
    vars(served.watcher).update(vars(Watcher()))


async def unfinished(served: Serving, num: int = 0) -> None:
    """Until the engine has so many requests: it hears of an abort between two of its steps."""
    while await served.backend.num_unfinished_requests() != num:
        pass


# ------------------------------------------------------------------------------------- questions still being asked


async def test_an_answer_is_the_same_whatever_was_typed_before_and_nothing_stays_in_the_engine(served: Serving) -> None:
    question = "What is the capital of Norway, and where is it?"
    other = "What is the capital of Spain, and where?"
    STEPS[question] = [Append(Chunk(f"Oslo lies in Norway, page {n}. " * 20, f"oslo/{n}")) for n in range(4)]
    async with ask_socket.talking(served) as talk:
        answers = []
        for id, texts in (("a", [question]), ("b", [other]), ("c", [other, question]), ("d", [])):
            await talk.send("open", id=id)
            for text in texts:
                await talk.send("partial", id=id, question=text, is_final=True)
                await talk.next("retrieval_started")
                await talk.next("prefill_progressed")
            await talk.send("commit", id=id, question=question)
            frames = await talk.frames("answered")
            at_s = next(frame["at_s"] for frame in frames if frame["type"] == "committed")
            assert (at_s is not None) == (texts[-1:] == [question])
            answers.append(frames[-1]["answer"]["text"])
        await talk.send("open", id="left")
        await talk.send("partial", id="left", question=other, is_final=True)
        await talk.next("prefill_progressed")
    whole = await ask_socket.sse(served, question=question)
    assert [*answers, whole[-1][1]["answer"]["text"]] == [answers[0]] * 5
    await unfinished(served)
    assert served.service.queries == []


# ------------------------------------------------------------------------------------------------------------ metrics

BOTH = "What are the capitals of France and Italy?"
LONG = Chunk("Paris is the capital of France, and has been that for long. " * 20, "https://geo.example/france")
OTHER = Chunk("Rome is the capital of Italy. " * 10, "https://geo.example/italy")


async def test_vllms_metrics_stand_beside_ours_and_ours_agree_with_the_record(served: Serving) -> None:
    waits = anyio.Event()
    STEPS[BOTH] = [Append(LONG), waits, Update((OTHER, LONG))]
    before = await scrape(served.http)
    body = {"messages": [{"role": "user", "content": BOTH}], "max_tokens": 8}
    asking = asyncio.create_task(served.http.post("/v1/chat/completions", json=body))
    while not any(isinstance(event, PrefillProgressed) and event.num_tokens > 250 for event in served.watcher.events):
        served.watcher.has_begun.clear()
        await served.watcher.has_begun.wait()
    (open_query,) = (await served.http.get("/v1/live")).json()["open"]
    prefilled = await scrape(served.http)
    waits.set()
    assert (await asking).status_code == 200
    await served.watcher.has_ended.wait()
    seen = await scrape(served.http)
    text = (await served.http.get("/metrics")).text

    def added(name: str) -> float:
        return seen[name] - (0 if math.isnan(before[name]) else before[name])

    # While retrieval waits, its stream is idle and keeps the KV of what there was.
    assert open_query["phase"] == "retrieving"
    assert prefilled.of("kv_requests", state="idle") + prefilled.of("kv_requests", state="running") == 1
    assert prefilled.sum_of("kv_tokens") >= open_query["num_prefilled"] > 250
    assert prefilled["kv_capacity_tokens"] > 8192
    assert seen.sum_of("kv_tokens") == seen.sum_of("kv_requests") == 0
    (answer,) = served.watcher.answers
    assert answer is not None
    record = answer.record
    assert record is not None
    assert added("computed_tokens_total") == record.num_computed > 0
    assert added("invalidated_tokens_total") == record.num_invalidated > 0
    assert added("recomputed_tokens_total") == record.num_recomputed
    assert added("from_cache_tokens_total") == record.num_from_cache
    assert added("query_prompt_tokens_sum") == record.num_prompt_tokens == answer.num_prompt_tokens
    assert added("query_output_tokens_sum") == record.num_output_tokens == 8
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds"} <= names
    generated = next(f for f in text_string_to_metric_families(text) if f.name == "vllm:generation_tokens")
    assert sum(sample.value for sample in generated.samples) >= record.num_output_tokens


# ---------------------------------------------------------------------------------------------------------- responses

TEXTS = [" ".join(f"Printer {number} has tray {row}." for row in range(60)) for number in range(4)]
QUESTION = "Which printer has tray 7?"


async def test_pieces_and_a_fork_are_answered_as_the_whole_is(served: Serving) -> None:
    first, second, wrong, third = TEXTS
    async with talking(served) as talk:
        one = await talk.prepare(first)
        two = await talk.prepare(second, one)
        await talk.prepare(wrong, two)
        await unfinished(served, 1)
        three = await talk.prepare(third, two)
        pieces = await talk.create(QUESTION, three)
    in_pieces = served.watcher.answers[-1]
    assert in_pieces is not None
    assert in_pieces.num_invalidated > 0
    assert await served.backend.reset_prefix_cache()
    items = [{"role": "user", "content": text} for text in (first, second, third, QUESTION)]
    async with client_of(served) as client:
        whole = await client.responses.create(model="scripted", input=items, tool_choice="none")
    at_once = served.watcher.answers[-1]
    assert at_once is not None
    assert in_pieces.token_ids == at_once.token_ids
    assert len(at_once.token_ids) == 24
    assert pieces.output_text == whole.output_text
    assert pieces.usage.input_tokens == whole.usage.input_tokens
    assert pieces.usage.input_tokens_details.cached_tokens > 0 == whole.usage.input_tokens_details.cached_tokens
    await unfinished(served)


async def test_kv_is_computed_while_the_client_goes_on(served: Serving) -> None:
    assert await served.backend.reset_prefix_cache()
    async with talking(served) as talk:
        first = await talk.prepare(TEXTS[0])
        while not any(isinstance(event, PrefillProgressed) for event in served.watcher.events):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await talk.create(QUESTION, first)
    answer = served.watcher.answers[-1]
    assert answer is not None
    assert answer.record is not None
    assert answer.record.first_kv_s is not None
    assert answer.record.first_kv_s - answer.submitted_s < answer.timings.retrieval_s


async def test_a_client_that_leaves_frees_the_engine(served: Serving) -> None:
    async with talking(served) as talk:
        first = await talk.prepare(TEXTS[0])
        await unfinished(served, 1)
    await unfinished(served)
    async with talking(served) as talk:
        await talk.connection.response.create(
            input=QUESTION, previous_response_id=first, max_output_tokens=1000, stream_id="a"
        )
        while (await talk.connection.recv()).type != "response.output_text.delta":
            pass
    await unfinished(served)


# -------------------------------------------------------------------------------------------------------------- tools


async def test_a_call_comes_from_the_engine_and_its_result_goes_there(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are random, so a grammar of ours makes the call."""
    written = call("get_weather", city="Paris").replace("\n", "")
    extra = {"skip_special_tokens": False, "structured_outputs": {"choice": [written]}}
    weather = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    options: dict[str, Any] = {"model": "scripted", "tools": [{"type": "function", "function": weather}]}
    options["max_tokens"] = 200
    async with client_of(served) as client:
        with monkeypatch.context() as forced:
            forced.setattr(served.service.tool_parser, "sampling", lambda: extra)
            forced.setattr(served.service, "params", SamplingParams())  # a grammar ends with the end of the sequence
            whole = await client.chat.completions.create(messages=messages, **options)
            async with client.chat.completions.stream(messages=messages, **options) as stream:
                streamed = await stream.get_final_completion()
        for completion in (whole, streamed):
            (made,) = completion.choices[0].message.tool_calls
            assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", {"city": "Paris"})
            assert completion.choices[0].finish_reason == "tool_calls"
        messages += [streamed.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "It is blue."}]
        last = await client.chat.completions.create(messages=messages, **options)
    assert last.choices[0].message.content
    answer = served.watcher.answers[-1]
    assert answer is not None
    assert answer.record is not None
    assert answer.record.num_from_cache > 0  # the prompt begins like that of the call
    await unfinished(served)


# ---------------------------------------------------------------------------------------------- clients and an engine


async def test_leaving_in_decode_frees_kv_and_a_killed_engine_is_started_again(served: Serving) -> None:
    backend = served.backend
    asked = {**OPEN, "max_tokens": 1500}
    async with raw(served.url) as client:
        await client.post("/v1/streams")
        await client.line(asked, append("Paris is the capital of France."), FINISH)
        assert await client.status() == 200
        await client.until("tokens_generated")
        assert await backend.num_unfinished_requests() == 1
    left_s = time.monotonic()
    await unfinished(served)
    print(f"the engine was free after {(time.monotonic() - left_s) * 1000:.0f} ms")

    url = await opened(served, window_tokens=500)
    async with session_socket.talking(served, url) as talk:
        await talk.send("append", data=["Oslo is the capital of Norway."])
        await talk.next("data_updated")
        num_idle = await backend.num_unfinished_requests()
        for id in "ab":
            await talk.send("ask", id=id, question=f"Where is {id}?", at_least=1, max_tokens=1500)
            await talk.next("tokens_generated", id=id)
        assert await backend.num_unfinished_requests() == num_idle + 2
        await talk.send("cancel", id="a")
        await talk.next("cancelled")
        await unfinished(served, num_idle + 1)
    await unfinished(served, num_idle)
    assert (await served.http.delete(url)).status_code == 204
    await unfinished(served)

    async with raw(served.url) as decoding, raw(served.url) as waiting:
        for client, lines in ((decoding, [FINISH]), (waiting, [])):
            await client.post("/v1/streams")
            await client.line(asked, append("Rome is the capital of Italy."), *lines)
            assert await client.status() == 200
        await decoding.until("tokens_generated")
        await waiting.until("prefill_progressed")
        killed = backend.process_ids
        killed_s = time.monotonic()
        for process_id in killed:
            os.kill(process_id, signal.SIGKILL)
        for client in (decoding, waiting):
            assert (await client.until("error"))["error"]["code"] == "engine_dead"
        print(f"both were told after {(time.monotonic() - killed_s) * 1000:.0f} ms")
    while not served.service.is_ready or backend.process_ids == killed:  # noqa: ASYNC110 -- has no event
        await asyncio.sleep(0.1)
    async with raw(served.url) as client:
        await client.post("/v1/streams")
        await client.line({**OPEN, "max_tokens": 5}, append("Rome is the capital of Italy."), FINISH)
        assert await client.status() == 200
        served.watcher.has_ended.clear()
        await client.until("answered")
        await served.watcher.has_ended.wait()
    outcomes = ["left", "left", "left", "engine_dead", "engine_dead", "answered"]
    assert [outcome for _, outcome in served.watcher.ended] == outcomes
