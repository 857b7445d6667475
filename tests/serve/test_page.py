"""The page, in a real browser against a service on a real socket."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise

import anyio
import httpx
import pytest

from streamrag import Append, BackendError, Chunk, SourceError, Update
from streamrag.core import Skipped
from streamrag.modes import UpdateMode
from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend, Step
from tests.serve.browsing import QUESTION, browsing
from tests.serve.serving import CHUNKS, PARIS, ROME, serving

OSLO = Chunk("Oslo is the capital of Norway.", "https://geo.example/norway", "Norway", score=0.25)


def expect(*given):
    from playwright.async_api import expect

    return expect(*given)


async def test_the_page_may_load_nothing_from_elsewhere_and_is_kept_by_its_etag() -> None:
    async with serving() as served:
        page = await served.http.get("/")
        policy = page.headers["content-security-policy"]
        for part in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"):
            assert part in policy.split("; ")
        assert "unsafe" not in policy
        parts = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        assert {part.rpartition(".")[2] for part in parts} == {"js", "css", "svg"}
        for part in ("/", *parts):
            whole = await served.http.get(part)
            assert (whole.status_code, whole.headers["content-security-policy"]) == (200, policy)
            kept = await served.http.get(part, headers={"if-none-match": f'"other", W/{whole.headers["etag"]}'})
            assert (kept.status_code, kept.content) == (304, b"")
            assert "://" not in whole.text.replace("http://www.w3.org/2000/svg", "")
        assert (await served.http.post("/")).status_code == 405
        assert (await served.http.get("/page/nothing.js")).status_code == 404
        assert (await served.http.get("/page/../app.py")).status_code == 404


async def test_each_change_of_the_context_says_which_passages_it_has_without_their_text() -> None:
    async with serving([Update((PARIS, ROME)), Update((OSLO, PARIS))], mode=UpdateMode()) as served:
        answer = await served.http.post("/v1/ask", json={"question": QUESTION})
    lines = answer.text.splitlines()
    changes = [json.loads(data[6:]) for name, data in pairwise(lines) if name == "event: context_changed"]
    assert [[(chunk["uri"], chunk["passage"]) for chunk in change["chunks"]] for change in changes] == [
        [(PARIS.uri, 0), (ROME.uri, 0)],
        *[[(OSLO.uri, 0), (PARIS.uri, 0)]] * 2,
    ]
    assert [len(change["chunks"]) for change in changes] == [change["num_chunks"] for change in changes]
    assert changes[0].keys() == {"at_s", "num_chunks", "num_tokens", "num_shared", "num_invalidated", "chunks"}


async def test_passages_and_an_answer_appear_while_they_come_about() -> None:
    more, all_of_it = anyio.Event(), anyio.Event()
    backend = ScriptedBackend(answer="It is Paris [1], not Rome [2, 9].")
    async with (
        serving([Append(PARIS), more, Append(ROME), all_of_it], backend=backend) as served,
        browsing(served.url) as seen,
    ):
        await seen.ask()
        passages = seen.page.locator(".passage")
        await expect(passages).to_have_count(1)
        await expect(seen.page.locator(".state")).to_have_text("Retrieving")
        await expect(seen.page.locator(".bar")).to_have_count(1)
        more.set()
        await expect(passages).to_have_count(2)
        await expect(seen.page.locator(".bar")).to_have_count(2)
        await expect(seen.page.locator(".lane.retrieval .tick")).to_have_count(2)
        await expect(passages.nth(1).locator("h4 a")).to_have_attribute("href", ROME.uri)
        await expect(passages.nth(1).locator("h4 a")).to_have_attribute("rel", "noopener noreferrer nofollow")
        await expect(passages.nth(1).locator(".address")).to_have_text("geo.example/italy")
        await expect(passages.nth(1).locator(".excerpt")).to_have_text(ROME.text)
        all_of_it.set()
        await seen.answered("It is Paris [1], not Rome [2, 9].")
        await expect(seen.page.locator(".number")).to_have_text(["1", "2"])
        for name in ("retrieval", "first", "after", "total"):
            await expect(seen.page.locator(f".t-{name}")).to_have_text(re.compile(r"^\d+\.\d\d? s$"))
        prompt = served.backend.prompts[-1][-1]
        await expect(seen.page.locator(".size")).to_contain_text(f"{len(prompt.token_ids):,} tokens")
        await expect(seen.page.locator(".counts .shared dd")).to_have_text(f"{prompt.num_shared:,}")
        await expect(seen.page.locator(".counts .prefilled dd")).to_have_text(f"{len(prompt.token_ids):,}")
        await expect(seen.page.locator(".overlap")).to_have_text(
            f"When retrieval ended, {prompt.num_shared:,} of the prompt’s {len(prompt.token_ids):,} tokens "
            "had been prefilled."
        )
        await expect(seen.page.locator("#spoken")).to_contain_text("It is Paris [1]")


async def test_citations_light_up_their_passage_and_lead_to_it() -> None:
    backend = ScriptedBackend(answer="It is Paris [1], not Rome [2, 9].")
    async with serving(backend=backend) as served, browsing(served.url) as seen:
        await seen.ask()
        await seen.answered()
        cites = seen.page.locator(".cite")
        await expect(cites).to_have_text(["1", "2"])
        rome = seen.page.locator(".passage").nth(1)
        await cites.nth(1).hover()
        await expect(rome).to_have_class(re.compile(r"\blit\b"))
        await seen.page.mouse.move(0, 0)
        await expect(rome).not_to_have_class(re.compile(r"\blit\b"))
        await cites.nth(1).focus()
        await expect(rome).to_have_class(re.compile(r"\blit\b"))
        await seen.page.keyboard.press("Enter")
        await expect(rome).to_be_focused()
        await seen.page.keyboard.press("Escape")
        await expect(cites.nth(1)).to_be_focused()


async def test_an_update_moves_passages_to_their_rank_and_marks_what_it_drops() -> None:
    more, end = anyio.Event(), anyio.Event()
    steps = [Update((PARIS, ROME)), more, Update((OSLO, ROME)), end]
    async with serving(steps, mode=UpdateMode()) as served, browsing(served.url) as seen:
        await seen.ask()
        titles = seen.page.locator(".passage h4")
        await expect(titles).to_have_text(["France", "Italy"])
        more.set()
        await expect(titles).to_have_text(["Norway", "Italy", "France"])
        await expect(seen.page.locator(".number")).to_have_text(["1", "2", ""])
        await expect(seen.page.locator(".fate")).to_have_text(["", "", "dropped"])
        await expect(seen.page.locator(".score")).to_have_text(["0.250", "", ""])
        await expect(seen.page.locator(".counts .invalidated dd")).not_to_have_text("0")
        end.set()
        await seen.answered()
        await expect(titles).to_have_text(["Norway", "Italy", "France"])


async def test_a_follow_up_takes_the_conversation_along() -> None:
    async with serving() as served, browsing(served.url) as seen:
        await seen.ask()
        await seen.answered("It is Paris [1].")
        await seen.ask("And of Italy?")
        await seen.answered("It is Paris [1].")
        assert [body["question"] for body in seen.bodies] == [QUESTION, "And of Italy?"]
        assert seen.bodies[1]["history"] == [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "It is Paris [1]."},
        ]
        first = seen.page.locator(".turn").first
        await expect(first.locator(".passages")).to_be_hidden()
        await first.locator(".cite").click()
        await expect(first.locator(".passage").first).to_be_focused()
        await seen.page.get_by_role("button", name="New conversation").click()
        await expect(seen.page.locator(".turn")).to_have_count(0)
        await seen.ask()
        await seen.answered("It is Paris [1].")
        assert seen.bodies[2]["history"] == []


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
    with anyio.fail_after(5):
        await wait()


async def test_errors_are_told_in_words_and_can_be_tried_again() -> None:
    steps: list[list[Step]] = [[*CHUNKS, SourceError("the site is gone")], [*CHUNKS]]
    async with serving(lambda query: steps.pop(0)) as served, browsing(served.url) as seen:  # type: ignore[arg-type]
        await seen.ask()
        await expect(seen.page.get_by_role("alert")).to_have_text("Retrieval failed: the site is gone.")
        await expect(seen.page.locator(".passage")).to_have_count(2)
        await seen.page.get_by_role("button", name="Ask again").click()
        await seen.answered("It is Paris [1].")
        await expect(seen.page.locator(".turn")).to_have_count(1)
        assert seen.bodies[1] == {"question": QUESTION, "history": []}


async def test_what_was_said_before_an_error_stays() -> None:
    backend = ScriptedBackend(answer="It is Paris.", error=BackendError("out of memory"))
    async with serving(backend=backend) as served, browsing(served.url) as seen:
        await seen.ask()
        await expect(seen.page.get_by_role("alert")).to_contain_text("out of memory")
        await seen.answered("I")


async def test_what_happened_to_retrieval_is_noted() -> None:
    steps = [Append(PARIS), Skipped("https://geo.example/x", "no HTML"), SourceError("the index is gone")]
    async with serving(steps, on_source_error="answer") as served, browsing(served.url) as seen:
        await seen.ask()
        await seen.answered("It is Paris [1].")
        await expect(seen.page.locator(".notes li")).to_contain_text(
            ["Skipped https://geo.example/x: no HTML", "the index is gone"]
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
        await expect(again).to_be_enabled(timeout=10_000)
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
        await expect(seen.page.get_by_role("alert")).to_have_text("The service is back.", timeout=15_000)
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
        await seen.ask()
        await expect(alert).to_have_text("The service sent something that this page does not understand.")
        assert ["JSON" in complaint for complaint in seen.complaints] == [True]
        seen.complaints.clear()


async def test_the_page_works_under_a_path_of_a_proxy() -> None:
    async with serving() as served, browsing(served.url) as seen:

        async def forward(route):
            await route.continue_(url=route.request.url.replace("/under/a/path", ""))

        await seen.page.route("**/under/a/path/**", forward)
        await seen.page.goto(f"{served.url}/under/a/path/")
        await seen.ask()
        await seen.answered("It is Paris [1].")


HOSTILE = (
    Chunk(
        "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'>", "javascript:window.hit=3", "<b>bold</b>"
    ),
    Chunk("data", "data:text/html,<script>alert(1)</script>", "data"),
    Chunk("user", "https://bank.example@evil.example/a\u202etxt.exe", "\u202egnp.exe\u0000\u0007"),
    Chunk("W" * 5000, "https://long.example/" + "x" * 3000, "V" * 2000),
    Chunk("שלום עולם (1, 2)", "https://rtl.example/שלום", "مرحبا بالعالم"),
    Chunk("\u0301" * 500 + "\u2066\u2067\ufeff", "notes/relative.md", ""),
)


@pytest.mark.parametrize("width", [360, 1280])
async def test_text_of_strangers_stays_text(width: int) -> None:
    backend = ScriptedBackend(answer="<img src=x onerror='window.hit = 4'> [1] \u202eevil\u0007 " + "W" * 150 + " [6]")
    async with (
        serving([Append(chunk) for chunk in HOSTILE], backend=backend) as served,
        browsing(served.url, viewport={"width": width, "height": 800}) as seen,
    ):
        await seen.ask("<img src=x onerror='window.hit = 5'>\u202e" + "q" * 300)
        await seen.answered()
        page = seen.page
        assert await page.evaluate("window.hit") is None
        assert await page.locator("main :is(script, img, b, iframe, style)").count() == 0
        links = await page.locator(".passage a").evaluate_all("all => all.map(a => a.href)")
        assert {httpx.URL(link).host for link in links} == {"evil.example", "long.example", "rtl.example"}
        assert all("@" not in link for link in links)
        await expect(page.locator(".passage h4").nth(0)).to_have_text("<b>bold</b>")
        await expect(page.locator(".passage h4").nth(2)).to_have_text("gnp.exe")
        await expect(page.locator(".address").nth(2)).to_have_text("evil.example/atxt.exe")
        await expect(page.locator(".passage h4").nth(5)).to_have_text("notes/relative.md")
        shown = await page.evaluate("document.body.textContent")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", shown)
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await expect(page.locator(".cite")).to_have_text(["1", "6"])


@pytest.mark.parametrize("width", [390, 1280])
async def test_what_is_read_does_not_jump(width: int) -> None:
    gates = [anyio.Event() for _ in range(3)]
    chunks = [
        Chunk(f"{n}. " + "Some words. " * 60, f"https://a.example/{n}", f"Page {n}", score=n / 10) for n in range(9)
    ]
    steps: Iterable[Step] = [
        Update(tuple(chunks[:3])), gates[0], Update(tuple(chunks[5:2:-1])), gates[1], Update(tuple(chunks)), gates[2],
    ]  # fmt: skip
    async with (
        serving(steps, mode=UpdateMode()) as served,
        browsing(served.url, viewport={"width": width, "height": 900}) as seen,
    ):
        await seen.ask()
        await expect(seen.page.locator(".bar")).to_have_count(1)
        spots = ".turn h2, .answer, .passages, .flow, .counts, .times, .lanes, #composer"
        where = f"[...document.querySelectorAll('{spots}')].map(e => [e.offsetLeft, e.offsetTop, e.offsetWidth])"
        before = await seen.page.evaluate(where)
        for number, gate in enumerate(gates, 2):
            gate.set()
            await expect(seen.page.locator(".bar")).to_have_count(number)
        await seen.answered("It is Paris [1].")
        assert await seen.page.evaluate(where) == before


async def test_everything_can_be_done_with_the_keyboard() -> None:
    async with serving() as served, browsing(served.url) as seen:
        await expect(seen.page.get_by_label("Question", exact=True)).to_be_focused()
        await seen.page.keyboard.type("One line")
        await seen.page.keyboard.press("Shift+Enter")
        await seen.page.keyboard.type("and another")
        await seen.page.keyboard.press("Enter")
        await seen.answered("It is Paris [1].")
        assert seen.bodies[0]["question"] == "One line\nand another"
        names = []
        for _ in range(40):
            await seen.page.keyboard.press("Tab")
            now = "(e => e.getAttribute('aria-label') || e.textContent || e.id)(document.activeElement)"
            names.append(await seen.page.evaluate(now))
            if await seen.page.evaluate("document.activeElement.id") == "question":
                break
        for name in ("passage 1, France", "Passages", "France", "Italy", "New conversation"):
            assert name in names, names
        controls = "[...document.querySelectorAll('button, input, textarea, section, article')]"
        is_named = "e.ariaLabel || e.getAttribute('aria-labelledby') || e.labels?.length || e.textContent.trim()"
        unnamed = f"{controls}.filter(e => !({is_named})).map(e => e.outerHTML)"
        assert await seen.page.evaluate(unnamed) == []
