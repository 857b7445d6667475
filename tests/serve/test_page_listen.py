"""The page while somebody types: in a real browser against a service on a real socket."""

import asyncio
import json
import re
from typing import Any

import anyio
import pytest

from streamrag import Append
from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.browsing import QUESTION, Browsing, browsing, expect
from tests.serve.serving import CHUNKS, PARIS, ROME, Serving, serving
from tests.serve.test_ask_socket import AHEAD, GIVE_UP_S, freed, text_of


async def type_text(seen: Browsing, text: str) -> None:
    await seen.page.get_by_label("Question", exact=True).fill(text)


async def started(served: Serving, num: int) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while len(served.source.queries) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_passages_found_while_typing_are_shown_and_used_for_the_answer() -> None:
    more = anyio.Event()
    async with (
        serving([more, *CHUNKS], limits=AHEAD, overlap=True) as served,
        browsing(served.url) as seen,
    ):
        ahead = seen.page.locator("#ahead")
        await expect(ahead).to_be_hidden()
        await type_text(seen, QUESTION)
        await expect(ahead).to_have_text("Searching …")
        more.set()
        await expect(ahead).to_have_text("Found so far: France, Italy")
        assert not any(prompt.is_complete for prompts in served.backend.prompts for prompt in prompts)
        await asyncio.sleep(0.3)
        await seen.page.get_by_role("button", name="Ask", exact=True).click()
        await seen.answered("It is Paris [1].")
        await expect(ahead).to_be_hidden()
        await expect(seen.page.locator(".passage h4")).to_have_text(["France", "Italy"])
        await expect(seen.page.locator(".number")).to_have_text(["1", "2"])
        words = re.compile(r"^Retrieval began \d\.\d\d s before you asked\. When retrieval ended, ")
        await expect(seen.page.locator(".overlap")).to_have_text(words)
        first = await seen.page.locator(".t-first").text_content()
        assert float(first.removesuffix(" s")) < float((await seen.page.locator(".t-retrieval").text_content())[:-2])
        assert served.source.queries == [QUESTION]
        assert seen.bodies == [], "nothing was asked in the other way"
        await expect(seen.page.locator("#spoken")).to_contain_text("It is Paris [1]")


async def test_a_changed_question_is_answered_from_its_own_passages() -> None:
    steps = lambda query: [Append(PARIS if "France" in query else ROME)]  # noqa: E731
    async with serving(steps, limits=AHEAD, overlap=True) as served, browsing(served.url) as seen:
        await type_text(seen, "What is the capital of Italy?")
        await expect(seen.page.locator("#ahead")).to_have_text("Found so far: Italy")
        await seen.ask()
        await seen.answered("It is Paris [1].")
        await expect(seen.page.locator(".passage h4")).to_have_text(["France"])
        await expect(seen.page.locator(".overlap")).not_to_contain_text("before you asked")
        assert (served.source.queries[-1], seen.bodies) == (QUESTION, [])


async def test_a_follow_up_is_retrieved_for_with_the_conversation() -> None:
    async with serving(limits=AHEAD, overlap=True) as served, browsing(served.url) as seen:
        await type_text(seen, QUESTION)
        await started(served, 1)
        await seen.ask()
        await type_text(seen, "And of Italy, the country?")
        await seen.answered("It is Paris [1].")
        await started(served, 2)
        await expect(seen.page.locator("#ahead")).to_contain_text("Found so far")
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.locator(".turn")).to_have_count(2)
        await seen.answered("It is Paris [1].")
        prompt = text_of(served.backend.prompts[-1][-1].token_ids)
        assert QUESTION in prompt
        assert "It is Paris [1]." in prompt
        await type_text(seen, "And of Norway, the country?")
        await started(served, 3)
        await seen.page.get_by_role("button", name="New conversation").click()
        await freed(served)
        await seen.ask("And of Norway, the country?")
        await seen.answered("It is Paris [1].")
        assert QUESTION not in text_of(served.backend.prompts[-1][-1].token_ids)


async def test_an_empty_field_begins_no_query_and_clearing_it_frees_all() -> None:
    async with serving(limits=AHEAD, overlap=True) as served, browsing(served.url) as seen:
        sockets: list[Any] = []
        seen.page.on("websocket", lambda socket: sockets.append(socket))
        await type_text(seen, "  \n ")
        await asyncio.sleep(0.3)
        assert sockets == []
        await type_text(seen, QUESTION)
        await started(served, 1)
        await type_text(seen, " ")
        await freed(served)
        await expect(seen.page.locator("#ahead")).to_be_hidden()
        assert [end for _, end in served.watcher.ended] == ["left"]


async def test_the_page_does_not_listen_unless_the_service_retrieves_ahead() -> None:
    async with serving() as served, browsing(served.url) as seen:
        sockets: list[Any] = []
        seen.page.on("websocket", lambda socket: sockets.append(socket))
        await type_text(seen, QUESTION)
        await asyncio.sleep(0.6)
        await seen.ask()
        await seen.answered("It is Paris [1].")
        assert (sockets, len(seen.bodies)) == ([], 1)


async def test_without_a_socket_questions_are_asked_as_before() -> None:
    keys = {"s3cret": "alice"}
    async with serving(limits=AHEAD, keys=keys, overlap=True) as served, browsing(served.url) as seen:
        await seen.ask()
        await seen.page.get_by_label("API key").fill("s3cret")
        await seen.page.get_by_role("button", name="Use this key").click()
        await seen.answered("It is Paris [1].")
        assert [query.interface for query in served.watcher.started] == ["ask"]
        await type_text(seen, "And of Italy, the country?")
        await started(served, 2)
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.locator(".turn")).to_have_count(2)
        await seen.answered("It is Paris [1].")
        assert [query.client for query in served.watcher.started if query.interface == "listen"] == ["alice"]
        await type_text(seen, "And of Norway, the country?")
        await started(served, 3)
        await seen.page.get_by_role("button", name="Forget the API key").click()
        await freed(served)
        await type_text(seen, QUESTION)
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.get_by_role("alert")).to_have_text("The service requires an API key.")
        assert len(served.source.queries) == 3
        seen.complaints.clear()  # Chromium's, about the refused handshake


async def test_a_service_that_is_full_says_when_to_come_again_and_searches_meanwhile_in_vain() -> None:
    waits = anyio.Event()
    limits = Limits(max_retrievals_ahead=5, max_queries=1)
    async with serving([waits, *CHUNKS], limits=limits) as served, browsing(served.url) as seen:
        async with served.http.stream("POST", "/v1/ask", json={"question": "First?"}):
            await seen.page.get_by_label("Question", exact=True).press_sequentially("What is the capital", delay=20)
            async with asyncio.timeout(GIVE_UP_S):
                while not served.watcher.refused:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert served.watcher.refused == [("anonymous", "listen", "queries")], "not at each key"
            await seen.ask()
            await expect(seen.page.get_by_role("alert")).to_contain_text("1 queries are open")
            again = seen.page.get_by_role("button", name=re.compile("Ask again"))
            await expect(again).to_have_text(re.compile(r"Ask again in \d+ s"))
        waits.set()
        await expect(again).to_be_enabled(timeout=30_000)
        await again.click()
        await seen.answered("It is Paris [1].")


async def test_an_answer_can_be_stopped_and_a_broken_connection_is_told_of() -> None:
    backend = ScriptedBackend(answer="It goes on", is_endless=True)
    async with serving(backend=backend, limits=AHEAD, overlap=True) as served, browsing(served.url) as seen:
        for num, what in enumerate(("Who?", "Why?"), 1):
            await type_text(seen, f"{what} {QUESTION}")
            await started(served, num)
            await seen.page.keyboard.press("Enter")
            text = seen.page.locator(".turn").last.locator(".answer .text")
            await expect(text).to_have_text("It goes on")
            if num == 1:
                await seen.page.keyboard.press("Escape")
                await expect(seen.page.get_by_role("alert")).to_have_text("Stopped.")
                await freed(served)
            else:
                await seen.page.route("**/readyz", lambda route: route.abort())
                await served.service.aclose()
                await expect(seen.page.get_by_role("alert").last).to_contain_text("stopping")
            await expect(text).to_have_text("It goes on")


@pytest.mark.parametrize("when", ["typing", "answering"])
async def test_a_socket_that_breaks_is_fallen_back_from_or_told_of(when: str) -> None:
    async with serving(limits=AHEAD, overlap=True) as served, browsing(served.url) as seen:
        routes: list[Any] = []

        def handle(route: Any) -> None:
            routes.append(route)
            server = route.connect_to_server()

            def pass_on(message: str) -> None:
                if when == "answering" and json.loads(message)["type"] == "tokens_generated":
                    asyncio.ensure_future(route.close())  # noqa: RUF006
                else:
                    route.send(message)

            server.on_message(pass_on)

        await seen.page.route_web_socket("**/v1/ask/socket", handle)
        await type_text(seen, QUESTION)
        await expect(seen.page.locator("#ahead")).to_contain_text("Found so far")
        if when == "typing":
            await routes[0].close()
            await expect(seen.page.locator("#ahead")).to_be_hidden()
        await seen.page.get_by_role("button", name="Ask", exact=True).click()
        if when == "typing":
            await seen.answered("It is Paris [1].")
            assert len(seen.bodies) == 1
        else:
            await expect(seen.page.get_by_role("alert")).to_contain_text(re.compile("connection broke|is back"))
            await seen.page.get_by_role("button", name="Ask again").click()
            await seen.answered("It is Paris [1].")


async def test_an_error_that_crosses_the_question_leaves_nothing_behind() -> None:
    backend = ScriptedBackend(answer="It goes on", is_endless=True)
    async with serving(backend=backend, limits=AHEAD, overlap=True) as served, browsing(served.url) as seen:

        def handle(route: Any) -> None:
            server = route.connect_to_server()

            def pass_on(message: str) -> None:
                server.send(message)
                if (frame := json.loads(message))["type"] == "commit":
                    route.send(json.dumps({**frame, "type": "error", "status": 429, "error": {"message": "too many"}}))

            route.on_message(pass_on)

        await seen.page.route_web_socket("**/v1/ask/socket", handle)
        await type_text(seen, QUESTION)
        await expect(seen.page.locator("#ahead")).to_contain_text("Found so far")
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.get_by_role("alert")).to_contain_text("Too many")
        await freed(served)


@pytest.mark.parametrize("width", [360, 1280])
async def test_hostile_titles_found_while_typing_move_nothing_and_stay_text(width: int) -> None:
    hostile = [
        Append(
            PARIS.__class__("x", f"https://a.example/{n}", f"<img src=x onerror='window.hit=1'>\u202e{n}" + "W" * 200)
        )
        for n in range(9)
    ]
    async with (
        serving(hostile, limits=AHEAD, overlap=True) as served,
        browsing(served.url, viewport={"width": width, "height": 700}) as seen,
    ):
        box = "(r => [r.x, r.y, r.width, r.height])(document.querySelector(each).getBoundingClientRect())"
        where = f"['#question', '#send', '#welcome'].map(each => {box})"
        before = await seen.page.evaluate(where)
        await type_text(seen, QUESTION)
        await expect(seen.page.locator("#ahead")).to_contain_text("Found so far: <img")
        assert await seen.page.evaluate(where) == before
        assert await seen.page.evaluate("[window.hit ?? null, document.documentElement.scrollWidth - innerWidth]") == [
            None,
            0,
        ]
        assert "\u202e" not in await seen.page.locator("#ahead").text_content()
