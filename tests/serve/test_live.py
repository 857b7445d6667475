"""The live view of a service, and `streamrag top`, which shows it."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

import anyio
import httpx
import pytest

from streamrag import Append
from streamrag.cli.output import Output
from streamrag.cli.program import run
from streamrag.cli.top import NoAnswerError, look, render, watch
from streamrag.records import KvHeld, KvUse
from streamrag.serve import Limits
from streamrag.serve.observe.live import NUM_ENDED, Live, Minute, percentiles
from streamrag.serve.observe.logs import FIELDS, QueryLog
from streamrag.serve.observe.metrics import Metrics
from streamrag.testing import ScriptedBackend
from tests.serve.serving import CHUNKS, PARIS, Serving, serving
from tests.serve.test_metrics import RecordingBackend

SECRET = "Where is the\nSapphire treasure? \x1b[31m"
BODY = {"messages": [{"role": "user", "content": SECRET}]}


async def snapshot(served: Serving) -> dict[str, Any]:
    answer = await served.http.get("/v1/live")
    assert answer.status_code == 200, answer.text
    values: dict[str, Any] = answer.json()
    return values


async def test_the_uptime_of_a_service_does_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(observers=[Live()]) as served:
        monkeypatch.setattr("time.time", lambda: 0.0)
        assert (await snapshot(served))["uptime_s"] >= 0


async def test_an_open_query_is_shown_in_each_phase_and_then_among_the_ended() -> None:
    retrieves = anyio.Event()
    backend = ScriptedBackend(answer="It is.", is_endless=True)
    async with serving([Append(PARIS), retrieves], backend=backend, observers=[Live()]) as served:
        asking = asyncio.create_task(
            served.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "mine"})
        )
        await served.watcher.has_begun.wait()
        (query,) = (await snapshot(served))["open"]
        assert (query["id"], query["interface"], query["client"]) == ("mine", "chat", "anonymous")
        assert query["phase"] == "retrieving"
        retrieves.set()
        while query["phase"] != "answering":
            query = (await snapshot(served))["open"][0]
        assert query["num_chunks"] == 1
        assert query["num_prefilled"] == query["num_prompt_tokens"] == len(backend.prompts[0][-1].token_ids)
        asking.cancel()
        await asyncio.wait([asking])
        await served.watcher.has_ended.wait()
        values = await snapshot(served)
    assert (values["open"], values["num_open"]) == ([], 0)
    (ended,) = values["ended"]
    assert (ended["id"], ended["outcome"]) == ("mine", "left")
    assert values["minute"] == values["total"]
    assert values["total"] == {
        "started": 1,
        "ended": 1,
        "answered": 0,
        "refused": 0,
        "output_tokens": 6,
        "uncounted": 0,
    }
    assert "text" not in ended


async def test_times_rates_and_refusals_are_those_of_the_queries() -> None:
    waits = anyio.Event()
    async with serving([Append(PARIS), waits], limits=Limits(max_queries=1), observers=[Live()]) as served:
        asking = asyncio.create_task(served.http.post("/v1/chat/completions", json=BODY))
        await served.watcher.has_begun.wait()
        assert (await served.http.post("/v1/chat/completions", json=BODY)).status_code == 429
        waits.set()
        await asking
        values = await snapshot(served)
    (answer,) = served.watcher.answers
    assert answer is not None
    assert values["ttft_s"] == dict.fromkeys(("p50", "p90", "p99"), answer.timings.ttft_s)
    assert values["refused"] == {"queries": 1}
    assert values["total"]["answered"] == 1
    assert values["total"]["output_tokens"] == len(answer.token_ids)


async def test_the_live_view_needs_a_key_if_there_are_keys_and_is_off_by_default() -> None:
    async with serving(keys={"key": "ada"}, observers=[Live(with_text=True)]) as served:
        await served.http.post("/v1/chat/completions", json=BODY)
        assert (await snapshot(served))["ended"][0]["text"] == SECRET
        assert (await served.http.get("/v1/live", headers={"authorization": ""})).status_code == 401
    async with serving() as served:
        assert (await served.http.get("/v1/live")).status_code == 404, "off unless it is switched on"


async def test_the_live_view_may_be_for_operators_only(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"key": "ada", "other": "bob"}
    async with serving(keys=keys, observers=[Live(clients=["ada"])]) as served:
        assert (await snapshot(served))["open"] == []
        refused = await served.http.get("/v1/live", headers={"authorization": "Bearer other"})
        assert await top(served, "--once", "--key", "other") == 1
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_operator")
    assert "operators only" in capsys.readouterr().err


async def test_the_live_view_keeps_few_ended_queries() -> None:
    async with serving(observers=[Live()], limits=Limits(max_requests_per_minute=1000)) as served:
        for _ in range(NUM_ENDED + 2):
            await served.http.post("/v1/chat/completions", json=BODY)
        values = await snapshot(served)
    assert len(values["ended"]) == NUM_ENDED
    assert values["total"]["ended"] == NUM_ENDED + 2


def test_a_minute_forgets() -> None:
    now = 0.0
    minute = Minute(lambda: now)
    for second in range(200):
        now = float(second)
        minute.add("tokens", 2)
    assert minute.count("tokens") == 120
    now += 59
    assert minute.count("tokens") == 2
    now += 10
    assert minute.count("tokens") == 0


def test_percentiles_are_of_values_that_there_are() -> None:
    assert percentiles([]) == {}
    assert percentiles(range(100)) == {"p50": 50, "p90": 90, "p99": 99}


# ------------------------------------------------------------------------------------------------------ streamrag top


async def top(served: Serving, *options: str) -> int:
    return await asyncio.to_thread(run, ["top", "--url", served.url, *options])


async def test_top_once_prints_a_snapshot(capsys: pytest.CaptureFixture[str]) -> None:
    use = KvUse(KvHeld(1, 4_100), KvHeld(2, 220), KvHeld(3, 13_300), 65_536, 1_150, 393_216)
    backend = RecordingBackend(kv_use=use)
    async with serving(CHUNKS, backend=backend, keys={"key": "ada"}, observers=[Live(with_text=True)]) as served:
        await served.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "mine"})
        assert await top(served, "--once", "--key", "key") == 0
        shown = capsys.readouterr().out
        assert await top(served, "--once", "--json", "--key", "key") == 0
        values = json.loads(capsys.readouterr().out)
        assert await top(served, "--once", "--key", "wrong") == 1
        assert "requires an API key" in capsys.readouterr().err
    assert "scripted  ready" in shown
    assert "1 ended, 1 answered, 0 refused" in shown
    assert "KV: running 4,100, waiting 220, idle 13,300 of 65,536 tokens" in shown
    assert "host memory: 1,150 of 393,216 tokens" in shown
    assert "\x1b" not in shown
    assert values["ended"][0]["id"] == "mine"


async def test_a_service_that_is_absent_or_has_no_live_view_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    assert run(["top", "--once", "--url", url]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert run(["top", "--once", "--url", "ftp://x"]) == 1
    assert run(["top", "--json"]) == 1
    async with serving() as served:
        assert await top(served, "--once") == 1
        assert "has no live view" in capsys.readouterr().err


class Ends(Exception):
    """Ends a watch, as a person's Ctrl-C does."""


async def test_a_service_that_goes_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[httpx.Response | Exception] = []
    num_looks = 0

    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers[min(num_looks, len(answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == len(answers):
            raise Ends

    async with serving(observers=[Live()]) as served:
        values = (await served.http.get("/v1/live")).content
    gone = httpx.ConnectError("Connection refused")
    answers += [gone, httpx.Response(200, content=values), gone, httpx.Response(502), httpx.Response(200, text="hello")]
    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(handle)) as client:
        with pytest.raises(Ends):
            watch(client, Output(width=80), 1.0, sleep=sleep)
    # Off a terminal, rich prints the last view only.
    shown = capsys.readouterr().out
    assert "does not answer" in shown
    assert "the figures below are old" in shown
    assert "scripted  ready" in shown


@pytest.mark.parametrize("body", ["[]", "{}", "no json", '"open"'])
def test_a_response_that_is_no_live_view_is_an_error(body: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    with httpx.Client(base_url="http://x", transport=transport) as client:
        with pytest.raises(NoAnswerError):
            look(client)


def query(number: int, **more: Any) -> Mapping[str, Any]:
    return {
        "id": f"request-{number}", "interface": "chat", "client": "a-client-with-a-long-name", "phase": "prefilling",
        "age_s": 12.5, "ttft_s": None, "num_chunks": 3, "num_prompt_tokens": 12_345, "num_prefilled": 6_000,
        "num_output_tokens": 0, "text": SECRET, **more,
    }  # fmt: skip


@pytest.mark.parametrize("width", [40, 72, 100, 200])
async def test_the_live_view_fits_terminals_of_all_widths(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(observers=[Live()]) as served:
        values = await snapshot(served)
    ended = [query(number, outcome="answered") for number in range(20)]
    values |= {"open": [query(number) for number in range(100)], "num_open": 700, "ended": ended}
    Output(width=width).print(render(values, width=width, height=40))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 44
    num_shown = sum("prefilling" in line for line in lines)
    assert num_shown > 10
    assert f"and {700 - num_shown} more" in lines
    assert ("Sapphire" in "".join(lines)) == (width >= 110)
    assert sum("49%" in line for line in lines) > num_shown or width < 60


HOSTILE = "\x1b]0;x\x07\x9b2J\r\n05:00 answered\u2028\u202ecod\u2066\u200b[red]" + "y" * 300


@pytest.mark.parametrize("width", [60, 200])
async def test_hostile_text_is_neither_obeyed_nor_makes_another_line(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(observers=[Live()]) as served:
        values = await snapshot(served)
    plain = {**values, "open": [query(1)], "num_open": 1, "ended": [query(2, outcome="answered")]}
    hostile = dict.fromkeys(("id", "client", "interface", "phase", "outcome", "text"), HOSTILE)
    strange = {
        **plain,
        "model": HOSTILE,
        "refused": {HOSTILE: 1},
        "open": [query(1, **hostile)],
        "ended": [hostile | query(2, **hostile)],
    }
    Output(width=width).print(render(plain, width=width))
    num_lines = len(capsys.readouterr().out.splitlines())
    Output(width=width).print(render(strange, width=width))
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\r\u2028\u202e\u2066\u200b") & set(shown)
    assert not any(line.startswith("05:00") for line in shown.splitlines())
    assert len(shown.splitlines()) - num_lines <= 2 * (len(HOSTILE) // width + 1), "only what is in the head is folded"


async def test_logs_metrics_and_the_live_view_say_how_a_query_was_prefilled(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics(with_default_registry=False)
    caplog.set_level("INFO", logger="streamrag.serve")
    async with serving(observers=[Live(), metrics, QueryLog()]) as served:
        for overlap in (False, True, "auto", None):
            asked = {"question": "Why?"} | ({} if overlap is None else {"overlap": overlap})
            assert (await served.http.post("/v1/ask", json=asked)).status_code == 200
        assert (await served.http.post("/v1/ask", json={"question": "Why?", "overlap": "maybe"})).status_code == 400
        values = await snapshot(served)
    ended = values["ended"][::-1]
    assert [query["overlap"] for query in ended] == ["none", *["immediate"] * 3]
    assert [query["overlap_reason"] for query in ended[:2]] == ["overlap=False", "overlap=True"]
    for way, num in (("none", 1), ("immediate", 3)):
        assert metrics.registry.get_sample_value("streamrag:overlaps_total", {"way": way}) == num
    *logged, refused = [getattr(record, FIELDS) for record in caplog.records if hasattr(record, FIELDS)]
    assert (refused["route"], refused["status"]) == ("/v1/ask", 400)
    assert [line["overlap"] for line in logged] == [query["overlap"] for query in ended]
    Output(width=140).print(render(values, width=140))
    assert f"overlap: immediate, {ended[-1]['overlap_reason']}" in capsys.readouterr().out.splitlines()
