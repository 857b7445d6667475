"""What hosts let robots do, and what a robots.txt that is written by a stranger may cost."""

import asyncio
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
from website import Website

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.http import robots, ssrf_guard
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.page import CostlyPageError, DisallowedError, OwnLimitError, PutOffError
from streamrag.sources.http.politeness import CrawlTurns, Hosts
from streamrag.sources.http.robots import Robots, Rules, parse
from streamrag.sources.threads import Threads

pytest.importorskip("protego")
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

AGENT = "streamrag/0.1.0"
CONTEXT = ssl.create_default_context()
LIMITS: dict[str, Any] = {
    "page_timeout_s": 50.0,
    "connect_timeout_s": 20.0,
    "max_body_bytes": 4 << 20,
    "allow_private": True,
}


@pytest.fixture
async def site() -> AsyncIterator[Website]:
    async with Website().running() as site:
        yield site


@asynccontextmanager
async def fetching(turns: CrawlTurns | None = None, **limits: Any) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(
        **{**LIMITS, **limits},
        user_agent=AGENT,
        ssl_context=CONTEXT,
        resolve=partial(ssrf_guard.resolve, threads=Threads(2, "look up a name")),
        turns=turns,
    )
    try:
        yield fetcher
    finally:
        await fetcher.aclose()
        for _ in range(5):
            await asyncio.sleep(0)


def new() -> Robots:
    return Robots(AGENT, Threads(2, "robots.txt"))


async def allowed(site: Website, *paths: str) -> list[bool]:
    async with fetching() as fetcher:
        known = new()
        found: list[bool] = []
        for path in paths:
            try:
                await known.check(site.url(path), fetcher)
                found.append(True)
            except DisallowedError:
                found.append(False)
        return found


def rules(text: str, agent: str = AGENT) -> Rules:
    return parse(text.encode(), agent)


def can_fetch(found: Rules, path: str) -> bool:
    assert found.parser
    return found.parser.can_fetch(f"http://docs.example{path}", AGENT)


async def test_robots_txt_is_fetched_once_and_decides_which_pages_are_allowed(site: Website) -> None:
    site.add("/robots.txt", "User-agent: *\nDisallow: /private\nAllow: /private/open\n", content_type="text/plain")
    assert await allowed(site, "/", "/private/x", "/private/open/x", "/priv") == [True, False, True, True]
    assert len(site.robots_requests) == 1
    assert site.robots_requests[0].headers["user-agent"] == AGENT


@pytest.mark.parametrize("agent", ["streamrag", "StreamRAG", "streamrag/9", "other\nUser-agent: streamrag"])
def test_rules_for_our_name_come_before_those_for_all(agent: str) -> None:
    found = rules(f"User-agent: *\nDisallow: /\n\nUser-agent: {agent}\nDisallow: /only\n")
    assert [can_fetch(found, path) for path in ("/", "/only")] == [True, False]


@pytest.mark.parametrize("agent", ["stream", "streamragged", "rag", "other"])
def test_rules_for_others_are_not_ours(agent: str) -> None:
    found = rules(f"User-agent: *\nDisallow: /all\n\nUser-agent: {agent}\nDisallow: /\nCrawl-delay: 9\n")
    assert [can_fetch(found, path) for path in ("/", "/all/x")] == [True, False]
    assert found.delay_s == 0


def test_delays_and_sitemaps_are_read() -> None:
    found = rules(
        "Sitemap: http://a.example/1.xml\nUser-agent: x\nUser-agent: *\nCrawl-delay: 2.5\nSitemap: http://a.example/2.xml"
    )
    assert found.delay_s == 2.5
    assert found.sitemaps == ("http://a.example/1.xml", "http://a.example/2.xml")
    assert rules("User-agent: *\nRequest-rate: 2/10s").delay_s == 5
    assert [rules(f"User-agent: *\nCrawl-delay: {text}").delay_s for text in ("nan", "inf", "-1", "x", "1e999")] == [
        0
    ] * 5


@pytest.mark.parametrize(
    ("status", "expected"),
    [(200, True), (401, True), (403, True), (404, True), (410, True), (429, False), (503, False)],
)
async def test_a_missing_robots_txt_forbids_nothing_and_a_failing_one_forbids_all(
    site: Website, status: int, expected: bool
) -> None:
    site.add("/robots.txt", "", status=status)
    assert await allowed(site, "/", "/a") == [expected] * 2
    assert len(site.robots_requests) == 1


async def test_a_robots_txt_that_never_ends_or_breaks_off_forbids_all(site: Website) -> None:
    site.add("/robots.txt", "User-agent: *", fault="never ends")
    async with fetching(page_timeout_s=0.3) as fetcher:
        known = new()
        for _ in range(2):
            with pytest.raises(CostlyPageError, match=r"robots.txt of its host cannot be read: it did not end"):
                await known.check(site.url("/a"), fetcher)
    site.add("/robots.txt", "User-agent: *\nDisallow: /b", fault="breaks off")
    assert await allowed(site, "/a") == [False]


async def test_silence_is_held_against_a_host_from_the_second_time_on(site: Website) -> None:
    site.add("/robots.txt", fault="silent")
    known = new()
    async with fetching(page_timeout_s=0.3) as fetcher:
        together = [known.check(site.url(path), fetcher) for path in ("/a", "/b", "/c")]
        found = await asyncio.gather(*together, return_exceptions=True)
        assert {type(error) for error in found} == {CostlyPageError}
        assert len(site.robots_requests) == 1
        site.add("/robots.txt", "")
        await known.check(site.url("/a"), fetcher)
        assert len(site.robots_requests) == 2
        known._entries.clear()
        site.add("/robots.txt", fault="silent")
        for _ in range(4):
            with pytest.raises(CostlyPageError):
                await known.check(site.url("/a"), fetcher)
        assert len(site.robots_requests) == 4


async def test_a_host_that_comes_up_is_asked_at_once(site: Website) -> None:
    site.add("/robots.txt", fault="breaks off at once")
    known = new()
    async with fetching() as fetcher:
        with pytest.raises(UnreachableError):
            await known.check(site.url("/a"), fetcher)
        site.add("/robots.txt", "User-agent: *\nDisallow: /a")
        with pytest.raises(DisallowedError, match="does not allow it"):
            await known.check(site.url("/a"), fetcher)


async def test_a_host_that_cannot_be_reached_is_named_with_the_page(site: Website) -> None:
    async with fetching() as fetcher:
        url = site.url("/a", host="127.0.0.9")
        with pytest.raises(UnreachableError, match=f"^{url} cannot be reached: "):
            await new().check(url, fetcher)


async def test_robots_txt_is_fetched_from_allowed_addresses_only(site: Website) -> None:
    async with fetching(allow_private=False) as fetcher:
        with pytest.raises(UnsafeUrlError, match=r"127\.0\.0\.1, which is not a public address"):
            await new().check(site.url("/a"), fetcher)
    assert site.num_connections == 0


async def test_robots_txt_may_redirect_five_times_and_then_counts_as_missing(site: Website) -> None:
    for number in range(5):
        site.add_redirect("/robots.txt" if number == 0 else f"/{number}", f"/{number + 1}")
    site.add("/5", "User-agent: *\nDisallow: /a", content_type="text/plain")
    assert await allowed(site, "/a", "/b") == [False, True]
    site.add_redirect("/5", "/6")
    assert await allowed(site, "/a") == [True]


async def test_queries_that_come_together_ask_once_and_one_may_leave(site: Website) -> None:
    site.add("/robots.txt", "User-agent: *\nDisallow: /a")
    gate = site.add_gate("/robots.txt")
    known = new()
    async with fetching() as first, fetching() as second:
        leaving = asyncio.create_task(known.rules(site.url(), first))
        while not site.robots_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        staying = [asyncio.create_task(known.rules(site.url(), second)) for _ in range(5)]
        await asyncio.sleep(0)
        leaving.cancel()
        gate.set()
        assert len({id(found) for found in await asyncio.gather(*staying)}) == 1
        assert len(site.robots_requests) == 2
        with pytest.raises(asyncio.CancelledError):
            await leaving


async def test_a_failed_robots_txt_is_asked_for_again_after_a_while(
    site: Website, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("/robots.txt", "", status=500)
    known = new()
    async with fetching() as fetcher:
        with pytest.raises(
            DisallowedError, match=r"cannot be read \(the server answers HTTP 500\), so nothing is allowed"
        ):
            await known.check(site.url(), fetcher)
        site.add("/robots.txt", "")
        monkeypatch.setattr(robots, "FAILED_S", 0.0)
        known._entries.clear()
        await known.check(site.url(), fetcher)
    assert len(site.robots_requests) == 2


async def test_a_crawl_that_has_used_up_its_bytes_does_not_count_against_a_host(site: Website) -> None:
    site.add("/robots.txt", "User-agent: *\nAllow: /\n" + "# x\n" * 50)
    known = new()
    async with fetching(max_crawl_bytes=10) as used_up, fetching() as fresh:
        with pytest.raises(OwnLimitError, match="the crawl has reached max_crawl_bytes=10"):
            await known.check(site.url("/a"), used_up)
        await known.check(site.url("/a"), fresh)


async def test_a_crawl_that_ends_before_a_hosts_turn_does_not_count_against_the_host(site: Website) -> None:
    pytest.importorskip("tenacity")
    known, hosts = new(), Hosts(4)
    now_s = asyncio.get_running_loop().time()
    async with hosts.using(urlsplit(site.url()).netloc) as host:
        host.hold(60)
        ending = CrawlTurns(hosts, num_fetches=6, deadline=now_s + 1)
        async with fetching(turns=ending) as fetcher:
            with pytest.raises(PutOffError, match="when the crawl is over"):
                await known.check(site.url("/a"), fetcher)
        host.free_at = 0.0
        async with fetching() as fetcher:
            await known.check(site.url("/a"), fetcher)


def test_rules_are_bounded_and_those_for_others_take_nothing() -> None:
    many = "".join(f"Disallow: /{number}/x\n" for number in range(robots.MAX_RULES + 10))
    found = rules(f"User-agent: x\n{many}\nUser-agent: streamrag\nUser-agent: y\nHost: z\nUser-agent: q\n{many}")
    paths = ("/0/x", f"/{robots.MAX_RULES - 2}/x", f"/{robots.MAX_RULES}/x")
    assert [can_fetch(found, path) for path in paths] == [False, False, True]
    assert rules(f"User-agent: x\n{many}").num_bytes < 10_000
    tracemalloc.start()
    try:
        found = rules("User-agent: *\n" + "".join(f"Allow:{number:04x}$\n" for number in range(40_000)))
        can_fetch(found, "/")
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2_000_000 < num_bytes < found.num_bytes < robots.MAX_BYTES


def test_rates_that_no_number_holds_are_no_error() -> None:
    nines = "9" * 400
    assert rules(f"User-agent: *\nRequest-rate: 1/{nines}").delay_s == robots.MAX_DELAY_S
    assert rules(f"User-agent: *\nRequest-rate: {nines}/1").delay_s < 1e-6


BOMBS = {
    "many robots": "".join(f"User-agent: bot{i}\n" for i in range(30_000)) + "Disallow: /x\n" * 5000,
    "many groups": "User-agent: a\nDisallow: /\n" * 20_000,
    "names like ours": "".join(f"User-agent: streamrag/{i}\n" for i in range(22_000)) + "Disallow: /x",
    "wildcards": "User-agent: *\n" + f"Disallow: /{'*a' * 1500}b\n" * 160,
    "special rules": "User-agent: *\n" + "Disallow: *a\n" * 39_000,
    "one line": "User-agent: *\nDisallow: /" + "%" * 500_000,
    "percent signs": "User-agent: *\nDisallow: /" + "%61" * 160_000,
    "no line": "x" * 500_000,
    "control characters": "User-agent: *\nDisallow: \x00\x1f\ufffe\n" * 10_000,
    "addresses": "User-agent: *\nDisallow: http://[::1\nSitemap: http://[\n" * 9000,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_is_made_to_be_slow_takes_time_in_proportion(name: str) -> None:
    """In quadratic time, the least of these files would take minutes."""
    body = BOMBS[name].encode()[: 500 << 10]
    found = parse(body, AGENT)
    for _ in range(3):
        can_fetch(found, "/" + "a" * 1900)


async def test_the_first_half_megabyte_of_an_endless_robots_txt_counts(site: Website) -> None:
    site.add("/robots.txt", "User-agent: *\nDisallow: /a\n" + "#" * (600 << 10) + "\nDisallow: /b")
    assert await allowed(site, "/a", "/b") == [False, True]


async def test_the_number_of_remembered_robots_txt_is_bounded(site: Website, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robots, "MAX_BYTES", 4000)
    site.add("/robots.txt", "User-agent: *\nDisallow: /a")
    known = new()
    async with fetching() as fetcher:
        for host in ("127.0.0.1", "127.0.0.2", "localhost") * 2:
            await known.rules(site.url(host=host), fetcher)
        assert len(known._entries) <= 3
        await known.rules(site.url(host="localhost"), fetcher)
    assert len(site.robots_requests) <= 6
