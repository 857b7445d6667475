"""The page when something goes wrong: in a real browser against a service on a real socket."""

import json
import re

import anyio
import pytest

from streamrag import Append, BackendError, SourceError
from streamrag.core import Skipped
from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend, Step
from tests.serve.browsing import QUESTION, browsing, expect
from tests.serve.serving import CHUNKS, PARIS, serving


@pytest.mark.parametrize("how", ["button", "Escape", "leaving"])
async def test_an_answer_can_be_stopped(how: str) -> None:
    backend = ScriptedBackend(answer="It goes on", is_endless=True)
    async with serving(backend=backend) as served, browsing(served.url) as seen:
        await seen.ask()
        text = seen.page.locator(".answer .text")
        await expect(text).to_have_text("It goes on")
        if how == "button":
            await seen.page.get_by_role("button", name="Stop").click()
        elif how == "Escape":
            await seen.page.keyboard.press("Escape")
        else:
            await seen.page.goto("about:blank")
        await with_timeout(served.watcher.has_ended.wait)
        assert served.watcher.ended == [("ask", "left")]
        assert served.backend.num_requests == 0
        if how != "leaving":
            await seen.answered("It goes on")
            await expect(seen.page.get_by_role("alert")).to_have_text("Stopped.")


async def with_timeout(wait):
    with anyio.fail_after(120):
        await wait()


async def test_errors_are_told_in_words_and_can_be_tried_again() -> None:
    steps: list[list[Step]] = [[*CHUNKS, SourceError("the site is gone")], [*CHUNKS]]
    async with serving(lambda query: steps.pop(0)) as served, browsing(served.url) as seen:  # type: ignore[arg-type]
        await seen.ask()
        await expect(seen.page.get_by_role("alert")).to_contain_text("Retrieval failed; ")
        await expect(seen.page.locator(".passage")).to_have_count(2)
        await seen.page.get_by_role("button", name="Ask again").click()
        await seen.answered("It is Paris [1].")
        await expect(seen.page.locator(".turn")).to_have_count(1)
        assert seen.bodies[1] == {"question": QUESTION, "history": []}


async def test_text_shown_before_an_error_stays() -> None:
    backend = ScriptedBackend(answer="It is Paris.", error=BackendError("out of memory"))
    async with serving(backend=backend) as served, browsing(served.url) as seen:
        await seen.ask()
        await expect(seen.page.get_by_role("alert")).to_contain_text("The engine failed; ")
        await seen.answered("I")


async def test_skipped_pages_and_failed_retrieval_are_noted() -> None:
    steps = [Append(PARIS), Skipped("https://geo.example/x", "no HTML"), SourceError("the index is gone")]
    async with serving(steps, on_source_error="answer") as served, browsing(served.url) as seen:
        await seen.ask()
        await seen.answered("It is Paris [1].")
        await expect(seen.page.locator(".notes li")).to_contain_text(
            ["Skipped https://geo.example/x: no HTML", "retrieval failed"]
        )


async def test_a_service_that_is_full_says_when_to_come_again() -> None:
    waits = anyio.Event()
    async with serving([waits, *CHUNKS], limits=Limits(max_queries=1)) as served, browsing(served.url) as seen:
        async with served.http.stream("POST", "/v1/ask", json={"question": "First?"}):
            await seen.ask()
            await expect(seen.page.get_by_role("alert")).to_contain_text("1 queries are open")
            again = seen.page.get_by_role("button", name=re.compile("Ask again"))
            await expect(again).to_have_text(re.compile(r"Ask again in \d+ s"))
            await expect(again).to_be_disabled()
        waits.set()
        await expect(again).to_be_enabled(timeout=30_000)
        await again.click()
        await seen.answered("It is Paris [1].")


async def test_a_key_is_asked_for_and_kept_for_the_session() -> None:
    async with serving(keys={"s3cret": "alice"}) as served, browsing(served.url) as seen:
        await seen.ask()
        field = seen.page.get_by_label("API key")
        await expect(field).to_be_focused()
        await field.fill("wrong")
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.get_by_role("alert")).to_have_text("The service does not accept this key.")
        await field.fill("s3cret")
        await seen.page.get_by_role("button", name="Use this key").click()
        await seen.answered("It is Paris [1].")
        assert [query.client for query in served.watcher.started] == ["alice"]
        assert await seen.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        await seen.page.reload()
        await seen.ask()
        await seen.answered("It is Paris [1].")
        await seen.page.get_by_role("button", name="Forget the API key").click()
        assert await seen.page.evaluate("sessionStorage.length") == 0


async def test_a_service_that_is_gone_is_noticed_and_so_is_its_return() -> None:
    backend = ScriptedBackend(answer="It goes on", is_endless=True)
    async with serving(backend=backend) as served, browsing(served.url) as seen:
        await seen.page.route("**/v1/ask", lambda route: route.abort())
        await seen.page.route("**/readyz", lambda route: route.abort())
        await seen.ask()
        await expect(seen.page.get_by_role("alert")).to_have_text("The service cannot be reached.")
        again = seen.page.get_by_role("button", name="Ask again")
        await expect(again).to_be_disabled()
        await seen.page.unroute_all()
        await expect(seen.page.get_by_role("alert")).to_have_text("The service is back.", timeout=30_000)
        await again.click()
        await expect(seen.page.locator(".answer .text")).to_have_text("It goes on")
        await served.service.aclose()
        await expect(seen.page.get_by_role("alert")).to_contain_text("stopping")


async def test_a_stream_that_breaks_off_or_comes_from_something_else_is_told_of() -> None:
    chunk = json.dumps({"text": "É", "uri": "x.md", "title": "", "passage": 0, "score": None})
    stream = (
        f': ping\r\n\r\nevent: retrieval_started\r\ndata: {{"at_s": 0,\r\ndata: "query": "?"}}\r\n\r\n'
        f'event: news_of_tomorrow\ndata: {{}}\n\nid: 7\nevent:chunk_arrived\ndata:{{"at_s":1,"chunk":{chunk}}}\n\n'
        f'event: tokens_generated\ndata: {{"at_s": 1.5, "text": "not who'
    )
    async with serving() as served, browsing(served.url) as seen:
        alert = seen.page.get_by_role("alert").last
        answers = [
            {"content_type": "text/event-stream", "body": stream},
            {"content_type": "text/html", "body": "<h1>Bad gateway</h1>", "status": 502},
            {"content_type": "text/event-stream", "body": "event: answered\ndata: {]\n\n"},
        ]
        await seen.page.route("**/v1/ask", lambda route: route.fulfill(**answers.pop(0)))
        await seen.ask()
        await expect(seen.page.locator(".passage .excerpt")).to_have_text("É")
        await expect(alert).to_have_text(re.compile("The connection broke before|The service is back"))
        await seen.ask()
        await expect(alert).to_have_text("The service answered with status 502.")
        async with seen.page.expect_event("pageerror"):
            await seen.ask()
        await expect(alert).to_have_text("The service sent something that this page does not understand.")
        assert ["JSON" in complaint for complaint in seen.complaints] == [True]
        seen.complaints.clear()
