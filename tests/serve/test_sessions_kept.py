"""Sessions of a service that is restarted, expiry, and what each client may have."""

import asyncio
import json
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent
from websockets.asyncio.client import connect

from streamrag.errors import ConfigurationError
from streamrag.serve import Limits
from streamrag.serve.config.factories import make_service
from streamrag.serve.config.layers import load
from streamrag.sessions.log.file import read_header
from streamrag.testing import ScriptedBackend
from tests.serve.serving import Serving, limits_of, serving
from tests.serve.test_sessions import Clock, events_of, opened
from tests.sessions.test_log import FullDisk, database, disk, names_in


class Clocks(Clock):
    """And the wall's."""

    time = staticmethod(time.time)


KEYS = {"a" * 16: "alice", "b" * 16: "bob"}

__all__ = ["disk"]


def damage(path: Path) -> None:
    """Have a row in a log that no session writes."""
    with database(path) as connection:
        connection.execute("UPDATE chunks SET text = 5")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.serve.session_store.store.SWEEP_S", 0.01)


@asynccontextmanager
async def kept(folder: Path, **options: Any) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    """A service that keeps sessions there, whose client is alice, and bob."""
    async with serving(backend=ScriptedBackend(answer="yes"), keys=KEYS, session_log_dir=folder, **options) as served:
        headers = {"authorization": f"Bearer {'b' * 16}"}
        async with httpx.AsyncClient(base_url=served.url, headers=headers) as bob:
            yield served, bob


async def until_gone(served: Serving, url: str, folder: Path) -> None:
    """Looks at the folder: asking for the session would use it."""
    path = folder / f"{url.rpartition('/')[2]}.sqlite"
    async with asyncio.timeout(120):
        while path.exists():  # noqa: ASYNC110 - nobody says when
            await asyncio.sleep(0.01)
    assert (await served.http.get(url)).status_code == 404


async def test_sessions_survive_a_restart_for_their_owners(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    options = {"system": "Watch.", "window_tokens": 500, "slide_share": 0.25}
    async with kept(folder) as (served, _):
        url = await opened(served, **options)
        data = {"data": ["one", {"text": "two", "uri": "feed"}], "flush": True}
        assert (await served.http.post(f"{url}/data", json=data)).json()["flushed"] == 2
    (name,) = names_in(folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / name)] == [0o700, 0o600]
    assert read_header(folder / name).owner == "alice"
    assert not any(key.encode() in (folder / name).read_bytes() for key in KEYS)
    for version in (3, 4):
        async with kept(folder) as (served, bob):
            assert served.backend.num_requests == 0, "nothing is computed before somebody asks for it"
            assert (await bob.get(url)).status_code == 404
            state = (await served.http.get(url)).json()
            assert (state["version"], state["window_tokens"], state["log"]["is_resumed"]) == (version - 1, 500, True)
            done = await served.http.post(f"{url}/data", json={"data": [f"number {version}"]})
            assert done.json()["version"] == version
            answer = await served.http.post(f"{url}/ask", json={"question": "Which?", "at_least": version})
            assert (answer.json()["text"], answer.json()["version"]) == ("yes", version)
            prompt = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
            assert prompt.index("Watch.") < prompt.index("one\ntwo\nnumber 3\n")
    async with kept(folder) as (served, _):
        assert (await served.http.delete(url)).status_code == 204
        assert names_in(folder) == []
        assert (await served.http.get(url)).status_code == 404
        assert served.backend.num_requests == 0


async def test_a_resumed_session_takes_many_requests_at_once(tmp_path: Path) -> None:
    async with kept(tmp_path) as (served, _):
        url = await opened(served)
    async with kept(tmp_path) as (served, _):
        data = {"data": ["x"]}
        answers = await asyncio.gather(*(served.http.post(f"{url}/data", json=data) for _ in range(8)))
        assert sorted(each.json()["version"] for each in answers) == list(range(1, 9))


async def test_a_session_that_expires_is_gone_from_the_disk_also_one_of_before(tmp_path: Path) -> None:
    limits = Limits(session_idle_s=1000)
    async with kept(tmp_path, limits=limits) as (served, _):
        early, late = await opened(served), await opened(served)
        for url in (early, late):
            await served.http.post(f"{url}/data", json={"data": ["x"]})
    path = tmp_path / f"{early.rpartition('/')[2]}.sqlite"
    os.utime(path, (time.time() - 2000,) * 2)
    async with kept(tmp_path, limits=limits.model_copy(update={"session_unused_s": 0.1})) as (served, _):
        await until_gone(served, early, tmp_path)
        assert (await served.http.get(late)).json()["version"] == 1
    async with kept(tmp_path, limits=Limits(session_idle_s=0.2)) as (served, _):
        await until_gone(served, late, tmp_path)


@pytest.mark.parametrize("old_s", [1_000_000.0, -1_000_000.0])
async def test_a_session_outlives_a_restart_however_long_it_took_by_a_clock_that_was_set_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_s: float
) -> None:
    clock = Clocks()
    limits = limits_of(session_idle_s=1000, session_unused_s=100)
    async with kept(tmp_path, limits=limits) as (served, _):
        url, unasked = await opened(served), await opened(served)
        await served.http.post(f"{url}/data", json={"data": ["x"], "flush": True})
    monkeypatch.setattr("streamrag.serve.session_store.store.time", clock)
    monkeypatch.setattr("streamrag.serve.session_store.served_session.time", clock)
    for name in names_in(tmp_path):
        os.utime(tmp_path / name, (time.time() - old_s,) * 2)
    async with kept(tmp_path, limits=limits) as (served, _):
        clock.now_s += 99
        assert (await served.http.get(url)).json()["version"] == 1
        clock.now_s += 902
        await until_gone(served, unasked, tmp_path)
        assert (await served.http.get(url)).json()["version"] == 1


async def test_a_session_that_is_only_asked_says_on_disk_that_it_is_used(tmp_path: Path) -> None:
    limits = Limits(session_idle_s=1000)
    async with kept(tmp_path, limits=limits) as (served, _):
        url = await opened(served)
    path = tmp_path / f"{url.rpartition('/')[2]}.sqlite"
    before_s = time.time() - 900
    os.utime(path, (before_s, before_s))
    async with kept(tmp_path, limits=limits) as (served, _):
        held_s = path.stat().st_mtime
        assert held_s == pytest.approx(before_s)
        await served.http.post(f"{url}/ask", json={"question": "Which?"})
        async with asyncio.timeout(120):
            while path.stat().st_mtime < before_s + 800:  # noqa: ASYNC110 - nobody says when
                await asyncio.sleep(0.01)


async def test_a_damaged_log_is_kept_and_reported_and_may_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(tmp_path) as (served, _):
        url = await opened(served)
        await served.http.post(f"{url}/data", json={"data": ["x"], "flush": True})
    path = tmp_path / f"{url.rpartition('/')[2]}.sqlite"
    damage(path)
    damaged = path.read_bytes()
    (tmp_path / f"sess_{'0' * 32}.sqlite").write_text("rubbish\n")
    (tmp_path / "notes.txt").write_text("mine")
    async with kept(tmp_path) as (served, _):
        assert "is no log of a session" in caplog.text
        for _ in range(2):
            answer = await served.http.get(url)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "session_log_failed")
            assert str(tmp_path) not in answer.text
        assert path.read_bytes() == damaged
        assert "is damaged" in caplog.text
        assert (await served.http.delete(url)).status_code == 204
    assert sorted(names_in(tmp_path)) == ["notes.txt", f"sess_{'0' * 32}.sqlite"]


async def test_a_full_disk_is_told_of_and_the_session_goes_on(tmp_path: Path, disk: FullDisk) -> None:
    async with kept(tmp_path) as (served, _):
        url = await opened(served)
        events = events_of(served, url)
        await anext(events)
        await served.http.post(f"{url}/data", json={"data": ["one"], "flush": True})
        disk.fill()
        answer = await served.http.post(f"{url}/data", json={"data": ["two"], "flush": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "session_log_failed")
        async with asyncio.timeout(120):
            while (told := await anext(events)).event != "log_failed":
                pass
        await events.aclose()
        assert json.loads(told.data)["reason"] == "disk I/O error"
        assert (await served.http.get(url)).json()["log"]["num_failures"] == 1
        disk.free()
        answer = await served.http.post(f"{url}/data", json={"data": ["three"], "flush": True})
        assert answer.json()["flushed"] == 3


async def test_without_a_folder_nothing_can_be_flushed() -> None:
    async with serving() as served:
        url = await opened(served)
        answer = await served.http.post(f"{url}/data", json={"data": ["x"], "flush": True})
        assert (answer.status_code, "session_log_dir" in answer.text) == (400, True)
        assert (await served.http.get(url)).json()["num_appended"] == 0


async def test_the_sessions_and_tokens_of_each_client_are_counted_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clocks()
    monkeypatch.setattr("streamrag.serve.session_store.store.time", clock)
    monkeypatch.setattr("streamrag.serve.session_store.served_session.time", clock)
    monkeypatch.setattr("streamrag.serve.session_store.store.CLIENT_SHARE", 0.5)
    limits = limits_of(max_sessions=5, max_session_tokens=2000, session_idle_s=1000)

    async def may_open(who: httpx.AsyncClient, window_tokens: int | None, **options: Any) -> str:
        """The new session's address, or why there is none."""
        answer = await who.post("/v1/sessions", json={"window_tokens": window_tokens, **options})
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 0
        return f"/v1/sessions/{answer.json()['id']}" if answer.is_success else answer.json()["error"]["code"]

    async with kept(tmp_path, limits=limits) as (served, bob):
        alice = served.http
        for _ in range(3):  # those that cannot be opened count for nothing
            assert await may_open(alice, 900, system="x" * 99_999) == "context_length_exceeded"
        one = await may_open(alice, 600)
        assert await may_open(alice, 401) == "client_session_tokens"
        assert await may_open(alice, None) == "client_session_tokens"
        two = await may_open(alice, 400)
        assert (await alice.delete(one)).status_code == 204
        three, four = await may_open(alice, 500), await may_open(alice, 100)
        assert await may_open(alice, 1) == "client_sessions"
        assert (await may_open(bob, 900)).startswith("/v1")
        assert (await may_open(bob, 1)).startswith("/v1")
        assert await may_open(bob, 1) == "sessions"
        assert (await alice.delete(three)).status_code == (await alice.delete(four)).status_code == 204
    os.utime(tmp_path / f"{two.rpartition('/')[2]}.sqlite", (time.time() - 2000,) * 2)
    async with kept(tmp_path, limits=limits) as (served, bob):
        alice = served.http
        clock.now_s += limits.session_unused_s + 1
        await until_gone(served, two, tmp_path)
        assert await may_open(bob, 101) == "client_session_tokens", "those of before count, though nobody has used them"
        kept_ones = [await may_open(alice, 300) for _ in range(3)]
        assert await may_open(alice, 1) == "client_sessions"
        assert all(each.startswith("/v1") for each in kept_ones)
    monkeypatch.setattr("streamrag.serve.session_store.store.CLIENT_SHARE", 1.0)
    async with kept(tmp_path, limits=limits.model_copy(update={"max_session_tokens": 1850})) as (served, bob):
        for url in kept_ones:
            assert (await served.http.get(url)).status_code == 200
        assert (await served.http.delete(kept_ones[0])).status_code == 204
        assert await may_open(served.http, 350) == "session_tokens"
        assert (await may_open(served.http, 349)).startswith("/v1")


async def test_a_session_that_was_never_used_ends_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clocks()
    monkeypatch.setattr("streamrag.serve.session_store.store.time", clock)
    monkeypatch.setattr("streamrag.serve.session_store.served_session.time", clock)
    async with kept(tmp_path, limits=limits_of(session_idle_s=1000, session_unused_s=10)) as (served, _):
        used, unused = await opened(served), await opened(served)
        await served.http.get(used)
        clock.now_s += 11
        await until_gone(served, unused, tmp_path)
        assert (await served.http.get(used)).status_code == 200


async def test_a_client_that_leaves_before_its_session_opens_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, goes_on = asyncio.Event(), asyncio.Event()

    async def start(session: Any) -> None:
        opens.set()
        await goes_on.wait()

    monkeypatch.setattr("streamrag.sessions.Session.start", start)
    async with kept(tmp_path, limits=Limits(max_sessions=1)) as (served, _):
        asks = asyncio.create_task(served.http.post("/v1/sessions", json={}))
        await opens.wait()
        assert (await served.http.post("/v1/sessions", json={})).status_code == 429
        asks.cancel()
        monkeypatch.undo()
        async with asyncio.timeout(120):
            while (await served.http.post("/v1/sessions", json={})).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_readers_alone_do_not_keep_a_session_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clocks()
    monkeypatch.setattr("streamrag.serve.session_store.store.time", clock)
    monkeypatch.setattr("streamrag.serve.session_store.served_session.time", clock)
    async with kept(tmp_path, limits=limits_of(session_idle_s=10, session_read_s=100)) as (served, _):
        url = await opened(served)
        events = events_of(served, url)
        await anext(events)
        clock.now_s = 90
        num_looks = clock.num_looks
        async with asyncio.timeout(120):
            while clock.num_looks < num_looks + 20:  # noqa: ASYNC110 - nobody says when
                await asyncio.sleep(0.01)
            await served.http.post(f"{url}/data", json={"data": ["x"]})  # which is a use
            assert (await anext(events)).event == "data_updated"
            clock.now_s = 191
            assert [each async for each in events] == []
        await until_gone(served, url, tmp_path)


async def test_a_folder_that_cannot_be_had_is_said_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        settings = load(None, {}, {"server.session_log_dir": str(folder), "model.name": "none"}).settings
        with pytest.raises(ConfigurationError, match="session_log_dir"):
            make_service(settings)


async def test_a_reader_whose_key_no_longer_counts_is_told_and_left(tmp_path: Path) -> None:
    async with kept(tmp_path) as (served, bob):
        url = await opened(served)
        events = events_of(served, url)
        await anext(events)
        address = f"{served.url.replace('http', 'ws')}{url}/socket"
        async with connect(address, additional_headers={"authorization": f"Bearer {'a' * 16}"}) as socket:
            await socket.recv()
            served.app.set_keys({"b" * 16: "bob"})
            async with asyncio.timeout(120):
                await socket.wait_closed()
            assert socket.close_code == 1008
        async with asyncio.timeout(120):
            (last,) = [each async for each in events]
        assert (last.event, json.loads(last.data)["error"]["code"]) == ("error", "invalid_api_key")
        assert (await bob.post("/v1/sessions", json={})).status_code == 201


async def test_a_service_that_stops_says_of_no_session_that_it_is_gone(tmp_path: Path) -> None:
    async with kept(tmp_path) as (served, _):
        url = await opened(served)
        await served.http.post(f"{url}/data", json={"data": ["x"], "flush": True})
        await served.service.aclose()
        for method, path, body in (
            ("GET", "", None),
            ("POST", "/data", {"data": ["y"]}),
            ("POST", "/ask", {"question": "Rising?"}),
            ("DELETE", "", None),
        ):
            answer = await served.http.request(method, url + path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        headers = {"authorization": f"Bearer {'a' * 16}"}
        async with connect(served.url.replace("http", "ws") + f"{url}/socket", additional_headers=headers) as socket:
            assert json.loads(await socket.recv())["status"] == 503
    async with kept(tmp_path) as (served, _):
        assert (await served.http.get(url)).json()["num_appended"] == 1


async def test_a_log_with_an_impossible_window_does_not_block_new_sessions(tmp_path: Path) -> None:
    async with kept(tmp_path) as (served, _):
        url = await opened(served)
    path = tmp_path / f"{url.rpartition('/')[2]}.sqlite"
    with database(path) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE name = 'window_tokens'", (10**17,))
    async with kept(tmp_path) as (served, bob):
        assert (await served.http.get(url)).status_code == 400
        for who in (served.http, bob):
            assert (await who.post("/v1/sessions", json={})).status_code == 201


async def test_data_are_appended_all_or_none_and_of_each_its_text_is_kept(tmp_path: Path) -> None:
    async with kept(tmp_path) as (served, _):
        url = await opened(served)
        answer = await served.http.post(f"{url}/data", json={"data": ["x", "y" * 1_000_001], "flush": True})
        assert (answer.status_code, "split it" in answer.text) == (400, True)
        assert (await served.http.get(url)).json()["num_appended"] == 0
        data = [{"text": "x", "uri": "u" * 900_000, "title": "t"}]
        answer = await served.http.post(f"{url}/data", json={"data": data, "flush": True})
        assert answer.json()["flushed"] == 1
        assert not any(b"u" * 100 in (tmp_path / name).read_bytes() for name in names_in(tmp_path))


async def named(events: AsyncIterator[ServerSentEvent], name: str) -> ServerSentEvent:
    """The next event of this name."""
    async with asyncio.timeout(120):
        while (event := await anext(events)).event != name:
            pass
    return event


async def test_watches_are_there_after_a_restart_and_events_go_on(tmp_path: Path) -> None:
    watch = {"question": "Any?", "answers": ["yes", "no"], "priority": 2, "min_interval_s": 0.5, "with_margin": True}
    ids: list[int] = []
    for number in range(3):
        async with kept(tmp_path) as (served, _):
            if not ids:
                url = await opened(served)
                assert (await served.http.put(f"{url}/watches/alarm", json=watch)).status_code == 201
                await served.http.put(f"{url}/watches/gone", json=watch)
                assert (await served.http.delete(f"{url}/watches/gone")).status_code == 204
            events = events_of(served, url, last=str(ids[0]) if ids else "")
            session = await anext(events)
            assert json.loads(session.data)["watches"] == {"alarm": "Any?"}
            if ids:
                gap = await anext(events)
                assert (gap.event, json.loads(gap.data)["after"]) == ("gap", ids[0])
                assert int(gap.id) >= ids[-1]
            ready = await named(events, "flash_ready")
            assert json.loads(ready.data) | {"took_s": 0} == {
                "name": "alarm",
                "question": "Any?",
                "answer": "yes",
                "version": number,
                "took_s": 0,
                "gap": None,
            }
            await served.http.post(f"{url}/data", json={"data": ["x"]})
            updated = await named(events, "data_updated")
            new = [int(ready.id), int(updated.id)]
            assert min(new) > max(ids, default=0), "no event has an id of before"
            ids += new
            await events.aclose()


async def test_a_reader_is_told_of_events_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.serve.session_store.served_session.MAX_KEPT_EVENTS", 3)
    monkeypatch.setattr("streamrag.serve.session_store.served_session.UPDATE_GAP_S", 0)
    async with serving() as served:
        url = await opened(served)
        for version in range(1, 8):
            await served.http.post(f"{url}/data", json={"data": ["x"]})
            await served.http.post(f"{url}/ask", json={"question": "There?", "at_least": version})
        for last, expected in (("", []), ("1", ["gap"]), ("9999", [])):
            events = events_of(served, url, last=last)
            assert (await anext(events)).event == "session"
            seen = [await anext(events) for _ in range(len(expected) + 3)]
            assert [each.event for each in seen] == [*expected, *["data_updated"] * 3]
            numbers = [int(each.id) for each in seen]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            await events.aclose()


async def test_a_damaged_log_is_said_once_without_a_traceback_and_an_empty_one_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(tmp_path) as (served, _):
        url = await opened(served)
        await served.http.post(f"{url}/data", json={"data": ["x"], "flush": True})
    path = tmp_path / f"{url.rpartition('/')[2]}.sqlite"
    damage(path)
    empty = tmp_path / f"sess_{'0' * 32}.sqlite"
    empty.touch()

    def with_traceback() -> list[bool]:
        # Ray, in a test before, may have set the level of others' records.
        return [bool(record.exc_info) for record in caplog.records if record.name.startswith("streamrag")]

    caplog.clear()
    async with kept(tmp_path) as (served, _):
        assert not empty.exists()
        assert with_traceback() == []
        for _ in range(3):
            assert (await served.http.get(url)).status_code == 500
        assert with_traceback() == [False]


async def test_a_session_of_another_service_is_neither_asked_nor_ended(tmp_path: Path) -> None:
    async with kept(tmp_path) as (served, _):
        url, other_url = await opened(served), await opened(served)
        await served.http.post(f"{url}/data", json={"data": ["x"], "flush": True})
        async with kept(tmp_path, limits=Limits(session_idle_s=1000)) as (second, _):
            for method in ("DELETE", "GET", "DELETE"):
                answer = await second.http.request(method, url)
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_in_use")
            assert (await served.http.get(url)).json()["version"] == 1
            assert (await served.http.delete(other_url)).status_code == 204
            assert (await second.http.get(other_url)).status_code == 404, "it is not made anew"
            assert (await served.http.delete(url)).status_code == 204
            assert (await second.http.delete(url)).status_code in (204, 404)
    assert names_in(tmp_path) == []
