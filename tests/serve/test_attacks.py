"""What a client might try to hurt the service, or others, with."""

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import pytest
import websockets
from prometheus_client import generate_latest

from streamrag.errors import BackendError, EngineDeadError, SourceError
from streamrag.query.options import MAX_QUERY_CHARACTERS
from streamrag.serve import Limits, Live, Metrics
from streamrag.serve.admission import Admission, Reservation
from streamrag.serve.config.factories import make_observers
from streamrag.serve.config.settings import Settings
from streamrag.serve.connections.gate import CALLER, Gate
from streamrag.serve.failures import ENGINE_DIED, ENGINE_FAILED, RETRIEVAL_FAILED, NotAdmittedError
from streamrag.serve.observe.logs import HIDDEN, QueryLog, hide, log_to
from streamrag.telemetry import ContextChanged, ContextComplete, PrefillProgressed
from streamrag.testing import ScriptedBackend, Step
from tests.serve.raw import Raw, raw
from tests.serve.responses.talking import talking
from tests.serve.serving import CHUNKS, limits_of, serving

KEYS = {"key-of-alice-0123456789": "alice", "key-of-mallory-0123456": "mallory"}
ALICE, MALLORY = ({"authorization": f"Bearer {key}"} for key in KEYS)
QUESTION = {"messages": [{"role": "user", "content": "Where is it?"}]}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, everything set back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    log_to(stream)
    yield stream
    root.handlers[:], root.level = before


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1" * 5000])
@pytest.mark.parametrize(
    "field", ['"tools": [{"type": "file_search", "x": %s}]', '"tool_choice": {"type": "auto", "x": %s}']
)
async def test_a_number_that_json_does_not_have_is_refused(field: str, number: str) -> None:
    async with serving() as served:
        for stream in ("false", "true"):
            body = f'{{"input": "Where?", "stream": {stream}, {field % number}}}'
            answer = await served.http.post("/v1/responses", content=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        async with talking(served) as talk:
            await talk.connection.send_raw(f'{{"type": "response.create", "input": "Where?", {field % number}}}')
            (told,) = await talk.events()
            assert (told.type, told.status) == ("error", 400)
            assert (await talk.create("Where?")).status == "completed"


async def test_a_question_that_is_a_word_of_the_log_hides_no_log_line(lines: io.StringIO) -> None:
    words = ["answered", "mallory", "chat", "stop"]
    async with serving(observers=[QueryLog()], keys=KEYS) as served:
        for word in words:
            body = {"messages": [{"role": "user", "content": word}]}
            assert (await served.http.post("/v1/chat/completions", json=body, headers=MALLORY)).status_code == 200
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    ended = [line for line in found if line["logger"] == "streamrag.serve.queries"]
    assert len(ended) == len(words)
    for line in ended:
        said = (line["message"], line["client"], line["interface"], line["finish_reason"])
        assert said == ("answered", "mallory", "chat", "stop")


def test_a_question_of_any_length_is_hidden_without_a_pattern_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "re._compile", lambda *_: pytest.fail("a pattern")
    )  # of 100,000 characters it held up everybody for a second
    question = "Où est l'İle? " * (MAX_QUERY_CHARACTERS // 14)
    for form in (question, question.upper().replace("İ", "İ"), repr(question)):
        assert HIDDEN in hide(f"no page answers {form}", question)
    assert hide("no page answers", question) == "no page answers"


async def test_questions_of_a_session_are_bounded() -> None:
    async with serving() as served:
        url = f"/v1/sessions/{(await served.http.post('/v1/sessions', json={})).json()['id']}"
        long = "x" * (MAX_QUERY_CHARACTERS + 1)
        asked = await served.http.post(f"{url}/ask", json={"question": long})
        watched = await served.http.put(f"{url}/watches/a", json={"question": long})
        chosen = await served.http.put(f"{url}/watches/a", json={"question": "?", "answers": ["x" * 2000]})
        assert [each.status_code for each in (asked, watched, chosen)] == [400, 400, 400]


async def test_tokens_of_one_client_do_not_keep_out_another() -> None:
    much, little = ({"question": "Where is it?", "max_tokens": num} for num in (280, 100))
    async with serving([anyio.Event()], limits=Limits(max_queued_tokens=300), keys=KEYS) as served:
        async with served.http.stream("POST", "/v1/ask", json=much, headers=MALLORY) as greedy:
            assert greedy.status_code == 200
            answer = await served.http.post("/v1/ask", json=little, headers=MALLORY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tokens")
            async with served.http.stream("POST", "/v1/ask", json=little, headers=ALICE) as other:
                assert other.status_code == 200
            answer = await served.http.post("/v1/ask", json=much, headers=ALICE)
            assert answer.status_code == 429, "its share is all that it is sure of"


async def test_clients_that_fill_all_places_do_not_keep_out_another() -> None:
    keys = {name * 16: name for name in "abc"}
    async with (
        serving([anyio.Event()], limits=Limits(max_queries=2), keys=keys) as served,
        raw(served.url) as first,
        raw(served.url) as second,
        raw(served.url) as third,
        raw(served.url) as again,
    ):

        async def status(client: Raw, name: str) -> tuple[int, str]:
            await client.post("/v1/ask", {"question": "What?"}, {"authorization": f"Bearer {name * 16}"})
            code = await client.status()
            return code, "" if code == 200 else json.loads(await client.text())["error"]["code"]

        for client, name in ((first, "a"), (second, "a")):
            assert await status(client, name) == (200, "")
        assert await status(third, "b") == (429, "queries")
        first.writer.close()
        while served.service.admission.num_queries == 2:  # noqa: ASYNC110 -- has no event
            await asyncio.sleep(0)
        assert await status(again, "a") == (429, "client_queries")
        assert await status(third, "b") == (200, "")


def test_places_are_shared_evenly_while_a_client_finds_none() -> None:
    now_s = 0.0
    admission = Admission(Limits(max_queries=8, max_queries_per_client=4), clock=lambda: now_s)

    def come(client: str) -> Reservation | str:
        try:
            return admission.enter(client, max_tokens=1)
        except NotAdmittedError as refused:
            return refused.why

    places = {client: [come(client) for _ in range(4)] for client in ("ada", "bob")}
    assert come("ada") == "client_queries"
    assert come("cleo") == "queries"
    for client in ("ada", "bob", "ada", "bob"):  # each time one of theirs ends, they come again at once
        ended = places[client].pop()
        assert isinstance(ended, Reservation)
        admission.leave(ended, stayed_s=1.0)
        assert come(client) == "client_queries", "it has two, and there are three clients for eight places"
    assert [isinstance(come("cleo"), Reservation) for _ in range(2)] == [True, True]
    assert isinstance(come("dora"), Reservation), "a fourth one finds its place at once"
    now_s = 31.0
    assert isinstance(come("ada"), Reservation), "nobody has been refused for long"


class Name(str):
    """A client's name that counts how often any of them is looked up."""

    num_looks = 0

    def __hash__(self) -> int:
        Name.num_looks += 1
        return super().__hash__()


def test_thousands_of_clients_who_came_once_cost_the_next_one_nothing_and_are_forgotten() -> None:
    now_s = 0.0
    admission = Admission(Limits(max_requests_per_minute=2), clock=lambda: now_s)

    def looks_of(client: Name) -> int:
        before = Name.num_looks
        admission.leave(admission.enter(client, max_tokens=1), stayed_s=1.0)
        return Name.num_looks - before

    looks_of(Name("ada"))
    second = looks_of(Name("eve"))
    for number in range(10_100):
        now_s += 0.001
        looks_of(Name(number))
    assert looks_of(Name("bob")) <= second + 4, "two more when one is forgotten"
    looks_of(Name("ada"))
    with pytest.raises(NotAdmittedError, match="2 queries in 60 s"):
        looks_of(Name("ada"))
    now_s += 61.0
    looks_of(Name("cleo"))
    assert list(admission._usage) == ["cleo"]


def test_prompt_tokens_of_a_client_are_bounded_in_a_minute_and_cost_another_nothing() -> None:
    now_s = 0.0
    admission = Admission(Limits(max_prompt_tokens_per_minute=60_000), clock=lambda: now_s)

    def ask(client: str, *prompts: tuple[int, int]) -> str:
        """Ask, and send these prompts: how many tokens each has, and how many of them the one before had."""
        try:
            place = admission.enter(client, max_tokens=1)
        except NotAdmittedError as refused:
            return f"{refused.why}, {refused.retry_after_s:g} s"
        for num_tokens, num_shared in prompts:
            place.follow(ContextChanged(0.0, 1, num_tokens, num_shared, 0))
        admission.leave(place, stayed_s=0.1)
        return "answered"

    assert ask("ada", (8_000, 0), (10_000, 8_000)) == "answered", "what nobody knows of cannot be refused"
    assert ask("ada", (10_000, 0)) == "client_tokens, 10 s", "longer than the burst: it waits for all before it"
    assert [ask("bob", (100, 0)) for _ in range(40)] == ["answered"] * 40, "four seconds' worth at once"
    assert ask("bob", (100, 0)) == "client_tokens, 0.1 s"
    assert ask("cleo", (100, 0)) == "answered"
    now_s = 10.0
    assert ask("ada", (1_000_000, 0)) == "answered"
    now_s = 69.0
    assert ask("ada", (100, 0)) == "client_tokens, 1 s", "a minute is the longest that anybody waits"
    now_s = 70.0
    assert ask("ada", (100, 0)) == "answered"
    assert admission.enter("ada", max_tokens=1, num_prompt_tokens=0), "retrieval computes no prompt"


def test_queries_of_which_only_the_head_was_computed_hold_back_as_many_tokens_as_before() -> None:
    limits = Limits(max_prompt_tokens_per_minute=60_000, max_queued_tokens=2_500)
    admission = Admission(limits, clock=lambda: 0.0)

    def head_of(client: str, num_tokens: int) -> Reservation:
        place = admission.enter(client, max_tokens=1)
        place.follow(ContextChanged(0.0, 0, num_tokens, 0, 0))
        place.follow(PrefillProgressed(0.0, num_tokens))
        return place

    usual = admission.enter("ada", max_tokens=1)
    usual.follow(ContextChanged(0.0, 1, 1_000, 0, 0))
    admission.leave(usual, stayed_s=0.1)
    num_charged = admission._usage["ada"].num_tokens(0.0)
    places = [head_of("ada", 40) for _ in range(2)]
    assert admission.num_queued_tokens == 2 * (1_000 - 40 + 1)
    assert admission._usage["ada"].num_tokens(0.0) == num_charged + 2 * 1_000
    with pytest.raises(NotAdmittedError, match="tokens wait to be computed"):
        admission.enter("ada", max_tokens=1)
    for place in places:
        admission.leave(place, stayed_s=0.1)
    assert head_of("ada", 40).num_queued_tokens == 1_000 - 40 + 1, "a prompt that ended with its head says nothing"


@pytest.mark.parametrize("num_head", [40, 1_400])
@pytest.mark.parametrize("num_passages", [0, 600])
def test_a_query_whose_head_comes_first_is_charged_for_its_prompts_in_all(num_head: int, num_passages: int) -> None:
    charges: list[int] = []
    place = Reservation("ada", 1_000, 1, False, charges.append)
    num_tokens = num_head + num_passages
    place.follow(ContextChanged(0.0, 0, num_head, 0, 0))
    assert sum(charges) == max(num_head, 1_000)
    place.follow(ContextChanged(0.0, num_passages // 100, num_tokens, num_head, 0))
    place.follow(ContextChanged(0.0, num_passages // 100, num_tokens + 10, num_tokens, 0))
    place.follow(ContextComplete(0.0, num_passages // 100, num_tokens + 10, ()))
    assert sum(charges) == num_tokens + 10
    assert (place.num_context_tokens, place.num_queued_tokens) == (num_tokens + 10, num_tokens + 11)


def test_thousands_of_clients_who_found_no_place_cost_the_next_one_nothing() -> None:
    now_s = 0.0
    admission = Admission(Limits(max_queries=1), clock=lambda: now_s)
    place = admission.enter("ada", max_tokens=1)

    def looks_of(client: Name) -> int:
        before = Name.num_looks
        with pytest.raises(NotAdmittedError, match="1 queries are open"):
            admission.enter(client, max_tokens=1)
        return Name.num_looks - before

    looks_of(Name("bob"))
    second = looks_of(Name("cleo"))
    for number in range(2_000):
        looks_of(Name(number))
    assert looks_of(Name("dora")) == second
    admission.leave(place, stayed_s=1.0)
    now_s = 31.0
    admission.enter("ada", max_tokens=1)
    assert not admission._refused_s[False]


def test_a_key_among_ten_thousand_costs_no_more_than_one() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        return None

    def num_calls(num_keys: int) -> int:
        keys = {f"key-{number}-".ljust(16, "x"): str(number) for number in range(num_keys)}
        gate = Gate(app, limits=Limits(), keys=keys)
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", b"localhost")]}
        scope["headers"] += [(b"authorization", f"Bearer {min(keys)}".encode())]
        calls: list[str] = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            with suppress(StopIteration):
                gate(scope, None, None).send(None)  # type: ignore[arg-type]
        finally:
            sys.setprofile(None)
        assert scope[CALLER].client == "0"
        return len(calls)

    assert num_calls(10_000) < num_calls(1) + 1_000, "the garbage collector's are among them"


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize(("num_keys", "told_apart"), [(0, False), (100, True), (101, False)])
def test_metrics_have_a_line_for_each_client_only_where_they_are_few(num_keys: int, told_apart: bool) -> None:
    keys = {f"{number:016}": f"client {number}" for number in range(num_keys)}
    metrics = make_observers(Settings(), keys)[0][0]
    assert isinstance(metrics, Metrics)
    metrics.query_refused("client 0", "chat", "queries")
    assert (b'client="client 0"' in generate_latest(metrics.registry)) == told_apart


async def test_connections_of_one_client_do_not_push_out_what_is_stored_for_another() -> None:
    async with serving(limits=limits_of(max_states=4), keys=KEYS) as served:
        stored = [
            (await served.http.post("/v1/responses", json={"input": "Where?"}, headers=ALICE)).json()["id"]
            for _ in range(2)
        ]
        async with AsyncExitStack() as sockets:
            for _ in range(6):
                talk = await sockets.enter_async_context(talking(served, MALLORY["authorization"][7:]))
                assert (await talk.create("Where?", store=False)).status == "completed"
            for each in stored:
                assert (await served.http.get(f"/v1/responses/{each}", headers=ALICE)).status_code == 200


async def test_questions_are_shown_to_those_who_asked_them_and_to_operators() -> None:
    async with serving(keys=KEYS, observers=[Live(with_text=True)]) as served:
        await served.http.post("/v1/chat/completions", json=QUESTION, headers=ALICE)
        for key, shown in ((ALICE, True), (MALLORY, False)):
            (ended,) = (await served.http.get("/v1/live", headers=key)).json()["ended"]
            assert ("text" in ended) is shown
    async with serving(keys=KEYS, observers=[Live(with_text=True, clients=["mallory"])]) as served:
        await served.http.post("/v1/chat/completions", json=QUESTION, headers=ALICE)
        (ended,) = (await served.http.get("/v1/live", headers=MALLORY)).json()["ended"]
        assert ended["text"] == "Where is it?"


async def test_a_key_that_is_taken_back_ends_its_websocket() -> None:
    key, other = KEYS
    async with serving(keys=KEYS) as served, talking(served, key) as gone, talking(served, other) as stays:
        assert (await gone.create("Where?")).status == (await stays.create("Where?")).status == "completed"
        served.app.set_keys({other: "mallory"})
        assert (await stays.create("Where?")).status == "completed"
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await gone.create("Where?")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008
        assert not served.service.queries


async def test_a_page_that_may_ask_may_put_a_watch() -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "PUT"}
    async with serving(app_options={"origins": frozenset({"https://app.example"})}) as served:
        answer = await served.http.options("/v1/sessions/x/watches/y", headers=headers)
    assert "PUT" in answer.headers["access-control-allow-methods"]


async def test_open_requests_of_one_client_do_not_keep_out_another() -> None:
    limits = limits_of(max_connections=6, max_connections_per_client=3)
    async with serving(limits=limits, keys=KEYS) as served, AsyncExitStack() as opened:
        url = (await served.http.post("/v1/sessions", json={}, headers=MALLORY)).json()["id"]
        events = f"/v1/sessions/{url}/events"
        for _ in range(2):
            answer = await opened.enter_async_context(served.http.stream("GET", events, headers=MALLORY))
            assert answer.status_code == 200
        async with talking(served, MALLORY["authorization"][7:]) as talk:
            assert (await talk.create("Where?")).status == "completed"
            refused = await served.http.get("/v1/models", headers=MALLORY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_connections")
            assert (await served.http.get("/v1/models", headers=ALICE)).status_code == 200
            assert (await served.http.get("/readyz", headers=MALLORY)).status_code == 200


INSIDE = "postgresql://db.internal:5432/rag: /var/lib/model.bin is gone"


@pytest.mark.parametrize(
    ("steps", "error"),
    [([SourceError(INSIDE)], None), (CHUNKS, BackendError(INSIDE)), (CHUNKS, EngineDeadError(INSIDE))],
)
async def test_internal_details_in_errors_go_to_the_log_and_not_to_the_client(
    lines: io.StringIO, steps: Sequence[Step], error: Exception | None
) -> None:
    asked = {"messages": [{"role": "user", "content": "What?"}]}
    async with serving(steps, backend=ScriptedBackend(error=error), observers=[QueryLog()]) as served:
        for path, body in (
            ("/v1/ask", {"question": "What?"}),
            ("/v1/chat/completions", asked),
            ("/v1/chat/completions", {**asked, "stream": True}),
            ("/v1/responses", {"input": "What?"}),
            ("/v1/responses", {"input": "What?", "stream": True}),
        ):
            before = lines.getvalue().count("db.internal")
            answer = await served.http.post(path, json=body)
            assert "internal" not in answer.text
            assert "/var" not in answer.text
            assert any(why in answer.text for why in (RETRIEVAL_FAILED, ENGINE_FAILED, ENGINE_DIED))
            assert lines.getvalue().count("db.internal") == before + 1, "the log says it, once"


async def test_an_answer_in_spite_of_a_source_says_no_more_of_it() -> None:
    async with serving([*CHUNKS, SourceError(INSIDE)], on_source_error="answer") as served:
        answer = await served.http.post("/v1/ask", json={"question": "What?"})
    assert answer.text.count(RETRIEVAL_FAILED) == 2, "when it failed, and in the answer"
    assert "internal" not in answer.text
