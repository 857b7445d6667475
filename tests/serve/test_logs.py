"""What is logged of queries, and what is not."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote_plus

import anyio
import pytest

from streamrag import Append, SourceError
from streamrag.serve import Limits
from streamrag.serve.observe.logs import HIDDEN, MAX_REFUSED, Form, QueryLog, hide, log_to
from streamrag.testing import ScriptedBackend, Step
from tests.serve.serving import CHUNKS, PARIS, serving

SECRET = "Where is the Sapphire treasure?"
BODY = {"messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, everything set back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    log_to(stream)
    yield stream
    root.handlers[:], root.level = before


def logged(lines: io.StringIO, logger: str = "streamrag.serve.queries") -> list[dict[str, Any]]:
    return [found for line in lines.getvalue().splitlines() if (found := json.loads(line))["logger"] == logger]


async def test_each_query_has_one_line_that_agrees_with_its_answer(lines: io.StringIO) -> None:
    async with serving(CHUNKS, observers=[QueryLog()]) as served:
        answer = await served.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "mine-1"})
    (line,) = logged(lines)
    (found,) = served.watcher.answers
    assert found is not None
    assert line["request_id"] == answer.headers["x-request-id"] == "mine-1"
    assert (line["message"], line["status"], line["level"]) == ("answered", 200, "info")
    assert (line["interface"], line["client"], line["finish_reason"]) == ("chat", "anonymous", "stop")
    assert line["num_chunks"] == 2
    assert line["num_prompt_tokens"] == found.num_prompt_tokens
    assert line["num_output_tokens"] == len(found.token_ids)
    assert line["ttft_s"] == pytest.approx(found.timings.ttft_s, abs=1e-4)
    assert line["retrieval_s"] == pytest.approx(found.timings.retrieval_s, abs=1e-4)
    assert SECRET not in lines.getvalue()
    assert found.text not in lines.getvalue()


def chatting(query: str) -> Iterator[Step]:
    """A source that logs what it is asked, before and after the engine has worked on its first chunk."""
    logging.getLogger("other").info("searching %s", query)
    yield Append(PARIS)
    logging.getLogger("other").warning("fetching https://search.example/?q=%s", quote_plus(query))


async def test_every_line_that_is_logged_for_a_query_has_its_id_and_not_its_question(lines: io.StringIO) -> None:
    async with serving(chatting, observers=[QueryLog()]) as served:
        asking = (
            served.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": name}) for name in ("a", "b")
        )
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]
        logging.getLogger("other").info("nobody asked")
    found = logged(lines, "other")
    assert sorted(line.get("request_id", "-") for line in found) == ["-", "a", "a", "b", "b"]
    assert {line["message"] for line in found} == {
        f"searching {HIDDEN}",
        f"fetching https://search.example/?q={HIDDEN}",
        "nobody asked",
    }


async def test_text_is_logged_if_that_is_switched_on(lines: io.StringIO) -> None:
    log_to(lines, with_text=True)
    async with serving(observers=[QueryLog(with_text=True)]) as served:
        await served.http.post("/v1/chat/completions", json=BODY)
    (line,) = logged(lines)
    assert (line["question"], line["answer"]) == (SECRET, "It is Paris [1].")


@pytest.mark.parametrize(
    ("error", "status", "level", "outcome"),
    [
        (SourceError(f"no site answers {SECRET!r}\nforged: line"), 502, "warning", "source_error"),
        (KeyError(SECRET), 502, "warning", "source_error"),
    ],
)
async def test_an_error_has_its_kind_and_its_reason(
    lines: io.StringIO, error: Exception, status: int, level: str, outcome: str
) -> None:
    async with serving([*CHUNKS, error], observers=[QueryLog()]) as served:
        assert (await served.http.post("/v1/chat/completions", json=BODY)).status_code == status
    (line,) = logged(lines)
    assert (line["message"], line["status"], line["level"], line["error"]) == (outcome, status, level, "SourceError")
    assert HIDDEN in line["reason"]
    assert SECRET not in lines.getvalue()
    assert "traceback" not in line


async def test_an_unexpected_error_is_logged_once_with_a_traceback(lines: io.StringIO) -> None:
    backend = ScriptedBackend(error=ZeroDivisionError(SECRET))
    async with serving(backend=backend, observers=[QueryLog()]) as served:
        answer = await served.http.post("/v1/chat/completions", json=BODY)
    (line,) = logged(lines)
    assert (line["message"], line["status"], line["level"]) == ("internal_error", answer.status_code, "error")
    assert "Traceback" in line["traceback"]
    assert f"ZeroDivisionError: {HIDDEN}" in line["traceback"]
    assert len(lines.getvalue().splitlines()) == 1, "nobody else logs it again"
    assert SECRET not in lines.getvalue()


async def test_a_client_that_leaves_and_one_that_is_refused_have_a_line_each(lines: io.StringIO) -> None:
    waits = anyio.Event()
    async with serving([Append(PARIS), waits], limits=Limits(max_queries=1), observers=[QueryLog()]) as served:
        asking = asyncio.create_task(served.http.post("/v1/chat/completions", json=BODY))
        await served.watcher.has_begun.wait()
        refused = await served.http.post("/v1/chat/completions", json=BODY)
        asking.cancel()
        await asyncio.wait([asking])
        await served.watcher.has_ended.wait()
    assert refused.status_code == 429
    first, second = logged(lines)
    assert (first["message"], first["reason"]) == ("refused", "queries")
    assert (second["message"], second["status"]) == ("left", 499)
    assert "ttft_s" not in second


async def test_a_request_that_is_refused_has_a_line_without_the_client_s_text(lines: io.StringIO) -> None:
    async with serving(observers=[QueryLog()]) as served:
        answer = await served.http.post("/v1/ask", json={"question": SECRET, "x" * 200: SECRET})
        await served.http.post("/v1/chat/completions", json={"messages": [{"role": SECRET}]})
    assert answer.status_code == 400
    first, second = logged(lines)
    assert (first["message"], first["level"], first["status"], first["reason"]) == (
        "refused",
        "info",
        400,
        "invalid_value",
    )
    assert (first["route"], first["client"], first["param"]) == ("/v1/ask", "anonymous", "x" * 80)
    assert first["request_id"] == answer.headers["x-request-id"]
    assert second["param"] == "messages.0.role"
    assert SECRET not in lines.getvalue()


async def test_a_client_has_some_lines_of_refused_requests_in_a_minute(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = QueryLog()
    monkeypatch.setattr("streamrag.serve.observe.logs.MINUTE_S", 1e9)
    async with serving(observers=[log], keys={"key-of-mallory-1": "mallory", "key-of-alice-123": "alice"}) as served:
        for _ in range(MAX_REFUSED + 5):
            await served.http.post("/v1/ask", content=b"{")
        await served.http.post("/v1/ask", content=b"{", headers={"authorization": "Bearer key-of-alice-123"})
        assert [line["client"] for line in logged(lines)] == ["mallory"] * MAX_REFUSED + ["alice"]
        assert [line.get("is_last_of_minute") for line in logged(lines)] == [None] * (MAX_REFUSED - 1) + [True, None]
        log._minute -= 1
        await served.http.post("/v1/ask", content=b"{")
        assert logged(lines)[-1]["client"] == "mallory"


async def test_an_error_of_ours_before_a_query_has_one_line_with_a_traceback(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(observers=[QueryLog()]) as served:
        monkeypatch.setattr("streamrag.serve.protocols.chat.query.model_retrieves", lambda *_: 1 / 0)
        answer = await served.http.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 500
    (line,) = [json.loads(each) for each in lines.getvalue().splitlines()]
    assert (line["message"], line["level"], line["route"]) == ("a request failed", "error", "/v1/chat/completions")
    assert line["request_id"] == answer.headers["x-request-id"]
    assert "ZeroDivisionError" in line["traceback"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_logged_text_cannot_break_its_line_or_steer_a_terminal(lines: io.StringIO, form: Form) -> None:
    log_to(lines, form=form)
    logging.getLogger("other").warning("two\nlines \x1b[31m red \x1b]0;title\x07 \u2028 \u202e end\r\n")
    text = lines.getvalue()
    assert text.count("\n") == len(text.splitlines()) == 1
    assert not any(character in text for character in "\x1b\x07\r\u2028\u202e")


def test_people_see_a_traceback_in_lines(lines: io.StringIO) -> None:
    log_to(lines, form="text")
    try:
        raise ValueError("no\n05:00:00.000 info    serve.queries: answered")
    except ValueError:
        logging.getLogger("streamrag.serve").exception("a request failed")
    first, *more = lines.getvalue().splitlines()
    assert first.endswith("error   serve: a request failed")
    assert more[-2] == "  ValueError: no"
    assert all(line.startswith("  ") for line in more), "nothing looks like another line of the log"


def test_libraries_do_not_log_the_addresses_that_they_ask(lines: io.StringIO) -> None:
    logging.getLogger("httpx").info("HTTP Request: GET https://search.example/?q=secret")
    assert lines.getvalue() == ""


@pytest.mark.parametrize("text", ["What is it?", "What%20is%20it%3F", "what+is+it%3F", "'What is it?'"])
def test_a_question_is_found_in_the_forms_that_addresses_give_it(text: str) -> None:
    assert "it" not in hide(f"<{text}>", " What is it? ")
    assert hide("nothing here", "What is it?") == "nothing here"
