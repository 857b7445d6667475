import asyncio
import gc
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import pytest_asyncio
from crawls import QUERY, NewSource, crawl, cut_short, maker, paths, reasons, text
from hostile_pages import TEXT, attributes
from source_helpers import alive, until
from website import Website

import streamrag
from streamrag.core import Append, CutShort, Skipped, SourceEvent
from streamrag.errors import (
    ConfigurationError,
    MissingDependencyError,
    SourceError,
    UnreachableError,
    UnsafeUrlError,
    WorkerError,
)
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.start_urls import StartUrls
from streamrag.sources.crawl.web import WebSource
from streamrag.sources.http import ssrf_guard
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.page import Page

pytest.importorskip("crawl4ai")
pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = "<p>Penguins swim.</p>" + attributes(1_000_000)
"""A page that takes a worker many seconds to read."""

WORKERS_OWN_TASKS = {"crawl worker start", "crawl worker stderr", "crawl worker end"}
"""Tasks of workers that are being replaced."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[WebSource]:
    """A source whose two workers the tests share: they take a second to start."""
    source = WebSource(["http://docs.example/"], CrawlOptions(max_page_cpu_s=60))
    await source.start(lambda line: None)
    yield source
    await source.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def site() -> AsyncIterator[Website]:
    async with Website().running() as site:
        yield site


@pytest_asyncio.fixture(loop_scope="module")
async def new(started: WebSource, site: Website) -> AsyncIterator[NewSource]:
    """Makes sources; when the test is over, nothing of their crawls may be left."""
    before = asyncio.all_tasks()
    gc.freeze()
    yield maker(started, site)
    left = {task.get_name() for task in asyncio.all_tasks() - before}
    assert {name for name in left if name.startswith("crawl") and name not in WORKERS_OWN_TASKS} == set()
    assert num_busy(started) == 0
    if not site.is_browsed:
        await site.until_all_closed()
    gc.collect()
    gc.unfreeze()


def num_busy(source: WebSource) -> int:
    assert source._workers
    return source._workers.num_busy


# ------------------------------------------------------------------------------------------------------------ the crawl


async def test_pages_are_followed_and_each_gives_a_chunk(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/a", "/b"))
    site.add("/a", text("King", "/deep"))
    site.add("/b", text("Adelie"))
    site.add("/deep", text("Gentoo", "/too-deep"))
    events = await crawl(new())
    assert sorted(paths(events)) == ["/", "/a", "/b", "/deep"]
    assert len(events) == 4
    first = events[0]
    assert isinstance(first, Append)
    assert first.chunk.uri == site.url("/")
    assert first.chunk.title == "Emperor"
    assert first.chunk.passage == 0
    assert first.chunk.text.startswith("# Emperor\n\nEmperor penguins swim in their very own way.")
    assert "/too-deep" not in site.paths


@pytest.mark.parametrize(("max_depth", "expected"), [(0, ["/"]), (1, ["/", "/a"])])
async def test_links_are_followed_to_the_given_depth(
    site: Website, new: NewSource, max_depth: int, expected: list[str]
) -> None:
    site.add("/", text("Emperor", "/a"))
    site.add("/a", text("King", "/deep"))
    assert paths(await crawl(new(max_depth=max_depth))) == expected


async def test_no_more_pages_are_asked_for_than_allowed(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", *(f"/{i}" for i in range(9))))
    events = await crawl(new(max_pages=4))
    assert len(site.requests) == len(events) == 4


async def test_start_urls_over_the_limit_are_reported(site: Website, new: NewSource) -> None:
    urls = [site.add(f"/{i}", text(f"{i}th")) for i in range(3)]
    events = await crawl(new(urls, max_pages=2))
    assert sorted(paths(events)) == ["/0", "/1"]
    assert reasons(events) == {"/2": "max_pages=2 is less than the number of start URLs"}


@pytest.mark.parametrize(("same_host", "expected"), [(True, ["/"]), (False, ["/", "/other"])])
async def test_other_hosts_are_followed_only_on_request(
    site: Website, new: NewSource, same_host: bool, expected: list[str]
) -> None:
    site.add("/", text("Emperor", site.url("/other", host="localhost")))
    site.add("/other", text("King"))
    assert paths(await crawl(new(same_host=same_host))) == expected


async def test_a_start_url_may_redirect_to_the_sites_real_host(site: Website, new: NewSource) -> None:
    site.add_redirect("/", site.url("/home", host="localhost"))
    site.add("/home", text("Emperor", "/a", site.url("/b")))
    site.add("/a", text("King", "/away"))
    site.add("/b", text("Adelie"))
    site.add_redirect("/away", f"http://127.0.0.2:{site.port}/")
    events = await crawl(new())
    assert sorted(paths(events)) == ["/a", "/b", "/home"]
    assert reasons(events) == {"/away": f"it redirects to another host: http://127.0.0.2:{site.port}/"}


async def test_each_page_is_asked_for_once_however_it_is_spelled(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/a", "/a#x", site.url("/a").upper().replace("/A", "/a"), "/", "/moved", "/old"))
    site.add("/a", text("King"))
    site.add_redirect("/moved", "/a")
    site.add_redirect("/old", "/new")
    site.add("/new", text("Adelie"))
    events = await crawl(new())
    assert sorted(site.paths) == ["/", "/a", "/moved", "/new", "/old"]
    assert reasons(events) == {"/moved": f"it redirects to {site.url('/a')}, which is visited already"}


async def test_the_target_of_a_redirect_is_not_fetched_again(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/old", "/hub"))
    site.add_redirect("/old", "/new")
    site.add("/new", text("King"))
    site.add("/hub", text("Adelie", "/new"))
    gate = site.add_gate("/hub")
    async with asyncio.timeout(120), aclosing(new().stream(QUERY)) as stream:
        async for event in stream:
            if paths([event]) == ["/new"]:
                gate.set()
    assert sorted(site.paths) == ["/", "/hub", "/new", "/old"]


async def test_pages_come_in_the_order_in_which_they_arrive(site: Website, new: NewSource) -> None:
    """A slow page holds up neither the others nor the pages behind them: there is no barrier between levels."""
    site.add("/", text("Emperor", "/slow", "/fast"))
    site.add("/slow", text("King"))
    site.add("/fast", text("Adelie", "/deep"))
    site.add("/deep", text("Gentoo"))
    gate = site.add_gate("/slow")
    events: list[SourceEvent] = []
    async with asyncio.timeout(120), aclosing(new().stream(QUERY)) as stream:
        async for event in stream:
            events.append(event)
            if paths(events) == ["/", "/fast", "/deep"]:
                gate.set()
    assert paths(events) == ["/", "/fast", "/deep", "/slow"]


async def test_the_hint_counts_the_pages_under_way(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/a", "/b"))
    site.add("/a", text("King"))
    site.add("/b", text("Adelie"))
    events = await crawl(new())
    assert [event.hint.num_chunks for event in events if isinstance(event, Append) and event.hint] == [2, 1, 0]


async def test_pages_are_fetched_side_by_side_up_to_the_limit(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", *(f"/{i}" for i in range(5))))
    gates = [site.add_gate(f"/{i}") for i in range(5)]
    crawling = asyncio.create_task(crawl(new(num_fetches=3)))
    await site.until_num_asked(4)
    await asyncio.sleep(0.1)
    assert len(site.requests) == 4
    for gate in gates:
        gate.set()
    assert len(await crawling) == 6


async def test_links_that_promise_more_are_followed_first(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/about", "/imprint", "/how-penguins-swim"))
    await crawl(new(max_pages=2))
    assert site.paths == ["/", "/how-penguins-swim"]


# ------------------------------------------------------------------------------------------------------- what is kept


async def test_text_that_pages_have_in_common_appears_once(site: Website, new: NewSource) -> None:
    notice = "<p>All texts about how penguins swim are under the same free licence.</p>"
    site.add("/", text("Emperor", "/a") + notice)
    site.add("/a", text("King") + notice)
    first, second = await crawl(new())
    assert isinstance(first, Append)
    assert isinstance(second, Append)
    assert "same free licence" in first.chunk.text
    assert "same free licence" not in second.chunk.text


async def test_queries_do_not_share_what_has_been_said(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor"))
    source = new()
    assert await crawl(source) == await crawl(source)


async def test_a_page_that_says_nothing_new_is_skipped(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/index.html"))
    site.add("/index.html", text("Emperor", "/"))
    events = await crawl(new())
    assert reasons(events) == {"/index.html": "what matches the query on it was on earlier pages"}


async def test_links_of_irrelevant_pages_are_followed(site: Website, new: NewSource) -> None:
    site.add("/", "<p>A list of links.</p><a href='/a'>A</a>")
    site.add("/a", text("King"))
    events = await crawl(new())
    assert paths(events) == ["/a"]
    assert reasons(events) == {"/": "nothing on it matches the query"}


async def test_a_long_page_is_cut_to_its_best_parts(site: Website, new: NewSource) -> None:
    parts = [f"<p>{word} penguins {'swim ' * n} {'x' * 600}</p>" for n, word in enumerate(["One", "Two", "Three"], 1)]
    site.add("/", "".join(parts))
    [event] = await crawl(new(max_page_chars=1400))
    assert isinstance(event, Append)
    assert len(event.chunk.text) <= 1400
    assert [part in event.chunk.text for part in ("One", "Two", "Three")] == [False, True, True]


async def test_plain_text_pages_are_sources_too(site: Website, new: NewSource) -> None:
    site.add("/", "All penguins swim.", content_type="text/plain")
    [event] = await crawl(new())
    assert isinstance(event, Append)
    assert event.chunk.text == "All penguins swim."


async def test_pages_that_cannot_be_used_are_skipped_with_the_reason(site: Website, new: NewSource) -> None:
    links = ["/missing", "/zip", "/empty", "/endless", "/large", "/broken", "/textless", "/gone"]
    site.add("/", text("Emperor", *links))
    site.add("/zip", "PK", content_type="application/zip")
    site.add("/empty", "")
    site.add("/endless", text("King"), fault="never ends")
    site.add("/large", "x" * 20_000)
    site.add("/broken", text("King"), fault="breaks off")
    site.add("/textless", "<script>x</script>")
    site.add("/gone", fault="breaks off at once")
    events = await crawl(new(page_timeout_s=5, max_body_bytes=10_000))
    assert paths(events) == ["/"]
    found = reasons(events)
    assert found.pop("/gone").startswith(f"{site.url('/gone')} cannot be reached: ")
    assert found.pop("/broken").startswith("its connection broke off: ")
    assert found == {
        "/missing": "the server answers HTTP 404",
        "/zip": "it is application/zip, not a web page",
        "/empty": "it is empty",
        "/endless": "it did not end within 5 s",
        "/large": "it is larger than max_body_bytes=10000",
        "/textless": "it has no text",
    }


# ------------------------------------------------------------------------------------------------------------ deadlines


async def test_at_the_crawls_deadline_what_has_arrived_is_used(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/a", "/slow"))
    site.add("/a", text("King"))
    site.add_gate("/slow")
    events = await crawl(new(crawl_timeout_s=10))
    assert paths(events) == ["/", "/a"]
    assert reasons(events) == {"/slow": "not finished within crawl_timeout_s=10"}
    assert cut_short(events) == ["crawl_timeout_s=10 ended before all pages were finished"]
    assert isinstance(events[-1], CutShort)


async def test_pages_that_are_finished_at_the_deadline_are_used_however_late_they_are_read(
    site: Website, new: NewSource
) -> None:
    site.add("/", text("Emperor", "/a"))
    site.add("/a", text("King", "/deep"))
    async with aclosing(new(crawl_timeout_s=10).stream(QUERY)) as stream:  # on a busy machine, a page took over 5 s
        events = [await anext(stream)]
        await site.until_asked("/a")
        await asyncio.sleep(10.1)  # a slow reader: the crawl's time is over
        events += [event async for event in stream]
    assert paths(events) == ["/", "/a"]
    assert reasons(events) == {}
    assert cut_short(events) == ["crawl_timeout_s=10 ended before all pages were finished"]


async def test_a_page_that_takes_too_long_to_read_is_skipped(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/many"))
    site.add("/many", SLOW)
    events = await crawl(new(page_timeout_s=2))
    assert paths(events) == ["/"]
    assert reasons(events) == {"/many": "reading it takes longer than 2 s"}
    assert cut_short(events) == ["1 page exceeded the time or memory of a page"]


async def test_missing_pages_and_those_over_the_users_bounds_are_no_gap(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/missing", "/large", "/gone", "/a"))
    site.add("/large", "x" * 20_000)
    site.add("/gone", fault="breaks off at once")
    site.add("/a", text("King", "/deep"))
    events = await crawl(new(max_body_bytes=10_000, max_depth=1))
    assert len(events) == 5
    assert cut_short(events) == []
    assert cut_short(await crawl(new(max_pages=2))) == []


async def test_a_host_of_which_two_pages_take_too_long_is_given_up(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/1", "/2", "/3", site.url("/other", host="127.0.0.2")))
    for i in (1, 2, 3):
        site.add(f"/{i}", fault="silent")
    site.add("/other", text("King", site.url("/5"), "/fine"))
    site.add("/fine", text("Adelie"))
    events = await crawl(new(num_fetches=1, page_timeout_s=3, same_host=False))
    assert paths(events) == ["/", "/other", "/fine"]
    slow = "it did not end within 3 s"
    assert reasons(events) == {
        "/1": slow,
        "/2": slow,
        "/3": "its host is abandoned: 2 of its pages exceeded their limits",
    }
    assert site.paths == ["/", "/1", "/2", "/other", "/fine"]
    assert cut_short(events) == ["2 pages exceeded the time or memory of a page; 1 host abandoned because of that"]


async def test_a_page_over_a_limit_of_reading_is_skipped_and_leaves_a_gap(site: Website) -> None:
    site.add("/", text("Emperor", "/slow"))
    site.add("/slow", SLOW)
    source = WebSource([site.url()], CrawlOptions(allow_private=True, num_workers=1, max_page_cpu_s=0.5))
    await source.start(lambda line: None)
    events = await crawl(source)
    await source.aclose()
    assert paths(events) == ["/"]
    assert reasons(events) == {"/slow": "reading it takes more computing time than max_page_cpu_s=0.5"}
    assert cut_short(events) == ["1 page exceeded the time or memory of a page"]


async def test_a_page_of_which_only_the_beginning_is_read_leaves_a_gap(site: Website, new: NewSource) -> None:
    site.add("/", "<p>All penguins swim.</p>" + "<p>a</p>" * 40_000)
    events = await crawl(new())
    assert paths(events) == ["/"]
    assert cut_short(events) == ["1 page too large to be read to the end"]


async def test_a_hostile_crawl_does_not_keep_another_from_its_pages(site: Website, new: NewSource) -> None:
    """Each of 20 pages of 60 KB once took minutes to split at its headings. Now each that is slow at all is stopped in
    time, and their query has no more workers than its share."""
    site.add("/evil", text("Evil", *(f"/evil/{i}" for i in range(19))))
    for i in range(19):
        slow = TEXT["no-break spaces in a heading"](60_000) if i % 2 else SLOW
        site.add(f"/evil/{i}", slow, content_type="text/plain" if i % 2 else "text/html")
    site.add("/", text("Emperor", *(f"/{i}" for i in range(8))))
    for i in range(8):
        site.add(f"/{i}", text(f"{i}th"))
    hostile = asyncio.create_task(crawl(new([site.url("/evil", host="127.0.0.2")], page_timeout_s=1)))
    await site.until_asked("/evil/0")
    events = await crawl(new())
    assert len(paths(events)) == 9
    assert cut_short(events) == []
    events = await hostile
    assert "1 host abandoned because of that" in cut_short(events)[0]


async def test_a_page_that_is_slow_to_read_holds_up_no_other_page_or_query(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/many", *(f"/{i}" for i in range(4))))
    site.add("/many", SLOW)
    gates = [site.add_gate(f"/{i}") for i in range(4)]
    for i in range(4):
        site.add(f"/{i}", text(f"{i}th"))
    source, other = new(), new([site.add("/other", text("King"))])
    async with asyncio.timeout(120), aclosing(source.stream(QUERY)) as stream:
        events = [await anext(stream)]
        await until(lambda: num_busy(source))
        assert paths(await crawl(other)) == ["/other"]
        for gate in gates:
            gate.set()
        events += [await anext(stream) for _ in range(4)]
        assert sorted(paths(events)) == ["/", "/0", "/1", "/2", "/3"]
        assert num_busy(source) == 1


async def test_a_crawl_takes_only_moments_of_the_event_loop(site: Website, new: NewSource) -> None:
    """In CPU time of the loop's thread between two ticks, which other programs on the machine do not add to."""
    filler = "".join(f"<p>Sentence {i} of many on a page like those of real documentation.</p>" for i in range(1500))
    site.add("/", text("Emperor", *(f"/{i}" for i in range(10))))
    for i in range(10):
        site.add(f"/{i}", text(f"{i}th") + filler)
    moments_s = []

    async def tick() -> None:
        while True:
            begun_s = time.thread_time()
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            moments_s.append(time.thread_time() - begun_s)

    ticking = asyncio.create_task(tick())
    events = await crawl(new())
    ticking.cancel()
    assert len(paths(events)) == 11
    assert max(moments_s) < 0.02


# --------------------------------------------------------------------------------------------------------------- errors


async def test_unreachable_start_urls_are_an_error_that_names_them(site: Website, new: NewSource) -> None:
    url = site.url(host="127.0.0.9")
    with pytest.raises(UnreachableError, match=f"^{url} cannot be reached: .*Connect call failed"):
        await crawl(new([url]))
    with pytest.raises(UnreachableError, match=f"none of the 2 start URLs can be reached; {url}"):
        await crawl(new([url, f"http://127.0.0.8:{site.port}/"]))


async def test_a_single_reachable_start_url_is_enough(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor"))
    events = await crawl(new([site.url(host="127.0.0.9"), site.url()]))
    assert len(paths(events)) == 1
    assert [type(event) for event in events].count(Skipped) == 1


async def test_a_private_start_url_is_refused_with_the_remedy(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor"))
    with pytest.raises(UnsafeUrlError, match=r"127\.0\.0\.1 .* not a public address .* pass allow_private=True"):
        await crawl(new(allow_private=False))
    assert site.requests == []


async def test_links_to_private_addresses_are_skipped(
    site: Website, new: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = ssrf_guard.is_public
    monkeypatch.setattr(ssrf_guard, "is_public", lambda address: str(address) == "127.0.0.1" or judge(address))
    site.add("/", text("Emperor", site.url("/secret", host="127.0.0.2"), "/sly"))
    site.add_redirect("/sly", site.url("/secret", host="127.0.0.3"))
    events = await crawl(new(allow_private=False, same_host=False))
    assert sorted(site.paths) == ["/", "/sly"]
    assert all("not a public address" in reason for reason in reasons(events).values())
    assert len(events) == 3


async def test_an_unexpected_error_costs_its_page_alone(
    site: Website, new: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Fetcher.fetch

    async def fail(fetcher: Fetcher, url: str, *more: Any) -> Page:
        if url.endswith("/bad"):
            raise RuntimeError("as asked")
        return await fetch(fetcher, url, *more)

    monkeypatch.setattr(Fetcher, "fetch", fail)
    site.add("/", text("Emperor", "/bad", "/good"))
    site.add("/good", text("King"))
    events = await crawl(new())
    assert sorted(paths(events)) == ["/", "/good"]
    assert reasons(events) == {"/bad": "it cannot be fetched: RuntimeError: as asked"}


async def test_a_worker_that_dies_is_an_error_for_its_query_alone(site: Website, new: NewSource) -> None:
    site.add("/", SLOW)
    source, other = new(), new([site.add("/other", text("King"))])
    workers = source._workers
    assert workers
    before = set(workers.process_ids)
    crawling = asyncio.create_task(crawl(source))
    [first, second] = [slot.result() for slot in workers._slots]
    await until(lambda: first.is_idle != second.is_idle)
    busy = second if first.is_idle else first
    os.kill(busy.process.pid, signal.SIGKILL)
    assert paths(await crawl(other)) == ["/other"]
    with pytest.raises(WorkerError, match=r"crawl worker \(process \d+\) died with exit code -9"):
        await crawling
    site.add("/", text("Emperor"))
    assert paths(await crawl(source)) == ["/"]
    await until(lambda: len(workers.process_ids) == 2)
    assert len(before & set(workers.process_ids)) == 1


async def test_links_from_a_worker_are_checked_like_those_of_a_page(site: Website, new: NewSource) -> None:
    """A worker reads hostile pages, and one of them may have taken it over."""

    class TakenOver:
        num_busy = 0

        async def run(self, job: dict[str, Any], body: bytes, **_: Any) -> dict[str, Any]:
            links = ["file:///etc/passwd", "raw:x", "//x", "", "http://me:secret@127.0.0.1/", site.url("/a") + "#b"]
            return {"url": job["url"], "title": "", "num_passages": 0, "passages": [], "links": links, "is_cut": False}

    site.add("/", text("Emperor"))
    source = new(same_host=False)
    source._workers = TakenOver()  # type: ignore[assignment]
    assert reasons(await crawl(source)) == {"/": "it has no text"}
    assert site.paths == ["/"]


@pytest.mark.parametrize("change", [{"links": None}, {"passages": [["heading", 1]]}, {"title": 5}, {"is_cut": "?"}])
async def test_an_invalid_answer_of_a_worker_is_an_error_of_its_page(
    site: Website, new: NewSource, change: dict[str, Any]
) -> None:
    class TakenOver:
        num_busy = 0

        async def run(self, job: dict[str, Any], body: bytes, **_: Any) -> dict[str, Any]:
            valid = {"title": "", "num_passages": 0, "passages": [], "links": [site.url("/a")], "is_cut": False}
            return {"url": job["url"], **valid, **(change if job["url"].endswith("/a") else {})}

    site.add("/", text("Emperor"))
    site.add("/a", text("Emperor"))
    source = new()
    source._workers = TakenOver()  # type: ignore[assignment]
    invalid = "it cannot be read: its worker's answer is invalid"
    assert reasons(await crawl(source)) == {"/": "it has no text", "/a": invalid}


# ----------------------------------------------------------------------------------------------------------- leaving it


async def test_leaving_before_the_first_page_closes_everything(site: Website, new: NewSource) -> None:
    site.add_gate("/")
    stream = new().stream(QUERY)
    waiting = asyncio.create_task(anext(stream))
    await site.until_asked("/")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await site.until_all_closed()
    assert [event async for event in stream] == []


async def test_leaving_while_fetching_closes_everything(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", *(f"/{i}" for i in range(9))))
    for i in range(9):
        site.add(f"/{i}", text("King"), fault="never ends")
    async with aclosing(new(num_fetches=4).stream(QUERY)) as stream:
        await anext(stream)
        await site.until_num_asked(5)
        assert site.num_open >= 4
    await site.until_all_closed()


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_while_a_page_is_read_leaves_no_worker_busy(site: Website, new: NewSource, how: str) -> None:
    site.add("/", SLOW)
    source = new()
    stream = source.stream(QUERY)
    waiting = asyncio.create_task(anext(stream))
    await until(lambda: num_busy(source))
    waiting.cancel()
    if how == "cancel":
        await asyncio.sleep(0)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await stream.aclose()
    assert num_busy(source) == 0


async def test_leaving_an_anyio_scope_closes_everything(site: Website, new: NewSource) -> None:
    import anyio

    site.add("/", text("Emperor", "/a"))
    site.add_gate("/a")
    with anyio.move_on_after(0.5) as scope:
        async with aclosing(new().stream(QUERY)) as stream:
            async for _ in stream:
                pass
    assert scope.cancelled_caught
    await site.until_all_closed()


# ----------------------------------------------------------------------------------------------------------- start URLs


async def test_a_function_gives_the_start_urls(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor"))
    thread_ids = []

    def blocking(query: str) -> list[str]:
        thread_ids.append(asyncio._get_running_loop())
        return [site.url(), site.url("/#again")] if query == QUERY else []

    async def waiting(query: str) -> list[str]:
        await asyncio.sleep(0)
        return blocking(query)

    for urls in (blocking, waiting, lambda query: waiting(query)):
        assert paths(await crawl(new(urls))) == ["/"]
        assert await crawl(new(urls), "something else") == []
    assert thread_ids[0] is None  # not in the event loop's thread, which it would block


async def test_a_function_that_fails_is_a_source_error(new: NewSource) -> None:
    def fails(query: str) -> list[str]:
        raise KeyError("quota")

    async def hangs(query: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(SourceError, match=r"start URLs raised KeyError\('quota'\)"):
        await crawl(new(fails))
    with pytest.raises(SourceError, match=r"start URLs took longer than 0\.1 s"):
        await crawl(new(hangs, crawl_timeout_s=0.1))
    with pytest.raises(ConfigurationError, match="start URLs are a list"):
        await crawl(new(lambda query: "http://docs.example/"))


BAD = [
    "mailto:me@docs.example",
    "http://me:secret@docs.example/",
    "http://[broken",
    "docs.example",
    7,
    "http://docs.example/\ud800",
]


async def test_bad_addresses_of_a_function_are_skipped(
    site: Website, new: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = ssrf_guard.is_public
    monkeypatch.setattr(ssrf_guard, "is_public", lambda address: str(address) == "127.0.0.1" or judge(address))
    site.add("/", text("Emperor"))
    private = site.url("/", host="127.0.0.2")
    source = new(lambda query: [*BAD, private, site.url()], allow_private=False)
    events = await crawl(source)
    assert paths(events) == ["/"]
    skipped = {event.uri: event.reason for event in events if isinstance(event, Skipped)}
    assert set(skipped) == {*(str(url).replace("\ud800", "?") for url in BAD), private}
    assert "only http:// and https://" in skipped[BAD[0]]
    assert "without user name and password" in skipped[BAD[1]]
    assert "not a public address" in skipped[private]
    assert cut_short(events) == []


async def test_only_bad_addresses_of_a_function_are_an_error(site: Website, new: NewSource) -> None:
    with pytest.raises(SourceError, match=r"none of the start URLs .* function gave can be used; 'mailto:me@"):
        await crawl(new(lambda query: BAD))
    with pytest.raises(UnsafeUrlError, match="only http:// and https://"):
        await crawl(new(lambda query: ["file:///etc/passwd"]))
    with pytest.raises(UnsafeUrlError, match="not a public address"):
        await crawl(new(lambda query: [site.url()], allow_private=False))
    with pytest.raises(UnsafeUrlError, match=r"none of the 2 start URLs can be reached; .*not a public address"):
        await crawl(new(lambda query: [site.url(), site.url("/a")], allow_private=False))


async def test_a_functions_generator_works_in_its_thread(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor"))
    loops = []

    def lazily(query: str) -> Iterator[str]:
        loops.append(asyncio._get_running_loop())
        yield site.url()

    assert paths(await crawl(new(lazily))) == ["/"]
    assert loops == [None]


async def test_names_that_are_slow_to_look_up_leave_the_programs_own_threads_alone(
    site: Website, new: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, system = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        if host.endswith(".slow.example"):
            release.wait()
            raise socket.gaierror("too late")
        return system(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    site.add("/", text("Emperor"))
    slow = [f"http://{i}.slow.example/" for i in range(20)]
    try:
        source = new(slow, page_timeout_s=0.4, num_fetches=20)
        with pytest.raises(UnreachableError, match="no connection within"):
            await crawl(source)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 120) == "free"
        other = new()
        other._shared = source._shared
        assert paths(await crawl(other)) == ["/"]
    finally:
        release.set()


async def test_a_function_that_hangs_leaves_the_programs_own_threads_alone(new: NewSource) -> None:
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    def hangs(query: str) -> list[str]:
        release.wait()
        return []

    try:
        with pytest.raises(SourceError, match=r"start URLs took longer than 0\.2 s"):
            await crawl(new(hangs, crawl_timeout_s=0.2))
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 120) == "free"
    finally:
        release.set()


@pytest.mark.parametrize(
    ("urls", "options", "message"),
    [
        ("http://docs.example/", {}, "start URLs are a list"),
        (7, {}, "start URLs are a list"),
        ([], {}, "no start URL"),
        ([7], {}, "a start URL is a str"),
        (["docs.example"], {}, "write https://host/path"),
        (["file:///etc/passwd"], {}, "only http:// and https://"),
        (None, {"max_depth": -1}, "max_depth=-1 must be greater than or equal to 0"),
        (None, {"max_pages": 0}, "max_pages=0 must be"),
        (None, {"num_fetches": 1.5}, "num_fetches=1.5 must be"),
        (None, {"num_workers": True}, "num_workers=True must be"),
        (None, {"max_body_bytes": "1"}, "max_body_bytes='1' must be"),
        (None, {"max_page_chars": 0}, "max_page_chars=0 must be"),
        (None, {"page_timeout_s": 0}, "page_timeout_s=0 must be greater than 0"),
        (None, {"crawl_timeout_s": float("inf")}, "crawl_timeout_s=inf must be"),
        (None, {"max_page_cpu_s": 0}, "max_page_cpu_s=0 must be greater than 0"),
        (None, {"max_page_memory_bytes": 1000}, "max_page_memory_bytes=1000 must be greater than or equal to 1048576"),
        (None, {"user_agent": "a\r\nHost: b"}, "user_agent='a.* must be printable ASCII"),
        (None, {"cdp_url": "localhost:9222"}, "cdp_url='localhost:9222' must be"),
    ],
)
async def test_values_that_cannot_work_are_refused(urls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsafeUrlError), match=message):
        WebSource(["http://docs.example/"] if urls is None else urls, CrawlOptions(**options))


async def test_options_that_are_no_crawl_options_are_refused() -> None:
    options: Any = {"max_depth": 1}
    with pytest.raises(ConfigurationError, match=r"options=.* must be an instance of CrawlOptions"):
        WebSource(["http://docs.example/"], options)


# -------------------------------------------------------------------------------------------------- starting and ending


async def test_a_source_that_is_not_started_says_so() -> None:
    with pytest.raises(ConfigurationError, match="WebSource is not started: use it in a Pipeline"):
        await crawl(WebSource(["http://docs.example/"]))


async def test_starting_and_closing_leave_nothing_behind(
    site: Website, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    site.add("/", text("Emperor"))
    source = WebSource([site.url()], CrawlOptions(allow_private=True, num_workers=1))
    lines: list[str] = []
    for _ in range(2):
        await source.start(lines.append)
        assert source._workers
        process_ids = source._workers.process_ids
        assert paths(await crawl(source)) == ["/"]
        await source.aclose()
        assert not any(map(alive, process_ids))
        assert list(scratch.iterdir()) == []
    await source.aclose()
    assert lines == ["starting 1 crawl workers", "crawl workers are ready"] * 2
    assert list(home.iterdir()) == []


async def test_closing_the_source_ends_its_crawls_with_an_error(site: Website) -> None:
    site.add("/", SLOW)
    source = WebSource([site.url()], CrawlOptions(allow_private=True, num_workers=1))
    await source.start(lambda line: None)
    crawling = asyncio.create_task(crawl(source))
    await until(lambda: num_busy(source))
    await source.aclose()
    with pytest.raises(WorkerError, match="crawl worker is closed"):
        await crawling


async def test_a_missing_crawl_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"crawl4ai is not installed.*pip install '\.\[crawl\]'"):
        await WebSource(["http://docs.example/"]).start(lambda line: None)


# ------------------------------------------------------------------------------------------------- through a browser


SCRIPTED = """<title>A shell</title><p id="target"></p><script>
const texts = ["Little", "penguins", "swim,", "says", "a script.", '<a href="/next">Next</a>']
texts.forEach((text, i) => setTimeout(() => document.getElementById("target").innerHTML += " " + text, 200 * i + 200))
</script>"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, int]]:
    """A running browser's address and process id."""
    if not (chromium := shutil.which("chromium")):
        pytest.skip("chromium is not installed")
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", "remote-debugging-port=0"]
    flags += [f"user-data-dir={tmp_path_factory.mktemp('browser')}"]
    process = await asyncio.create_subprocess_exec(
        chromium,
        *(f"--{flag}" for flag in flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr
    async with asyncio.timeout(60):
        while not (found := re.search(rb"ws://([\d.:]+)/", await process.stderr.readline())):
            pass
    reading = asyncio.create_task(process.stderr.read())
    yield f"http://{found[1].decode()}", process.pid
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await reading
    await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browsing(browser: tuple[str, int]) -> AsyncIterator[WebSource]:
    source = WebSource(["http://docs.example/"], CrawlOptions(cdp_url=browser[0], num_workers=1))
    await source.start(lambda line: None)
    yield source
    await source.aclose()


@pytest.fixture
def browse(site: Website, browsing: WebSource, browser: tuple[str, int], new: NewSource) -> NewSource:
    site.is_browsed = True

    def browse(urls: StartUrls | None = None, **options: Any) -> WebSource:
        source = new(urls, cdp_url=browser[0], **options)
        source._workers = browsing._workers
        return source

    return browse


async def test_pages_that_scripts_write_are_read_through_a_browser(site: Website, browse: NewSource) -> None:
    site.add("/", SCRIPTED)
    site.add("/next", text("Emperor", "/missing"))
    events = await crawl(browse())
    assert paths(events) == ["/", "/next"]
    first = events[0]
    assert isinstance(first, Append)
    assert "Little penguins swim, says a script." in first.chunk.text
    assert first.chunk.title == "A shell"
    assert reasons(events) == {"/missing": "the server answers HTTP 404"}
    assert {request.headers["user-agent"] for request in site.requests} == {f"streamrag/{streamrag.__version__}"}


async def test_the_browsers_open_tabs_are_left_alone(
    site: Website, browse: NewSource, browser: tuple[str, int]
) -> None:
    def ask(path: str, method: str = "GET") -> Any:
        with urlopen(Request(f"{browser[0]}/json/{path}", method=method)) as answer:
            return json.load(answer)

    async def tabs() -> dict[str, str]:
        return {tab["id"]: tab["url"] for tab in await asyncio.to_thread(ask, "list") if tab["type"] == "page"}

    site.add("/", text("Emperor", "/a"))
    site.add("/mine", "mine")
    mine = (await asyncio.to_thread(ask, f"new?{site.url('/mine')}", "PUT"))["id"]
    async with asyncio.timeout(120):
        while (before := await tabs())[mine] != site.url("/mine"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert paths(await crawl(browse())) == ["/"]
    assert await tabs() == before


async def test_without_a_browser_there_is_nothing_on_such_a_page(site: Website, new: NewSource) -> None:
    site.add("/", SCRIPTED)
    assert reasons(await crawl(new())) == {"/": "it has no text"}


async def test_a_browser_is_not_asked_for_private_addresses(site: Website, browse: NewSource) -> None:
    with pytest.raises(UnsafeUrlError, match="pass allow_private=True"):
        await crawl(browse(allow_private=False))
    assert site.requests == []


async def test_redirects_of_a_browser_are_checked(
    site: Website, browse: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = ssrf_guard.is_public
    monkeypatch.setattr(ssrf_guard, "is_public", lambda address: str(address) == "127.0.0.1" or judge(address))
    site.add("/", text("Emperor", "/elsewhere", "/private"))
    site.add_redirect("/elsewhere", site.url("/other", host="localhost"))
    site.add_redirect("/private", site.url("/other", host="127.0.0.2"))
    site.add("/other", text("King"))
    events = await crawl(browse(allow_private=False))
    assert paths(events) == ["/"]
    assert reasons(events)["/elsewhere"] == f"it redirects to another host: {site.url('/other', host='localhost')}"
    assert reasons(events)["/private"] == f"it redirects to another host: {site.url('/other', host='127.0.0.2')}"
    events = await crawl(browse([site.url("/private")], allow_private=False))
    assert "127.0.0.2, which is not a public address" in reasons(events)["/private"]


async def test_a_page_that_a_browser_cannot_reach_is_unreachable(site: Website, browse: NewSource) -> None:
    with pytest.raises(UnreachableError, match=r"cannot be reached: net::ERR_CONNECTION_REFUSED"):
        await crawl(browse([site.url(host="127.0.0.9")], obey_robots=False))


async def test_a_page_that_a_browser_waits_for_is_given_up_at_its_deadline(site: Website, browse: NewSource) -> None:
    site.add_gate("/")
    events = await crawl(browse(page_timeout_s=0.4))
    assert reasons(events) == {"/": "reading it takes longer than 0.8 s"}


async def test_a_browser_that_is_closed_is_an_error_and_one_that_is_not_there_too(
    site: Website, browse: NewSource, browser: tuple[str, int]
) -> None:
    site.add("/", text("Emperor"))
    assert paths(await crawl(browse())) == ["/"]
    os.killpg(browser[1], signal.SIGKILL)
    await until(lambda: not alive(browser[1]))
    with pytest.raises(WorkerError, match="the browser has gone away"):
        await crawl(browse())
    with pytest.raises(WorkerError, match="nothing listens at"):
        await crawl(browse())
    with pytest.raises(UnreachableError, match=f"no browser answers at cdp_url='{browser[0]}'; start one with"):
        await WebSource(["http://docs.example/"], CrawlOptions(cdp_url=browser[0])).start(lambda line: None)
