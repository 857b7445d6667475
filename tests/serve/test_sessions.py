"""Sessions over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
from httpx_sse import ServerSentEvent, aconnect_sse

from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.serving import Serving, limits_of, serving


async def opened(served: Serving, **options: object) -> str:
    answer = await served.http.post("/v1/sessions", json=options)
    assert answer.status_code == 201, answer.text
    return f"/v1/sessions/{answer.json()['id']}"


async def events_of(served: Serving, url: str, last: str = "") -> AsyncIterator[ServerSentEvent]:
    headers = {"last-event-id": last} if last else {}
    async with aconnect_sse(served.http, "GET", f"{url}/events", headers=headers) as source:
        async for event in source.aiter_sse():
            yield event


async def test_data_are_appended_and_asked_about() -> None:
    async with serving(backend=ScriptedBackend(answer="Yes.")) as served:
        url = await opened(served, system="Watch the prices.")
        taken = await served.http.post(f"{url}/data", json={"data": ["one", {"text": "two", "uri": "feed"}]})
        assert (taken.status_code, taken.json()["version"]) == (202, 2)
        answer = await served.http.post(f"{url}/ask", json={"question": "Rising?", "at_least": 2})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["text"], answer.json()["version"]) == ("Yes.", 2)
        prompt = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
        assert prompt.index("Watch the prices.") < prompt.index("one\ntwo\n") < prompt.index("Rising?")
        state = (await served.http.get(url)).json()
        assert (state["version"], state["num_appended"], state["num_dropped"]) == (2, 2, 0)
        assert served.watcher.ended == [("sessions", "answered")]
        assert (await served.http.delete(url)).status_code == 204
        assert (await served.http.get(url)).status_code == 404
        assert served.backend.num_requests == 0


async def test_a_request_of_data_is_taken_whole_or_refused() -> None:
    async with serving() as served:
        url = await opened(served)
        taken = await served.http.post(f"{url}/data", json={"data": [f"line {i}" for i in range(4096)]})
        assert (taken.status_code, taken.json()) == (202, {"version": 4096, "num_dropped": 0})
        more = await served.http.post(f"{url}/data", json={"data": [f"line {i}" for i in range(4097)]})
        assert more.status_code == 400
        assert (await served.http.get(url)).json()["num_appended"] == 4096


async def test_a_client_is_told_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sessions.drops.TOGETHER_S", 0.01)
    hold = anyio.Event()
    async with serving(backend=ScriptedBackend(hold=hold)) as served:  # it takes nothing in
        url = await opened(served)
        for _ in range(2):
            await served.http.post(f"{url}/data", json={"data": [f"line {i}" for i in range(4096)]})
        events = events_of(served, url)
        assert (await anext(events)).event == "session"
        told = []
        async with asyncio.timeout(120):
            while not told or told[-1]["num_dropped"] < 4096:
                event = await anext(events)
                assert event.event == "data_dropped"
                told.append(json.loads(event.data))
        assert sum(each["num_chunks"] for each in told) == 4096
        assert (told[0]["from_version"], told[-1]["to_version"]) == (1, 4096)
        assert len(told) < 10
        again = events_of(served, url, last=event.id)
        await anext(again)
        await served.http.post(f"{url}/data", json={"data": ["one more"]})
        more = await anext(again)
        assert int(more.id) == int(event.id) + 1, "numbered and resumed as the others are"
        assert json.loads(more.data) == {"num_chunks": 1, "from_version": 4097, "to_version": 4097, "num_dropped": 4097}
        hold.set()
        await events.aclose()
        await again.aclose()


async def test_data_too_large_to_wait_at_once_are_refused_as_a_whole() -> None:
    async with serving(limits=Limits(max_body_bytes=10_000_000)) as served:
        url = await opened(served)
        more = await served.http.post(f"{url}/data", json={"data": ["x" * 999_999] * 5})
        assert more.status_code == 400
        assert "in parts" in more.json()["error"]["message"]
        assert (await served.http.get(url)).json()["num_appended"] == 0


async def test_another_system_text_takes_the_place_of_the_first() -> None:
    async with serving(keys={"a": "alice", "b": "bob"}) as served:
        url = await opened(served, system="Old.")
        await served.http.post(f"{url}/data", json={"data": ["one"]})
        async with httpx.AsyncClient(base_url=served.url, headers={"authorization": "Bearer b"}) as bob:
            assert (await bob.put(f"{url}/system", json={"system": "Bob's."})).status_code == 404
        frozen = await served.http.put(f"{url}/system", json={"system": "New."})
        assert (frozen.status_code, frozen.json()) == (202, {"version": 2})
        answer = await served.http.post(f"{url}/ask", json={"question": "Rising?", "at_least": 2})
        assert answer.json()["version"] == 2
        prompt = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
        assert prompt.startswith("New.")
        assert "Old." not in prompt
        for body in (
            {"system": "x" * 100_001},
            {"system": 3},
            {},
            {"system": "x" * 90_000},
        ):  # no room for the last
            refused = await served.http.put(f"{url}/system", json=body)
            assert refused.status_code == 400, refused.text
        assert (await served.http.get(url)).json()["num_appended"] == 2


async def test_answers_may_be_restricted() -> None:
    async with serving(backend=ScriptedBackend(answer="no")) as served:
        url = await opened(served)
        for stream in (False, True):
            question = {"question": "Any?", "answers": ["nowhere", "yes"], "stream": stream}
            answer = await served.http.post(f"{url}/ask", json=question)
            assert '"text":"nowhere"' in answer.text.replace(" ", "")
        answer = await served.http.post(f"{url}/ask", json={"question": "Any?", "answers": ["no", "nowhere"]})
        assert (answer.status_code, "same token" in answer.text) == (400, True)
        assert (await served.http.post(f"{url}/ask", json={"question": "Any?"})).json()["text"] == "no"


async def test_an_answer_is_streamed() -> None:
    async with serving(backend=ScriptedBackend(answer="Yes.")) as served:
        url = await opened(served)
        async with aconnect_sse(served.http, "POST", f"{url}/ask", json={"question": "Q?", "stream": True}) as source:
            events = [event async for event in source.aiter_sse()]
    assert [event.event for event in events] == ["tokens_generated"] * 4 + ["answered"]
    assert "".join(json.loads(event.data)["text"] for event in events[:-1]) == "Yes."
    assert json.loads(events[-1].data)["answer"]["version"] == 0


async def test_a_watched_answer_is_pushed_when_it_changes() -> None:
    async with serving(backend=ScriptedBackend(answer="no")) as served:
        url = await opened(served)
        watch = {"question": "Any?", "answers": ["yes", "no"]}
        assert (await served.http.put(f"{url}/watches/alarm", json=watch)).status_code == 201
        events = events_of(served, url)
        assert (await anext(events)).event == "session"
        ready = await anext(events)
        assert ready.event == "flash_ready"
        assert json.loads(ready.data) | {"took_s": 0} == {
            "name": "alarm",
            "question": "Any?",
            "answer": "no",
            "version": 0,
            "took_s": 0,
            "gap": None,
        }
        served.backend._answer = "yes"
        await served.http.post(f"{url}/data", json={"data": ["95"]})
        seen = [await anext(events), await anext(events)]
        assert sorted(event.event for event in seen) == ["data_updated", "flash_ready"]
        await events.aclose()
        again = events_of(served, url, last=ready.id)  # it goes on behind what was seen
        assert (await anext(again)).event == "session"
        assert [(await anext(again)).id for _ in seen] == [event.id for event in seen]
        assert (await served.http.delete(f"{url}/watches/alarm")).status_code == 204
        assert (await served.http.get(url)).json()["watches"] == {}
        await again.aclose()


async def test_a_watch_that_cannot_work_is_told_of() -> None:
    async with serving() as served:
        url = await opened(served)
        await served.http.put(f"{url}/watches/bad", json={"question": "Any?", "answers": ["yes", "yesterday"]})
        events = events_of(served, url)
        await anext(events)
        failed = await anext(events)
        assert failed.event == "flash_failed"
        assert "same token" in json.loads(failed.data)["error"]["message"]
        await events.aclose()


async def test_a_client_that_leaves_an_answer_frees_it_and_the_session_goes_on() -> None:
    async with serving(backend=ScriptedBackend(answer="Yes.", is_endless=True)) as served:
        url = await opened(served)
        asking = asyncio.create_task(served.http.post(f"{url}/ask", json={"question": "Rising?"}))
        await served.watcher.has_begun.wait()
        asking.cancel()
        await served.watcher.has_ended.wait()
        assert served.watcher.ended == [("sessions", "left")]
        assert (await served.http.post(f"{url}/data", json={"data": ["x"]})).json()["version"] == 1


async def test_sessions_are_bounded_and_belong_to_their_client() -> None:
    limits = limits_of(max_sessions=5, max_watches=1)  # a client may have a quarter of them, rounded up
    async with serving(keys={"a": "alice", "b": "bob", "c": "carol"}, limits=limits) as served:
        url = await opened(served)
        await opened(served)
        refused = await served.http.post("/v1/sessions", json={})
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        async with httpx.AsyncClient(base_url=served.url, headers={"authorization": "Bearer b"}) as bob:
            for method, path in (("GET", url), ("DELETE", url), ("GET", f"{url}/events")):
                assert (await bob.request(method, path)).status_code == 404
            assert (await bob.post("/v1/sessions", json={})).status_code == 201
            assert (await bob.post("/v1/sessions", json={})).status_code == 201
        async with httpx.AsyncClient(base_url=served.url, headers={"authorization": "Bearer c"}) as carol:
            assert (await carol.post("/v1/sessions", json={})).status_code == 201
            refused = await carol.post("/v1/sessions", json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "sessions")
        assert (await served.http.put(f"{url}/watches/one", json={"question": "x"})).status_code == 201
        assert (await served.http.put(f"{url}/watches/two", json={"question": "x"})).status_code == 429
        assert (await served.http.put(f"{url}/watches/one", json={"question": "y"})).status_code == 201


async def test_an_unused_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.serve.session_store.store.SWEEP_S", 0.01)
    async with serving(limits=Limits(session_idle_s=0.05)) as served:
        url = await opened(served)
        while (await served.http.get(url)).status_code != 404:  # noqa: ASYNC110 - nobody says when
            await asyncio.sleep(0.2)  # longer than the session may be idle: each look uses it
        while served.backend.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/sessions", {"window_tokens": 0}, 400),
        ("POST", "/v1/sessions", {"window_tokens": 10**12}, 400),
        ("POST", "/v1/sessions", {"slide_share": 2}, 400),
        ("POST", "{url}/data", {"data": []}, 400),
        ("POST", "{url}/data", {"data": [3]}, 400),
        ("POST", "{url}/ask", {"question": ""}, 400),
        ("POST", "/v1/sessions", {"windowtokens": 100}, 400),
        ("POST", "{url}/ask", {"question": "x", "stop": "."}, 400),
        ("PUT", "{url}/watches/a", {"question": "x", "every": 3}, 400),
        ("POST", "{url}/ask", {"question": "x", "at_least": 7}, 400),
        ("POST", "{url}/ask", {"question": "x", "at_least": 7, "stream": True}, 400),
        ("POST", "{url}/ask", {"question": "x" * 999_999}, 400),
        ("PUT", "{url}/watches/a", {"question": " "}, 400),
        ("PUT", "{url}/watches/a", {"question": "x", "max_tokens": 0}, 400),
        ("DELETE", "{url}/watches/a", None, 404),
        ("GET", "/v1/sessions/nobody", None, 404),
    ],
)
async def test_a_session_request_that_cannot_work_is_refused(method: str, path: str, body: object, status: int) -> None:
    async with serving() as served:
        url = await opened(served)
        answer = await served.http.request(method, path.format(url=url), json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
        assert (await served.http.get(url)).status_code == 200


async def test_sessions_end_with_the_service() -> None:
    async with serving() as served:
        url = await opened(served)
        events = events_of(served, url)
        await anext(events)
        await served.service.aclose()
        assert [event async for event in events] == []
        assert served.backend.num_requests == 0
        assert (await served.http.post("/v1/sessions", json={})).status_code == 503


class Clock:
    """Stands in for the module `time`; counts who looks at it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_looks = 0

    def monotonic(self) -> float:
        self.num_looks += 1
        return self.now_s


async def test_a_reader_that_leaves_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("streamrag.serve.session_store.store.SWEEP_S", 0.01)
    monkeypatch.setattr("streamrag.serve.session_store.store.time", clock)
    monkeypatch.setattr("streamrag.serve.session_store.served_session.time", clock)
    async with serving(limits=Limits(session_idle_s=10)) as served:
        url = await opened(served)
        events = events_of(served, url)
        await anext(events)
        clock.now_s = 100.0
        await events.aclose()
        num_looks = clock.num_looks
        async with asyncio.timeout(120):
            while clock.num_looks < num_looks + 20:  # noqa: ASYNC110 - nobody says when
                await asyncio.sleep(0.01)
        assert (await served.http.get(url)).status_code == 200


async def test_an_id_of_another_sessions_event_goes_on_from_the_first() -> None:
    async with serving() as served:
        url = await opened(served)
        await served.http.post(f"{url}/data", json={"data": ["one"]})
        async with asyncio.timeout(120):
            names = [(await anext(events)).event for events in [events_of(served, url, "999")] for _ in range(2)]
        assert names == ["session", "data_updated"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_question_to_a_session_closed_meanwhile_is_told_so(stream: bool) -> None:
    async with serving(backend=ScriptedBackend(answer="yes", is_endless=True)) as served:
        url = await opened(served)
        asks = asyncio.create_task(served.http.post(f"{url}/ask", json={"question": "x", "stream": stream}))
        await served.watcher.has_begun.wait()
        assert (await served.http.delete(url)).status_code == 204
        answer = await asks
        assert "session_not_found" in answer.text
        assert stream or answer.status_code == 404
        assert served.backend.num_requests == 0


async def test_the_data_in_the_window_can_be_read() -> None:
    async with serving() as served:
        url = await opened(served)
        await served.http.post(f"{url}/data", json={"data": ["one", "two", "three"]})
        await served.http.post(f"{url}/ask", json={"question": "There?", "at_least": 3})
        answer = await served.http.get(f"{url}/data", params={"behind": 1})
        assert answer.json() == {"data": [{"version": 2, "text": "two"}, {"version": 3, "text": "three"}]}
        assert len((await served.http.get(f"{url}/data")).json()["data"]) == 3
        assert (await served.http.get(f"{url}/data", params={"behind": "x"})).status_code == 400


async def test_a_client_may_choose_the_decisive_margin_of_an_answer() -> None:
    async with serving(backend=ScriptedBackend(answer="no")) as served:
        url = await opened(served)
        for gap, status in ((0, 200), (5.5, 200), (-1, 400), ("x", 400)):
            question = {"question": "Any?", "answers": ["yes", "no"], "decisive_margin": gap}
            assert (await served.http.post(f"{url}/ask", json=question)).status_code == status
            assert (await served.http.put(f"{url}/watches/a", json=question)).status_code == (
                201 if status == 200 else 400
            )
