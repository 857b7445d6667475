"""The public benchmark on a server, on the simulator and on the real engine."""

import asyncio
from pathlib import Path

import pytest

from streamrag.backends.openai.http import Server as Connections
from streamrag.errors import ConfigurationError, ServerError
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedUpdate
from streamrag_bench.arms import QueryTiming
from streamrag_bench.public.engines import EngineUnderTest, run_public
from streamrag_bench.public.server import ServerClient, play_on_server
from streamrag_bench.public.workload import PublicLoad, make_trace
from tests.backends.openai.openai_server import REFUSE, Server, chunk, reply, stream

SMALL = PublicLoad("azure", "recorded-search", qps=50.0, num_queries=4, num_warm_up=1, num_output_tokens=3)


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields}]}


WARM = [stream(chunk("w"))] * 5
"""A request with the fields that all servers know, and one for each optional field."""


def queries(*num_tokens: int) -> list[TracedQuery]:
    """Queries with two lists each, of which the second replaces the first."""
    pools = [
        (TracedUpdate(0.0, (TracedChunk("old", 7),)), TracedUpdate(0.01, (TracedChunk(f"c{n}", n),)))
        for n in num_tokens
    ]
    return [TracedQuery(f"q{n}", 0.0, "", events, 0.02) for n, events in zip(num_tokens, pools, strict=True)]


async def play(
    server: Server, *num_tokens: int, api: str = "completions"
) -> tuple[dict[str, QueryTiming | str], ServerClient]:
    connections = Connections(f"{server.url}/v1", api_key="k", timeout_s=10, max_retries=0, retry_delay_s=0)
    try:
        client = ServerClient(connections, "tiny", api)  # type: ignore[arg-type]
        await client.warm_up()
        return await play_on_server(client, queries(*num_tokens), 3), client
    finally:
        await connections.aclose()


async def test_a_server_gets_one_request_after_retrieval_with_the_final_prompt() -> None:
    async with Server() as server:
        server.handlers = [*WARM, stream(chunk(""), chunk("a"), chunk("b", "length"), "[DONE]")]
        results, client = await play(server, 40)
        request = server.requests[-1]
    assert client.num_short is None
    assert request.path == "/v1/completions"
    assert request.headers["authorization"] == "Bearer k"
    assert len(request.body["prompt"]) == 40 + 32
    assert request.body == {
        "model": "tiny",
        "temperature": 0,
        "stream": True,
        "max_tokens": 3,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": request.body["cache_salt"],
        "stream_options": {"include_usage": True},
        "prompt": request.body["prompt"],
    }
    timing = results["q40"]
    assert isinstance(timing, QueryTiming)
    assert 0.02 <= timing.retrieval_end_s < timing.first_token_s <= timing.finished_s


async def test_failures_are_counted_and_do_not_stop_the_others() -> None:
    async with Server() as server:
        server.handlers = [*WARM, reply({"error": {"message": "full"}}, status=503)]
        results, _ = await play(server, 8)
        server.handlers = [*WARM, stream(chunk(""), "[DONE]")]
        empty, _ = await play(server, 8)
    assert "status 503: full" in str(results["q8"])
    assert "without any text" in str(empty["q8"])


async def test_special_tokens_alone_are_an_answer_and_short_answers_are_counted() -> None:
    usage = [{"choices": [], "usage": {"completion_tokens": num}} for num in (1, 2, 3)]
    special = chunk("", token_ids=[2])
    async with Server() as server:
        server.handlers = [*[stream(chunk("", "stop"))] * 5, stream(special, *usage[:2]), stream(special, usage[2])]
        results, client = await play(server, 8, 9)
        salts = {request.body.get("cache_salt") for request in server.requests}
        server.handlers = [*WARM, stream(special)]
        await play(server, 8)
    assert all(isinstance(timing, QueryTiming) for timing in results.values())
    assert client.num_short == 1
    assert server.requests[-1].body["cache_salt"] not in salts


async def test_a_server_is_asked_without_each_field_that_it_refuses_and_a_chat_gets_words() -> None:
    async with Server() as server:
        answer = stream(delta(role="assistant", content=""), delta(reasoning_content="a"), delta(content="b"), "[DONE]")
        server.handlers = [answer, REFUSE, answer, REFUSE, answer, answer]
        results, _ = await play(server, 40, api="chat")
    assert {"ignore_eos", "return_token_ids", "cache_salt", "stream_options"} & {*server.requests[-1].body} == {
        "return_token_ids",
        "stream_options",
    }
    (message,) = server.requests[-1].body["messages"]
    assert len(message["content"].split()) == 40 + 32
    assert isinstance(results["q40"], QueryTiming)


async def test_a_server_that_fails_at_once_is_an_error() -> None:
    async with Server() as server:
        server.handlers = [REFUSE]
        with pytest.raises(ServerError, match="unknown field"):
            await play(server, 8)


def test_a_run_on_a_server_writes_what_was_answered_without_those_that_warm_up() -> None:
    async def main() -> None:
        async with Server() as server:
            server.handlers = [*WARM, *[stream(chunk("a"), "[DONE]")] * 4]
            engine = EngineUnderTest("server", model="tiny", url=server.url)
            found = await asyncio.to_thread(run_public, engine, SMALL, (3,))
        assert [query.id for query in found.queries] == ["3-1", "3-2", "3-3"]
        assert found.num_failed == 0
        assert (found.engine, found.is_simulated, found.hardware) == ("server", False, "not stated")
        assert found.provenance["api"] == "completions"
        assert found.provenance["has_cache_salt"]
        assert "vllm" not in found.provenance
        assert found.num_short_answers is None

    asyncio.run(main())


def test_simulations_stream_and_wait_on_the_same_load() -> None:
    load = PublicLoad(num_queries=12, num_warm_up=2, num_output_tokens=4)
    found = {
        name: run_public(EngineUnderTest(name, profile="h200-llama8b-tp2"), load, (1, 2))  # type: ignore[arg-type]
        for name in ("vllm", "vllm-sessions", "streamrag")
    }
    for result in found.values():
        assert (result.kind, result.hardware, len(result.queries)) == ("simulated", "2 x NVIDIA H200 SXM 141 GB", 20)
        assert [q.retrieval_end_s for q in result.queries] == pytest.approx(
            [q.retrieval_end_s for q in found["vllm"].queries]
        )
        assert {query.seed for query in result.queries} == {1, 2}
        assert (result.provenance["max_num_batched_tokens"], result.provenance["max_num_seqs"]) == (2048, 256)
    medians = {name: result.percentiles("first_token_after_retrieval_s")["p50"] for name, result in found.items()}
    assert medians["streamrag"] < medians["vllm"]


def test_settings_that_do_not_go_together_are_refused() -> None:
    for values, problem in (
        ({"engine": "server", "model": "m"}, "alone has a URL"),
        ({"engine": "vllm", "model": "m", "url": "http://a"}, "alone has a URL"),
        ({"engine": "server", "model": "m", "url": "ftp://a"}, "is not an address"),
        ({"engine": "server", "model": "m", "url": "http://["}, "is not an address"),
        ({"engine": "server", "model": "m", "url": "http://me:secret@a"}, "without user or password"),
        ({"engine": "vllm", "model": "m", "url": "http://me:secret@a"}, "without user or password"),
        ({"engine": "server", "url": "http://a", "profile": "p", "model": "m"}, "either a model or"),
        ({"engine": "vllm"}, "either a model or"),
        ({"engine": "vllm", "model": "m", "hardware": "x" * 2_000}, "hardware"),
        ({"engine": "sglang", "model": "m"}, "engine"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            EngineUnderTest(**values)  # type: ignore[arg-type]
    engine = EngineUnderTest("vllm-sessions", profile="h200-llama8b-tp2")
    with pytest.raises(ConfigurationError, match="has updates"):
        run_public(engine, SMALL, (1,))
    with pytest.raises(ConfigurationError, match="must be different"):
        run_public(EngineUnderTest("vllm", profile="h200-llama8b-tp2"), SMALL, (1, 1))


@pytest.mark.long
@pytest.mark.engine
def test_the_real_engine_streams_the_load(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, which are all written when an engine starts
    load = PublicLoad("azure", "recorded-crawl", 20.0, 4, 1, 3, max_context_tokens=900)
    engine = EngineUnderTest("streamrag", model=str(tiny_model))
    result = run_public(engine, load, (1,))
    assert (result.kind, result.num_failed, len(result.queries)) == ("measured", 0, 3)
    trace: Trace = make_trace(load, 1)
    for query, traced in zip(result.queries, trace.queries[1:], strict=True):
        assert isinstance(traced.events[0], TracedAppend)
        assert query.retrieval_end_s == pytest.approx(traced.end_s, abs=0.5)
        assert query.first_token_s is not None
