"""The WebSocket of questions that are still being asked: what begins early, what is answered, and what is freed."""

import asyncio
import json
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
import websockets

from streamrag import Append, BackendError
from streamrag.errors import EngineDeadError
from streamrag.open_questions import WaitForWords
from streamrag.serve import Limits
from streamrag.serve.admission import Admission
from streamrag.serve.connections.json_body import memory_of, parse
from streamrag.serve.observe.metrics import Metrics
from streamrag.serve.protocols import ask_socket
from streamrag.testing import ScriptedBackend
from tests.serve.serving import CHUNKS, PARIS, ROME, Serving, limits_of, serving
from tests.serve.test_metrics import scrape

GIVE_UP_S = 120.0
QUESTION = "What is the capital of France?"
TURN = {"role": "user", "content": "x"}
AHEAD = Limits(max_retrievals_ahead=5)


class Talk:
    """One socket."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self.socket = connection

    async def send(self, type: str, id: str = "q", **values: object) -> None:
        await self.socket.send(json.dumps({"type": type, "id": id, **values}))

    async def frames(self, *last: str) -> list[dict[str, Any]]:
        """Return the frames up to the first of one of these types."""
        frames: list[dict[str, Any]] = []
        async with asyncio.timeout(GIVE_UP_S):
            while not frames or frames[-1]["type"] not in last:
                frames.append(json.loads(await self.socket.recv()))
        return frames

    async def frames_of(self, id: str) -> list[dict[str, Any]]:
        """Return the frames with this id, up to its answer."""
        frames = await self.frames("answered")
        while frames[-1]["id"] != id:
            frames += await self.frames("answered")
        return [frame for frame in frames if frame.get("id") == id]

    async def next(self, *types: str) -> dict[str, Any]:
        return (await self.frames(*types))[-1]


@asynccontextmanager
async def talking(served: Serving, **options: Any) -> AsyncIterator[Talk]:
    address = served.url.replace("http", "ws") + "/v1/ask/socket"
    async with websockets.connect(address, close_timeout=1, **options) as connection:
        yield Talk(connection)


async def freed(served: Serving) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while served.service.queries or served.backend.num_requests or served.source.num_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (ahead := served.service.queries_ahead) is None or ahead.num_running == 0


async def sse(served: Serving, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events of a question that is asked as a whole."""
    lines = (await served.http.post("/v1/ask", json=body)).text.splitlines()
    names = [line[7:] for line in lines if line.startswith("event: ")]
    return list(zip(names, [json.loads(line[6:]) for line in lines if line.startswith("data: ")], strict=True))


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in values.items() if name not in ("at_s", "id", "type", "overlap")}
    if "answer" in values:
        values["answer"] = {name: value for name, value in values["answer"].items() if name != "timings"}
    return values


async def test_a_partial_question_is_retrieved_for_and_its_commit_has_the_events_of_a_whole_question() -> None:
    async with serving(limits=AHEAD, overlap=True) as served, talking(served) as talk:
        await talk.send("open", system="Be brief.")
        await talk.send("partial", question=QUESTION, is_final=True)
        early = await talk.frames("prefill_progressed")
        assert early[0]["query"] == QUESTION
        await asyncio.sleep(0.1)
        assert [query.text for query in served.service.queries] == [QUESTION]
        assert not any(prompt.is_complete for prompts in served.backend.prompts for prompt in prompts)
        await talk.send("commit", question=QUESTION)
        before = [*early, *(await talk.frames("committed"))]
        assert before.pop()["at_s"] > 0.1
        frames = [*before, *(await talk.frames("answered"))]
        assert served.source.queries == [QUESTION]
        whole = await sse(served, question=QUESTION, system="Be brief.")
    kinds = ("chunk_arrived", "context_complete", "tokens_generated", "answered")
    assert [(frame["type"], without_times(frame)) for frame in frames if frame["type"] in kinds] == [
        (name, without_times(values)) for name, values in whole if name in kinds
    ]
    assert frames[0]["type"] == whole[0][0] == "retrieval_started"
    assert {frame["id"] for frame in frames} == {"q"}
    (ahead, *_), (as_whole, *_) = (
        [prompt.token_ids for prompt in prompts if prompt.is_complete] for prompts in served.backend.prompts
    )
    assert ahead == as_whole
    assert served.watcher.ended == [("listen", "answered"), ("ask", "answered")]


async def test_another_question_than_the_last_partial_one_is_asked_anew() -> None:
    async with serving(limits=AHEAD, observers=[Metrics()], overlap=True) as served, talking(served) as talk:
        await talk.send("open")
        await talk.send("partial", question="What is the capital of Italy", is_final=True)
        await talk.frames("prefill_progressed")
        await talk.send("commit", question=QUESTION)
        await talk.frames("committed")
        frames = await talk.frames("answered")
        started = [frame["query"] for frame in frames if frame["type"] == "retrieval_started"]
        assert (started, frames[-1]["answer"]["text"]) == ([QUESTION], "It is Paris [1].")
        assert served.source.queries == ["What is the capital of Italy", QUESTION]
        assert served.watcher.started[0].text == QUESTION, "what the log hides"
        assert served.watcher.started[0].progress.num_chunks == len(CHUNKS), "observers see the answer's query only"
        await talk.send("open", id="b")
        await talk.send("partial", id="b", question=QUESTION, is_final=True)
        await talk.frames("prefill_progressed")
        await talk.send("commit", id="b", question=QUESTION)
        await talk.next("answered")
        seen = await scrape(served.http)
    assert (seen["queries_ahead"], seen["queries_ahead_begun_total"], seen["queries_ahead_used_total"]) == (0, 2, 1)
    assert seen["queries_ahead_unused_tokens_total"] > 0
    assert seen.of("queries_total", interface="listen", outcome="answered") == 2


async def test_a_question_can_be_committed_at_once_and_each_on_the_socket_has_its_own_options() -> None:
    async with serving(limits=AHEAD) as served, talking(served) as talk:
        for id, most in (("a", 2), ("b", 5)):
            await talk.send("open", id=id, max_tokens=most)
            await talk.send("commit", id=id, question=QUESTION)
            assert (await talk.next("committed"))["at_s"] is None
            answered = await talk.next("answered")
            assert (answered["id"], answered["answer"]["text"]) == (id, "It is Paris [1]."[:most])


async def test_many_partial_questions_cost_one_place_and_only_the_newest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WaitForWords, "__call__", lambda self, text, retrieved: 1000.0)
    async with serving(limits=AHEAD, overlap=True) as served, talking(served) as talk:
        await talk.send("open")
        for n in range(300):
            await talk.send("partial", question=f"What is capital number {n}", is_final=n == 299)
        await talk.next("prefill_progressed")
        assert served.source.queries == ["What is capital number 299"]
        assert len(served.watcher.started) == len(served.service.queries) == 1


async def test_partial_questions_are_charged_like_others() -> None:
    limits = Limits(max_retrievals_ahead=5, max_prompt_tokens_per_minute=3000)
    async with serving(limits=limits, overlap=True) as served, talking(served) as talk:
        served.service.admission._clock = lambda: 1000.0  # no tokens leak
        await talk.send("open")
        for country in ("Italy", "France", "Norway"):
            await talk.send("partial", question=f"What is the capital of {country}", is_final=True)
            await talk.next("retrieval_started")
            await talk.next("context_changed")
            await talk.next("context_changed")
        await talk.send("commit", question=QUESTION)
        await talk.next("answered")
        lengths = [len(prompts[-1].token_ids) for prompts in served.backend.prompts]
        assert len(lengths) == 4
        used = served.service.admission._usage["anonymous"]
        assert used._num_tokens >= sum(lengths)
        assert len(used.starts_s) == 1
        assert used.prompts[-1] == lengths[-1]


async def test_a_refused_partial_question_is_told_once_and_its_commit_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Admission, "_wait_s", lambda self, num_to_end: 1000.0)
    limits = Limits(max_retrievals_ahead=5, max_queries=1)
    hold = anyio.Event()
    async with serving(limits=limits, backend=ScriptedBackend("It is Paris [1].", hold=hold)) as served:
        async with talking(served) as other, talking(served) as talk:
            await other.send("open")
            await other.send("commit", question="Who?")
            await other.next("committed")
            await talk.send("open")
            for n in range(20):
                await talk.send("partial", question=f"What is capital number {n}")
            error = await talk.next("error")
            assert (error["id"], error["status"], "retry-after" in error["error"]["headers"]) == ("q", 429, True)
            assert served.watcher.refused == [("anonymous", "listen", "queries")]
            hold.set()
            await other.next("answered")
            await talk.send("commit", question=QUESTION)
            assert [frame["type"] for frame in await talk.frames("committed")] == ["committed"], "one error"
            await talk.next("answered")
        await freed(served)


@pytest.mark.parametrize("moment", ["opened", "partial", "retrieving", "committed", "answering"])
@pytest.mark.parametrize("way", ["leave", "break", "cancel", "replace"])
async def test_a_question_that_ends_in_any_way_frees_everything(way: str, moment: str) -> None:
    backend = ScriptedBackend("It is Paris [1].", is_endless=True)
    async with serving([Append(PARIS), 0.01], backend=backend, limits=AHEAD, overlap=True) as served:
        async with talking(served) as talk:
            await talk.send("open")
            if moment != "opened":
                await talk.send("partial", question=QUESTION, is_final=moment != "partial")
            if moment not in ("opened", "partial"):
                await talk.next("prefill_progressed")
            if moment in ("committed", "answering"):
                await talk.send("commit", question=QUESTION)
                await talk.next("committed" if moment == "committed" else "tokens_generated")
            if way == "cancel":
                await talk.send("cancel")
                assert (await talk.next("cancelled"))["id"] == "q"
                await freed(served)
            elif way == "replace":
                await talk.send("open", id="b")
                last = await talk.next("cancelled", "error")
                if moment in ("committed", "answering"):
                    assert (last["id"], last["error"]["code"]) == ("b", "ask_committed")
                else:
                    assert (last["id"], last["type"]) == ("q", "cancelled")
                    await freed(served)
            elif way == "break":
                talk.socket.transport.abort()
        await freed(served)
    assert all(end == ("listen", "left") for end in served.watcher.ended)


async def test_an_idle_question_gives_back_its_place_and_goes_on_with_the_next_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ask_socket, "IDLE_S", 0.5)
    async with serving(limits=AHEAD, overlap=True) as served, talking(served) as talk:
        await talk.send("open", system="Be brief.")
        await talk.send("partial", question=QUESTION, is_final=True)
        await talk.next("retrieval_started")
        await freed(served)
        await talk.send("partial", question=QUESTION, is_final=True)
        await talk.next("retrieval_started")
        await talk.send("partial", question=" ")
        await freed(served)
        await talk.send("commit", question=QUESTION)
        await talk.next("answered")
        assert served.source.queries == [QUESTION] * 3
        assert all("Be brief." in text_of(prompts[-1].token_ids) for prompts in served.backend.prompts if prompts)


def text_of(token_ids: Any) -> str:
    return "".join(map(chr, token_ids))


async def test_a_question_is_not_listened_to_for_longer_than_the_deadline() -> None:
    limits = Limits(max_retrievals_ahead=5, deadline_s=0.3)
    async with serving(limits=limits, overlap=True) as served, talking(served) as talk:
        await talk.send("open")
        for n in range(16):
            await talk.send("partial", question=f"What is capital number {n}")
            await asyncio.sleep(0.05)
        assert len(served.watcher.started) > 1
        assert len(served.service.queries) <= 1


async def test_the_deadline_counts_from_the_commit() -> None:
    backend = ScriptedBackend("It is Paris [1].", is_endless=True)
    async with serving(backend=backend, limits=AHEAD, overlap=True) as served, talking(served) as talk:
        await talk.send("open", deadline_s=0.2)
        await talk.send("partial", question=QUESTION, is_final=True)
        await talk.next("prefill_progressed")
        await asyncio.sleep(0.3)
        await talk.send("commit", question=QUESTION)
        assert (await talk.next("error"))["error"]["code"] == "deadline_exceeded"
        await freed(served)
        assert served.watcher.ended == [("listen", "deadline")]


async def test_without_retrievals_ahead_questions_can_only_be_committed() -> None:
    async with serving() as served, talking(served) as talk:
        await talk.send("open")
        await talk.send("partial", question=QUESTION)
        error = await talk.next("error")
        assert (error["status"], error["error"]["code"]) == (403, "no_retrievals_ahead")
        assert served.watcher.started == []
        await talk.send("commit", question=QUESTION)
        await talk.next("answered")


BAD_FRAMES: list[tuple[dict[str, object] | str, str | None]] = [
    ("{", None),
    ({"type": "partial", "id": "other", "question": "x"}, "other"),
    ({"type": "cancel", "id": "other"}, "other"),
    ({"type": "partial", "id": "q"}, "q"),
    ({"type": "partial", "id": "q", "question": "x", "system": "y"}, "q"),
    ({"type": "partial", "id": "q", "question": "x" * (ask_socket.MAX_PARTIAL + 1)}, "q"),
    ({"type": "partial", "id": "q", "question": "x" * (1 << 20)}, None),
    ({"type": "open", "id": "q", "temperature": -1}, "q"),
    ({"type": "open", "id": "q", "deadline_s": 0}, "q"),
    ({"type": "open", "id": "q", "question": "x"}, "q"),
    ({"type": "open", "id": "x" * 1000}, None),
]


@pytest.mark.parametrize(("bad", "id"), BAD_FRAMES, ids=range(len(BAD_FRAMES)))
async def test_a_bad_frame_is_answered_with_an_error_and_changes_nothing(bad: Any, id: str | None) -> None:
    async with serving(limits=AHEAD) as served, talking(served) as talk:
        await talk.send("open", max_tokens=2)
        await talk.socket.send(bad if isinstance(bad, str) else json.dumps(bad))
        error = await talk.next("error")
        assert 400 <= error["status"] < 500
        assert error.get("id") == id
        await talk.send("commit", question=QUESTION)
        assert (await talk.next("answered"))["answer"]["text"] == "It"


async def test_bad_options_and_questions_are_told_when_they_are_used() -> None:
    async with serving(limits=AHEAD) as served, talking(served) as talk:
        for options, question in (({"max_context_tokens": -1}, QUESTION), ({}, " "), ({}, "x" * 200_000)):
            await talk.send("open", **options)
            await talk.send("commit", question=question)
            error = await talk.next("error")
            assert (error["status"], error["id"]) == (400, "q")
        await freed(served)


async def test_a_failed_retrieval_ahead_is_told_with_the_commit() -> None:
    async with serving([Append(PARIS), OSError("gone")], limits=AHEAD) as served, talking(served) as talk:
        await talk.send("open")
        await talk.send("partial", question=QUESTION, is_final=True)
        await talk.next("chunk_arrived")
        await talk.send("commit", question=QUESTION)
        frames = await talk.frames("error")
        assert "committed" in [frame["type"] for frame in frames]
        assert frames[-1]["error"]["code"] == "retrieval_failed"
        assert "gone" not in json.dumps(frames)
        await freed(served)


async def test_a_backend_that_fails_ends_the_answer_and_not_the_socket() -> None:
    backend = ScriptedBackend("It is Paris [1].", error=BackendError("broken"))
    async with serving(backend=backend, limits=AHEAD) as served, talking(served) as talk:
        for id in "ab":
            await talk.send("open", id=id)
            await talk.send("commit", id=id, question=QUESTION)
            assert (await talk.next("error"))["id"] == id
        assert served.watcher.ended == [("listen", "backend_error")] * 2


async def test_a_dead_engine_and_a_stop_end_partial_questions() -> None:
    async with serving(limits=AHEAD) as served, talking(served) as talk:
        await talk.send("open")
        await talk.send("partial", question=QUESTION, is_final=True)
        await talk.next("chunk_arrived")
        served.service._queries.engine_died(EngineDeadError("dead"))
        assert (await talk.next("error"))["error"]["code"] == "engine_dead"
        await freed(served)
        served.service._queries.engine_restarted()
        await talk.send("commit", question=QUESTION)
        await talk.next("answered")
        await talk.send("open", id="b")
        await talk.send("partial", id="b", question=QUESTION, is_final=True)
        await talk.next("chunk_arrived")
        await served.service.aclose()
        assert (await talk.next("error"))["status"] == 503


@pytest.mark.parametrize("seed", range(12))
async def test_frames_in_any_order_leave_nothing_behind_and_the_last_question_is_answered(seed: int) -> None:
    chance = random.Random(seed)
    limits = Limits(max_retrievals_ahead=3, max_queries_per_client=1, deadline_s=5)
    steps = [Append(PARIS), 0.01, Append(ROME), 0.01]
    async with serving(steps, limits=limits, overlap=True) as served:
        async with talking(served) as talk:
            for _ in range(40):
                id = chance.choice("ab")
                match chance.choice(["open", "open", "partial", "partial", "partial", "commit", "cancel"]):
                    case "open":
                        await talk.send("open", id=id, max_tokens=3)
                    case "partial":
                        text = chance.choice([QUESTION, "What is the capital of Italy?", "Why", ""])
                        await talk.send("partial", id=id, question=text, is_final=chance.random() < 0.5)
                    case "commit":
                        await talk.send("commit", id=id, question=chance.choice([QUESTION, "Who?"]))
                    case "cancel":
                        await talk.send("cancel", id=id)
                await asyncio.sleep(chance.choice([0, 0, 0.01, 0.03]))
            for id in ("a", "b", "none"):
                await talk.send("cancel", id=id)
            while (await talk.next("error")).get("id") != "none":
                pass  # until all of these frames were served
            await freed(served)
            await talk.send("open", id="last", max_tokens=5)
            await talk.send("partial", id="last", question=QUESTION, is_final=True)
            await talk.send("commit", id="last", question=QUESTION)
            frames = [frame for frame in await talk.frames_of("last") if frame["type"] == "tokens_generated"]
            assert "".join(frame["text"] for frame in frames) == "It is"
        await freed(served)
        assert all(outcome in ("answered", "left") for _, outcome in served.watcher.ended)


async def test_keys_hold() -> None:
    keys = {"k" * 16: "ada"}
    async with serving(limits=AHEAD, keys=keys) as served:
        with pytest.raises(websockets.InvalidStatus):
            async with talking(served):
                pass
        async with talking(served, additional_headers={"authorization": f"Bearer {'k' * 16}"}) as talk:
            await talk.send("open")
            await talk.send("partial", question=QUESTION, is_final=True)
            await talk.next("chunk_arrived")
            assert [query.client for query in served.service.queries] == ["ada"]
            served.app.set_keys({"x" * 16: "ada"})
            await talk.send("partial", question="x")
            async with asyncio.timeout(GIVE_UP_S):
                with suppress(websockets.ConnectionClosed):
                    while True:
                        await talk.socket.recv()
            assert talk.socket.close_code == 1008
        await freed(served)


@pytest.mark.parametrize(("send_timeout_s", "most_unsent"), [(0.2, 100_000), (1000.0, 100)])
async def test_a_client_that_does_not_read_is_dropped(
    send_timeout_s: float, most_unsent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask_socket, "MAX_UNSENT", most_unsent)
    backend = ScriptedBackend("x" * 8_000, is_endless=True)
    limits = limits_of(send_timeout_s=send_timeout_s, max_tokens=8_000, max_queued_tokens=10_000_000)
    async with serving(backend=backend, limits=limits) as served:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect((served.http.base_url.host, served.http.base_url.port))
        async with talking(served, sock=narrow, compression=None) as talk:
            talk.socket.transport.pause_reading()
            long_id = "\U0001f600" * 128
            await talk.send("open", id=long_id, max_tokens=8_000)
            await talk.send("commit", id=long_id, question=QUESTION)
            async with asyncio.timeout(GIVE_UP_S):
                await served.watcher.has_ended.wait()
            assert served.watcher.ended == [("listen", "left")]
        await freed(served)


async def test_a_cancelled_question_makes_room_for_one_that_is_opened_at_once() -> None:
    backend = ScriptedBackend("It is Paris [1].", is_endless=True)
    async with serving(backend=backend, limits=AHEAD) as served, talking(served) as talk:
        await talk.send("open")
        await talk.send("commit", question=QUESTION)
        await talk.next("tokens_generated")
        await talk.send("cancel")
        await talk.send("open", id="b")
        await talk.send("commit", id="b", question=QUESTION)
        frames = await talk.frames("error", "committed")
        assert [(frame["type"], frame["id"]) for frame in frames if frame["type"] != "tokens_generated"] == [
            ("cancelled", "q"),
            ("committed", "b"),
        ]


async def test_a_commit_before_its_retrieval_has_begun_has_no_time() -> None:
    limits = Limits(max_retrievals_ahead=5, max_queries=2)
    async with serving(limits=limits) as served, talking(served) as talk:
        places = served.service._pipeline._admission
        for place in range(2):
            places.acquire_on_behalf_of_nowait(place)
        await talk.send("open")
        await talk.send("partial", question=QUESTION, is_final=True)
        async with asyncio.timeout(GIVE_UP_S):
            while (ahead := served.service.queries_ahead) is None or not ahead.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await talk.send("commit", question=QUESTION)
        assert (await talk.next("committed"))["at_s"] is None
        for place in range(2):
            places.release_on_behalf_of(place)
        assert (await talk.frames("answered"))[0]["type"] == "retrieval_started"


async def test_a_stop_waits_for_answers_and_not_for_uncommitted_questions() -> None:
    hold = anyio.Event()
    backend = ScriptedBackend("It is Paris [1].", hold=hold)
    async with serving(backend=backend, limits=AHEAD) as served, talking(served) as asked, talking(served) as talk:
        await asked.send("open")
        await asked.send("commit", question=QUESTION)
        await asked.next("committed")
        await talk.send("open")
        await talk.send("partial", question=QUESTION, is_final=True)
        await talk.next("context_changed")
        stop = asyncio.create_task(served.service.aclose(drain_s=1000))
        error = await talk.next("error")
        assert (error["id"], error["status"]) == ("q", 503)
        hold.set()
        await asked.next("answered")
        assert await stop


def opening(num_characters: int) -> str:
    """A frame whose one wide character makes Python store all others in four bytes."""
    text = "\U0001f600" + "x" * num_characters
    return json.dumps({"type": "open", "id": "q", "history": [{"role": "user", "content": text}]}, ensure_ascii=False)


async def test_unused_openings_count_by_their_memory_over_all_sockets_of_a_client() -> None:
    num_bytes = memory_of(parse(opening(1000), ask_socket.QuestionFrame))
    limits = limits_of(max_stream_bytes=num_bytes * 5 // 2, max_retrievals_ahead=5)
    async with serving(limits=limits) as served, AsyncExitStack() as sockets:
        talks = [await sockets.enter_async_context(talking(served)) for _ in range(3)]
        for talk in talks[:2]:
            await talk.socket.send(opening(1000))
            await talk.send("cancel", id="other")
            assert (await talk.next("error"))["status"] == 404, "the opening has been read"
        await talks[2].socket.send(opening(1000))
        error = await talks[2].next("error")
        assert (error["status"], error["error"]["code"], error["id"]) == (429, "too_many_waiting", "q")
        await talks[0].send("commit", question=QUESTION)
        await talks[0].next("answered")
        await talks[2].socket.send(opening(1000))  # a question with a place counts as a query
        await talks[2].send("partial", question=QUESTION, is_final=True)
        await talks[2].next("chunk_arrived")
        await talks[0].socket.send(opening(1000))
        await talks[0].send("commit", question=QUESTION)
        await talks[0].next("answered")
        await talks[1].send("cancel")
        await talks[1].next("cancelled")
        await talks[2].socket.close()
        await freed(served)
        account = served.app._accounts["anonymous"]
        assert account._num_bytes == 0


async def test_an_opening_that_is_not_used_ends_after_a_while() -> None:
    async with serving(limits=Limits(idle_s=0.05)) as served, talking(served) as talk:
        await talk.send("open")
        error = await talk.next("error")
        assert (error["status"], error["error"]["code"], error["id"]) == (408, "idle", "q")
        await talk.send("commit", question=QUESTION)
        assert (await talk.next("error"))["error"]["code"] == "ask_not_found"


@pytest.mark.parametrize("field", ["history", "no_field"])
async def test_a_socket_that_waits_holds_no_frame(field: str) -> None:
    text = opening(200_000).replace("history", field)
    async with serving(limits=limits_of(max_stream_bytes=1024)) as served, talking(served) as talk:
        tracemalloc.start()
        try:
            await talk.socket.send(text)
            await talk.next("error")
            await talk.send("cancel", id="other")
            await talk.next("error")
            assert tracemalloc.get_traced_memory()[0] < 400_000
        finally:
            tracemalloc.stop()


def test_the_memory_of_what_is_parsed_is_what_python_takes() -> None:
    for text in (opening(100_000), opening(10), json.dumps({"type": "open", "id": "q", "history": [TURN] * 1000})):
        tracemalloc.start()
        parsed = parse(text, ask_socket.QuestionFrame)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0.7 * held - 3000 < memory_of(parsed) < 1.4 * held + 3000
