"""The page, in a real browser against a service on a real socket."""

import json
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import httpx
import pytest

from streamrag import Append, Chunk, Prompt, SamplingParams, Update
from streamrag.core import AnswerChunk, BackendEvent
from streamrag.modes import UpdateMode
from streamrag.serve.protocols.event_encoder import event_values
from streamrag.telemetry import DraftChanged
from streamrag.testing import ScriptedBackend, Step
from tests.serve.browsing import QUESTION, browsing, expect
from tests.serve.serving import PARIS, ROME, serving

OSLO = Chunk("Oslo is the capital of Norway.", "https://geo.example/norway", "Norway", score=0.25)


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


async def test_each_change_of_the_context_says_which_passages_come_and_go_without_their_text() -> None:
    contexts = ([PARIS, ROME], [OSLO, PARIS], [OSLO, ROME, PARIS], [OSLO, PARIS], [OSLO, PARIS, ROME])
    async with serving([Update(tuple(each)) for each in contexts], mode=UpdateMode()) as served:
        answer = await served.http.post("/v1/ask", json={"question": QUESTION})
    lines = answer.text.splitlines()
    changes = [json.loads(data[6:]) for name, data in pairwise(lines) if name == "event: context_changed"]
    context: list[dict[str, Any]] = []
    seen = []
    for change in changes:
        splice = change["splice"]
        context[splice["at"] : splice["at"] + splice["num_removed"]] = splice["chunks"]
        seen.append([chunk["uri"] for chunk in context])
        assert len(context) == change["num_chunks"]
    assert [each for i, each in enumerate(seen) if seen[i - 1 : i] != [each]] == [
        [],  # of the head
        *([chunk.uri for chunk in each] for each in contexts),
    ]
    num_sent = [len(change["splice"]["chunks"]) for change in changes]
    assert num_sent == [0, 2, 2, 1, 0, 1, 0], "what stays is not told again"
    assert changes[0].keys() == {"at_s", "num_chunks", "num_tokens", "num_shared", "num_invalidated", "splice", "unit"}


async def test_passages_and_the_answer_appear_as_they_arrive() -> None:
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
        await expect(seen.page.locator(".bar")).to_have_count(2)  # the head's is the first
        more.set()
        await expect(passages).to_have_count(2)
        await expect(seen.page.locator(".bar")).to_have_count(3)
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
            f"had been prefilled. The model read {len(prompt.token_ids):,} tokens and wrote 33."
        )
        await expect(seen.page.locator("#spoken")).to_contain_text("It is Paris [1]")


class DraftingBackend(ScriptedBackend):
    """Verifies drafts, which it finishes or not. Its answer waits for `rest` before its second half."""

    def __init__(self, rest: anyio.Event, *, finishes_drafts: bool = False) -> None:
        super().__init__()
        self.model = replace(self.model, verifies_drafts=True)
        self.rest = rest
        self.finishes_drafts = finishes_drafts

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        newest = [prompt async for prompt in prompts][-1]
        if newest.request_class == "draft":
            yield AnswerChunk("It is Paris [1].", (1, 2), "stop" if self.finishes_drafts else None)
            if not self.finishes_drafts:
                await anyio.sleep_forever()
            return
        yield AnswerChunk("It is Paris", (1,))
        await self.rest.wait()
        yield AnswerChunk(" [1], surely.", (3,), "stop")


async def test_a_draft_is_grey_until_it_is_confirmed_or_gone() -> None:
    all_of_it, rest = anyio.Event(), anyio.Event()
    options = {"backend": DraftingBackend(rest), "overlap": True, "answer_ahead": True}
    async with serving([Append(PARIS), all_of_it], **options) as served, browsing(served.url) as seen:
        await seen.ask()
        draft = seen.page.locator(".answer .draft")
        await expect(draft).to_have_text("It is Paris [1].")
        await expect(seen.page.locator(".state")).to_have_text("Drafting")
        all_of_it.set()
        await expect(draft).to_have_text("[1].")
        await expect(seen.page.locator(".answer .text")).to_have_text("It is Paris [1].")
        grey, black = [
            await seen.page.locator(f".answer {place}").evaluate("each => getComputedStyle(each).color")
            for place in (".draft", ".text")
        ]
        assert grey != black
        rest.set()
        await seen.answered("It is Paris [1], surely.")
        await expect(draft).to_have_text("")
        await expect(seen.page.locator(".cite")).to_have_text(["1"])


async def test_a_finished_draft_turns_black_at_once_if_nothing_changed() -> None:
    all_of_it, rest = anyio.Event(), anyio.Event()
    options = {"backend": DraftingBackend(rest, finishes_drafts=True), "overlap": True, "answer_ahead": True}
    async with serving([Append(PARIS), all_of_it], **options) as served, browsing(served.url) as seen:
        await seen.ask()
        draft = seen.page.locator(".answer .draft")
        await expect(draft).to_have_text("It is Paris [1].")
        all_of_it.set()
        await seen.answered("It is Paris [1].")
        await expect(draft).to_have_text("")
        await expect(seen.page.locator(".cite")).to_have_text(["1"])


def test_a_draft_is_told_with_the_addresses_of_its_passages_and_not_their_text() -> None:
    reference = {"uri": PARIS.uri, "passage": PARIS.passage}
    told = event_values(DraftChanged(1.5, "It is Paris [1].", (PARIS,)))
    assert told == {"at_s": 1.5, "text": "It is Paris [1].", "chunks": [reference]}


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
async def test_hostile_text_on_the_page_stays_text(width: int) -> None:
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
async def test_the_page_does_not_jump_when_updates_arrive(width: int) -> None:
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
        await expect(seen.page.locator(".bar")).to_have_count(2)  # of the head and the first passages
        spots = ".turn h2, .answer, .passages, .flow, .counts, .times, .lanes, #composer"
        where = f"[...document.querySelectorAll('{spots}')].map(e => [e.offsetLeft, e.offsetTop, e.offsetWidth])"
        before = await seen.page.evaluate(where)
        for number, gate in enumerate(gates, 3):
            gate.set()
            await expect(seen.page.locator(".bar")).to_have_count(number)
        await seen.answered("It is Paris [1].")
        assert await seen.page.evaluate(where) == before


async def test_the_answer_stands_above_the_passages_on_a_phone() -> None:
    async with serving() as served, browsing(served.url, viewport={"width": 390, "height": 844}) as seen:
        await seen.ask()
        await seen.answered("It is Paris [1].")
        places = "['.turn h2', '.answer', '.passages', '.flow'].map(e => document.querySelector(e).offsetTop)"
        tops = await seen.page.evaluate(places)
        assert tops == sorted(tops)


async def test_the_page_can_be_used_with_the_keyboard_alone() -> None:
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
