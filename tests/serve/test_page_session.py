"""Sessions in the page: in a real browser against a service on a real socket."""

import asyncio
import errno
import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.browsing import Browsing, browsing, expect
from tests.serve.serving import Serving, serving


async def opened(seen: Browsing, **fields: str) -> str:
    """Its id."""
    await seen.page.get_by_role("link", name="Session").click()
    for label, text in fields.items():
        await seen.page.locator(f"#{label}").fill(text)
    await seen.page.get_by_role("button", name="Open a session").click()
    await expect(seen.page.locator("#regions .stands")).to_contain_text("tokens")
    return str(await seen.page.evaluate("sessionStorage.getItem('streamrag.session')"))


async def append(seen: Browsing, text: str) -> None:
    await seen.page.get_by_label("Data to append").fill(text)
    await seen.page.get_by_role("button", name="Append", exact=True).click()


async def ask(seen: Browsing, question: str, button: str = "Ask") -> None:
    await seen.page.get_by_label("Question about the data").fill(question)
    await seen.page.locator("#questions").get_by_role("button", name=button, exact=True).click()


def prompt_of(served: Serving) -> Any:
    return served.backend.prompts[-1][-1]


async def test_data_are_appended_and_several_questions_asked() -> None:
    backend = ScriptedBackend(answer="It rises.", is_endless=True)
    async with serving(backend=backend) as served, browsing(served.url) as seen:
        page = seen.page
        await expect(page.locator("#session")).to_be_hidden()
        await opened(seen, system="You watch these prices.", window="4000")
        await expect(page.locator("#asking, #composer")).to_have_count(2)
        await expect(page.locator("#composer")).to_be_hidden()
        await page.keyboard.type("one")
        await page.keyboard.press("Enter")
        await append(seen, "two\n\nthree\r\n")
        await expect(page.locator(".lines li")).to_have_text(["three", "two", "one"])
        numbers = await page.locator(".lines li").evaluate_all("all => all.map(each => each.dataset.version)")
        assert numbers == ["3", "2", "1"]
        await expect(page.locator("#regions .stands")).to_contain_text("version 3")
        await ask(seen, "Rising?")
        await ask(seen, "Falling?")
        texts = page.locator("#asks .text")
        await expect(texts).to_have_text(["It rises.", "It rises."])
        await expect(page.locator("#regions dl .ephemeral dd")).to_have_text("2 open")
        assert len(served.service.queries) == 2
        await page.get_by_role("button", name="Stop: Rising?").click()
        await expect(page.locator("#asks .about").last).to_have_text("Stopped.")
        backend._is_endless = False
        await ask(seen, "And now?")
        about = page.locator("#asks .about").first
        await expect(about).to_contain_text("version 3")
        state = (await served.http.get(f"/v1/sessions/{await session_of(seen)}")).json()
        own = len(prompt_of(served).token_ids) - state["num_tokens"]
        await expect(about).to_have_text(re.compile(rf"^version 3, {own} tokens of its own, first token after .* s$"))
        await expect(page.locator("#regions dl .frozen dd")).to_have_text(str(state["num_frozen_tokens"]))
        sliding = state["num_tokens"] - state["num_frozen_tokens"]
        await expect(page.locator("#regions dl .sliding dd")).to_have_text(f"{sliding:,}")
        await expect(page.locator("#regions dl .free dd")).to_have_text(f"{4000 - sliding:,}")
        grown = "['frozen', 'sliding', 'free'].map(n => document.querySelector(`.picture .${n}`).style.flexGrow)"
        assert await page.evaluate(grown) == [str(n) for n in (state["num_frozen_tokens"], sliding, 4000 - sliding)]
        await page.get_by_role("button", name="End the session").click()
        await expect(page.get_by_role("button", name="Open a session")).to_be_visible()
        assert (await served.http.get(f"/v1/sessions/{state['id']}")).status_code == 404
        assert served.backend.num_requests == 0
        await page.get_by_role("link", name="Ask", exact=True).click()
        await expect(page.get_by_label("Question", exact=True)).to_be_focused()


async def test_the_page_says_that_data_were_dropped_or_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = anyio.Event()
    backend = ScriptedBackend(hold=hold)
    async with serving(backend=backend, session_log_dir=tmp_path) as served, browsing(served.url) as seen:
        session = await opened(seen)
        for _ in range(2):
            await served.http.post(f"/v1/sessions/{session}/data", json={"data": ["x"] * 4096})
        await expect(seen.page.locator("#notice")).to_contain_text("chunks of data were dropped")

        def full(file: object, changes: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on <b>device</b>")

        monkeypatch.setattr("streamrag.sessions.log.file.LogFile.write", full)
        await served.http.put(f"/v1/sessions/{session}/watches/alarm", json={"question": "Any?"})
        notice = seen.page.locator("#notice")
        await expect(notice).to_contain_text("cannot store the session's text at the moment: No space left")
        monkeypatch.undo()
        hold.set()


async def session_of(seen: Browsing) -> str:
    return str(await seen.page.evaluate("sessionStorage.getItem('streamrag.session')"))


async def test_a_question_is_kept_answered() -> None:
    backend = ScriptedBackend(answer="no")
    async with serving(backend=backend) as served, browsing(served.url) as seen:
        page = seen.page
        session = await opened(seen)
        await page.get_by_label("When kept, only these answers").fill("yes, no")
        await ask(seen, "Any over 90?", "Keep answered")
        about, text = page.locator("#watches .about"), page.locator("#watches .text")
        await expect(text).to_have_text("no")
        await expect(about).to_have_text(re.compile(r"^since version 0, \d+ s ago$"))
        backend._answer = "yes"
        await served.http.post(f"/v1/sessions/{session}/data", json={"data": ["91"]})  # from elsewhere
        await expect(text).to_have_text("yes")
        await expect(about).to_contain_text("since version 1")
        await expect(page.locator("#spoken")).to_contain_text("Any over 90? yes")
        await ask(seen, "x" * 1500, "Keep answered")  # nothing restricts its answers any more
        await expect(text).to_have_text(["yes", "yes"])
        await page.reload()  # the session is found again
        await expect(page.locator("#watches h4")).to_have_text(["Any over 90?", "x" * 200])
        await expect(about.first).to_contain_text("since version 1")
        await page.get_by_role("button", name="Stop: Any over 90?").click()
        await expect(page.locator("#watches .question")).to_have_count(1)
        assert len((await served.http.get(f"/v1/sessions/{session}")).json()["watches"]) == 1


async def test_a_watch_that_cannot_work_says_why() -> None:
    async with serving() as served, browsing(served.url) as seen:
        await opened(seen)
        await seen.page.get_by_label("When kept, only these answers").fill("yes, yesterday")
        await ask(seen, "Any?", "Keep answered")
        for _ in range(2):
            await expect(seen.page.locator("#watches .about")).to_contain_text("same token")
            await expect(seen.page.locator("#watches h4")).to_have_text("Any?")
            await seen.page.reload()


async def test_a_text_file_is_appended_whole_and_no_faster_than_it_is_taken_in() -> None:
    lines = [f"{number}: " + "é" * (number % 50) for number in range(6000)]
    async with serving() as served, browsing(served.url) as seen:
        page, progress = seen.page, seen.page.locator(".progress")
        session = await opened(seen, window="500")
        content = {"name": "prices.log", "mimeType": "text/plain", "buffer": "\n".join(lines).encode()}
        await page.get_by_label("Append a text file").set_input_files(content)
        await expect(progress).to_have_text("prices.log: all 6,000 lines")
        await expect(page.locator(".lines li").first).to_have_text(lines[-1])
        await expect(page.locator("#feed .count")).to_have_text("6,000 appended")
        state = (await served.http.get(f"/v1/sessions/{session}")).json()
        assert (state["num_appended"], state["num_dropped"]) == (6000, 0)
        await expect(page.locator("#regions dl .slid dd")).not_to_have_text("0")
        for name, data in (("<b>x</b>.png", "\\0\\x01"), ("dropped.txt", "a\\nb")):
            drop = """([name, data]) => {
                const dataTransfer = new DataTransfer();
                dataTransfer.items.add(new File([JSON.parse(`"${data}"`)], name));
                for (const type of ["dragover", "drop"]) document.body.dispatchEvent(
                    new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
            }"""
            await page.evaluate(drop, [name, data.replace("\\0", "\\u0000").replace("\\x01", "\\u0001")])
            said = "<b>x</b>.png is not a text file" if "png" in name else "dropped.txt: all 2 lines"
            await expect(progress).to_have_text(said)
        await expect(page.locator(".lines li").first).to_have_text("b")


HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 2</script>\u202eevil\u0007 " + "W" * 300


@pytest.mark.parametrize("width", [360, 1280])
async def test_hostile_text_in_a_session_stays_text(width: int) -> None:
    backend = ScriptedBackend(answer=HOSTILE)
    viewport = {"width": width, "height": 800}
    async with serving(backend=backend) as served, browsing(served.url, viewport=viewport) as seen:
        page = seen.page
        session = await opened(seen, system=HOSTILE)
        await append(seen, HOSTILE + "\n\ud800 half a letter\n" + "שלום (1, 2)")
        await ask(seen, HOSTILE, "Keep answered")
        await ask(seen, HOSTILE)
        await served.http.put(
            f"/v1/sessions/{session}/watches/%3Cimg%20src=x%3E",
            json={"question": HOSTILE, "answers": [HOSTILE, HOSTILE + "x"]},
        )
        await expect(page.locator("#asks .about")).to_contain_text("version")
        await expect(page.locator("#watches .text")).to_have_count(2)
        await expect(page.locator("#watches .failed .about")).to_contain_text("same token")
        await expect(page.locator(".lines li")).to_have_count(3)
        assert await page.evaluate("window.hit") is None
        assert await page.locator("main :is(script, img, b, iframe, style)").count() == 0
        for place in ("#watches .text", "#asks .text", "#asks h4", ".lines li >> nth=2"):
            await expect(page.locator(place).first).to_contain_text("<img src=x onerror='window.hit = 1'>")
        shown = await page.evaluate("document.body.textContent")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", shown)
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


async def test_a_session_is_opened_with_a_key() -> None:
    async with serving(keys={"s3cret/+": "alice"}) as served, browsing(served.url) as seen:
        page = seen.page
        await page.get_by_role("link", name="Session").click()
        await page.get_by_role("button", name="Open a session").click()
        field = page.get_by_label("API key")
        await field.fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("The service does not accept this key.")
        await field.fill("s3cret/+")
        await page.get_by_role("button", name="Use this key").click()
        await ask(seen, "Rising?")
        await expect(page.locator("#asks .text")).to_have_text("It is Paris [1].")
        assert [query.client for query in served.watcher.started] == ["alice"]


async def test_a_connection_that_breaks_is_made_again_and_a_session_that_ends_is_told_of() -> None:
    async with serving(backend=ScriptedBackend(answer="no")) as served, browsing(served.url) as seen:
        page, routes = seen.page, []

        def connect(route: Any) -> None:
            route.connect_to_server()
            routes.append(route)

        await page.route_web_socket(re.compile("/socket"), connect)
        session = await opened(seen)
        await append(seen, "one")
        await expect(page.locator("#regions .stands")).to_contain_text("version 1")
        served.backend._is_endless = True
        await ask(seen, "Rising?")
        await expect(page.locator("#asks .text")).to_have_text("no")
        await routes[0].close(code=1012)
        await expect(page.locator("#asks .about")).to_have_text("The connection broke before the answer.")
        await served.http.post(f"/v1/sessions/{session}/data", json={"data": ["two"]})
        await expect(page.locator("#regions .stands")).to_contain_text("version 2")
        await expect(page.locator("#notice")).to_have_text("")
        assert [route.url.partition("?")[2] for route in routes] == ["last_event_id=0", "last_event_id=1"]
        await served.http.delete(f"/v1/sessions/{session}")
        await expect(page.locator("#opening .note")).to_have_text("The session has ended.")
        await page.reload()
        await expect(page.get_by_role("button", name="Open a session")).to_be_visible()


async def test_a_session_that_cannot_be_had_at_the_moment_is_asked_for_again() -> None:
    async with serving() as served, browsing(served.url) as seen:
        page, routes = seen.page, []
        error = {"message": "another service has this session: ask that one", "code": "session_in_use"}
        is_back = asyncio.Event()

        async def connect(route: Any) -> None:
            routes.append(route)
            if len(routes) == 2:
                route.send(json.dumps({"type": "error", "status": 409, "error": error}))
                await expect(page.locator("#notice")).to_have_text("Another service has this session: ask that one.")
                await route.close(code=1008)
                return
            route.connect_to_server()
            if len(routes) == 3:
                is_back.set()

        await page.route_web_socket(re.compile("/socket"), connect)
        session = await opened(seen)
        await routes[0].close(code=1001)
        await is_back.wait()
        await expect(page.locator("#notice")).to_have_text("")
        await append(seen, "one")
        await expect(page.locator("#regions .stands")).to_contain_text("version 1")
        assert await session_of(seen) == session


async def test_a_service_with_too_many_sessions_says_so() -> None:
    async with serving(limits=Limits(max_sessions=0)) as served, browsing(served.url) as seen:
        await seen.page.get_by_role("link", name="Session").click()
        await seen.page.get_by_role("button", name="Open a session").click()
        await expect(seen.page.get_by_role("alert")).to_contain_text("close one")
