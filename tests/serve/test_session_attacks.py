"""What a client might try to hurt the service, or others, with by means of its sessions."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import websockets

from streamrag.serve import Limits
from streamrag.serve.admission import Admission, Reservation
from streamrag.serve.failures import NotAdmittedError
from streamrag.sessions.concurrency import ConcurrencyEstimator
from streamrag.sessions.log.contents import LogContents, SessionHeader
from streamrag.sessions.log.file import LogFile
from streamrag.sessions.question_options import WatchOptions
from streamrag.telemetry import ContextChanged
from streamrag.testing import ScriptedBackend
from tests.serve.serving import Serving, limits_of, serving
from tests.serve.test_session_socket import Talk
from tests.serve.test_sessions import Clock, events_of, opened


async def until_open(served: Serving, num: int) -> None:
    async with asyncio.timeout(120):
        while served.backend.num_requests < num:  # noqa: ASYNC110 - nobody says when
            await asyncio.sleep(0)


async def test_watched_questions_take_half_of_their_client_s_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConcurrencyEstimator, "limit", 32)
    backend = ScriptedBackend(answer="yes", is_endless=True)
    limits = Limits(max_queries_per_client=8, max_requests_per_minute=10_000)
    async with serving(backend=backend, limits=limits) as served:
        urls = [await opened(served) for _ in range(2)]
        for url in urls:
            for number in range(10):
                watch = {"question": f"Any of {number}?"}
                assert (await served.http.put(f"{url}/watches/{number}", json=watch)).status_code == 201
        await until_open(served, 6)
        assert (served.backend.num_requests, served.service.admission.num_queries) == (2 + 4, 4), "two have data"
        asking = [asyncio.create_task(served.http.post(f"{url}/ask", json={"question": f"{i}?"})) for i in range(4)]
        await until_open(served, 10)
        refused = await served.http.post(f"{urls[0]}/ask", json={"question": "And?"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_queries")
        for url in urls:
            await served.http.delete(url)
        await asyncio.gather(*asking)
        assert served.service.admission.num_queries == 0


async def test_watched_questions_count_as_queries_of_their_client() -> None:
    limits = Limits(max_requests_per_minute=12)
    async with serving(backend=ScriptedBackend(answer="yes"), limits=limits) as served:
        served.service.admission._clock = lambda: 0.0
        url = await opened(served)
        for number in range(8):
            await served.http.put(f"{url}/watches/{number}", json={"question": f"Any of {number}?"})
        async with asyncio.timeout(120):
            while len(served.backend.prompts) < 2:  # noqa: ASYNC110 - nobody says when
                await asyncio.sleep(0)
        for number in range(11):
            answer = await served.http.post(f"{url}/ask", json={"question": f"Some of {number}?"})
            assert answer.status_code == 200, answer.text
        refused = await served.http.post(f"{url}/ask", json={"question": "Yet another?"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_rate")
        assert len(served.backend.prompts) == 1 + 1 + 11, (
            "the data, one watched question in this second, and the others"
        )


def test_watched_questions_are_begun_some_in_each_second() -> None:
    clock = Clock()
    admission = Admission(Limits(), clock=clock.monotonic)
    nums = []
    for at_s in (0.0, 0.5, 0.99, 1.0, 1.5, 2.1):
        clock.now_s, num = at_s, 0
        with suppress(NotAdmittedError):
            for num in range(100):  # noqa: B007 -- how many were begun
                admission.leave(admission.enter("ada", max_tokens=1, is_ahead=True), stayed_s=0.1)
        nums.append(num)
    assert nums == [5, 0, 0, 5, 0, 5]
    for _ in range(600 - 15):
        admission.leave(admission.enter("ada", max_tokens=1), stayed_s=0.1)
    with pytest.raises(NotAdmittedError, match="600 queries in 60 s"):
        admission.enter("ada", max_tokens=1)


def test_watched_questions_of_some_clients_leave_room_for_those_of_another() -> None:
    admission = Admission(Limits(max_queries=16, max_queries_per_client=8, max_requests_per_minute=10_000))

    def come(client: str, *, num_tokens: int = 1, is_ahead: bool = True) -> Reservation | str:
        try:
            return admission.enter(client, max_tokens=num_tokens, is_ahead=is_ahead)
        except NotAdmittedError as refused:
            return refused.why

    places = {client: [come(client) for _ in range(4)] for client in ("ada", "bob")}
    assert come("ada") == "client_queries"
    assert come("cleo") == "queries"
    for client in ("ada", "bob"):
        ended = places[client].pop()
        assert isinstance(ended, Reservation)
        admission.leave(ended, stayed_s=1.0)
        assert come(client) == "client_queries", "there are three clients for the half of sixteen places"
    assert [isinstance(come("cleo"), Reservation) for _ in range(2)] == [True, True]
    assert come("cleo") == "queries", "half of all places are taken"
    assert isinstance(come("cleo", is_ahead=False), Reservation), "what somebody waits for has the other half"
    admission = Admission(Limits(max_queued_tokens=64_000))
    assert isinstance(come("ada", num_tokens=10_000, is_ahead=False), Reservation)
    assert isinstance(come("ada", num_tokens=600), Reservation)
    assert come("ada", num_tokens=401) == "tokens", "watched questions have a 64th"
    assert isinstance(come("ada", num_tokens=400), Reservation)
    assert isinstance(come("bob", num_tokens=2_000), Reservation), "whatever it is, it can be answered"


def test_watched_questions_that_find_no_place_take_none_from_questions() -> None:
    admission = Admission(Limits(max_queries=16, max_queries_per_client=8))
    for _ in range(4):
        admission.enter("ada", max_tokens=1)
        admission.enter("bob", max_tokens=1)
    with pytest.raises(NotAdmittedError):
        admission.enter("cleo", max_tokens=1, is_ahead=True)
    for client in ("ada", "bob"):
        for _ in range(4):
            admission.enter(client, max_tokens=1)
    assert admission.num_queries == 16


async def test_a_session_s_question_is_charged_by_its_own_length() -> None:
    limits = Limits(max_queued_tokens=1500)
    async with serving(backend=ScriptedBackend(answer="yes", is_endless=True), limits=limits) as served:
        url = await opened(served)
        place = served.service.admission.enter("anonymous", max_tokens=1)
        place.follow(ContextChanged(0.0, 1, 2000, 0, 0))
        served.service.admission.leave(place, stayed_s=1.0)
        asking = []
        for number in range(3):  # prompts were 2,000 tokens long so far, and those of a session are nearly computed
            question = {"question": f"Any of {number}?", "max_tokens": 100}
            asking.append(asyncio.create_task(served.http.post(f"{url}/ask", json=question)))
            await until_open(served, 2 + number)
        refused = await served.http.post(f"{url}/ask", json={"question": "x" * 1500})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tokens")
        await served.http.delete(url)
        await asyncio.gather(*asking)
        place = served.service.admission.enter("anonymous", max_tokens=0)
        assert place.num_queued_tokens == 2000, "they say nothing of other prompts"


async def test_readers_of_a_session_are_bounded() -> None:
    async with serving(limits=limits_of(max_readers=2)) as served, AsyncExitStack() as ends:
        url = await opened(served)
        address = served.url.replace("http", "ws") + f"{url}/socket"
        reading = events_of(served, url)
        assert (await anext(reading)).event == "session"
        talk = Talk(await ends.enter_async_context(websockets.connect(address, close_timeout=1)))
        await talk.next("session")
        refused = await served.http.get(f"{url}/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_readers")
        other = Talk(await ends.enter_async_context(websockets.connect(address, close_timeout=1)))
        assert (await other.next("error"))["error"]["code"] == "too_many_readers"
        assert await other.closed() == 1008
        await talk.socket.close()
        async with asyncio.timeout(120):
            while (await served.http.get(f"{url}/events", headers={"last-event-id": "x"})).status_code != 400:
                pass
        await reading.aclose()


async def test_readers_are_shown_the_beginning_of_watched_questions_only() -> None:
    async with serving(backend=ScriptedBackend(answer="yes")) as served:
        url = await opened(served)
        long = "Any? " * 400
        assert (await served.http.put(f"{url}/watches/long", json={"question": long})).status_code == 201
        events = events_of(served, url)
        session, ready = [json.loads((await anext(events)).data) for _ in range(2)]
        assert (session["watches"], ready["question"]) == ({"long": long[:200]}, long[:200])
        prompt = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
        assert long in prompt, "the model is asked all of it"
        await events.aclose()


@pytest.mark.parametrize(
    ("name", "watch"),
    [
        ("x" * 129, {"question": "Any?"}),
        ("a", {"question": "x" * 2_001}),
        ("a", {"question": "Any?", "answers": [str(i) + "x" * 900 for i in range(3)]}),
    ],
)
async def test_a_watch_that_is_too_long_is_refused(name: str, watch: dict[str, object]) -> None:
    async with serving() as served:
        url = await opened(served)
        assert (await served.http.put(f"{url}/watches/{name}", json=watch)).status_code == 400
        assert (await served.http.get(url)).json()["watches"] == {}


async def test_versions_that_follow_each_other_are_told_of_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.serve.session_store.served_session.UPDATE_GAP_S", 1000)
    async with serving(backend=ScriptedBackend(answer="yes")) as served:
        url = await opened(served)
        for version in range(1, 6):
            await served.http.post(f"{url}/data", json={"data": ["x"]})
            await served.http.post(f"{url}/ask", json={"question": "There?", "at_least": version})
        await served.http.put(f"{url}/watches/a", json={"question": "Any?"})
        events = events_of(served, url)
        assert [(await anext(events)).event for _ in range(3)] == ["session", "data_updated", "flash_ready"]
        await events.aclose()


async def test_a_planted_log_has_no_more_watches_than_a_session_may_have(tmp_path: Path) -> None:
    id = f"sess_{'0' * 32}"
    watches: dict[str, WatchOptions | None] = {f"w{i}": WatchOptions(f"{i}?", name=f"w{i}") for i in range(500)}
    planted = LogFile(tmp_path / f"{id}.sqlite")
    planted.write(LogContents(SessionHeader("Watch.", 500, 0.5, "anonymous"), {}, watches))
    planted.close()
    backend = ScriptedBackend(answer="yes")
    async with serving(backend=backend, session_log_dir=tmp_path, limits=limits_of(max_watches=3)) as served:
        state = (await served.http.get(f"/v1/sessions/{id}")).json()
        assert state["watches"] == {f"w{i}": f"{i}?" for i in range(3)}
        full = await served.http.put(f"/v1/sessions/{id}/watches/more", json={"question": "More?"})
        assert full.status_code == 429
        assert (await served.http.delete(f"/v1/sessions/{id}/watches/w0")).status_code == 204


async def test_no_error_of_a_session_s_log_says_where_it_is(tmp_path: Path) -> None:
    async with serving(session_log_dir=tmp_path) as served:
        url = await opened(served)
        assert (await served.http.post(f"{url}/data", json={"data": ["x"], "flush": True})).status_code == 202
        path = tmp_path / f"{url.rpartition('/')[2]}.sqlite"
        path.unlink()
        path.write_text("something else")
        answer = await served.http.post(f"{url}/data", json={"data": ["y"], "flush": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "session_log_failed")
        state = await served.http.get(url)
        for told in (answer.text, state.text):
            assert "replaced by somebody else" in told
            assert str(tmp_path) not in told
            assert path.name not in told
