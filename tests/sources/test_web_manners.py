"""Whole crawls that keep to what hosts ask for, and to the user's bounds on what they may have."""

import asyncio
import gzip
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from crawls import QUERY, NewSource, crawl, cut_short, maker, paths, reasons, text
from test_pdf import changed, pdf, with_content
from website import Website

from streamrag.core import Append, SourceEvent
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.web import WebSource

pytest.importorskip("crawl4ai")
pytestmark = pytest.mark.asyncio(loop_scope="module")

DISALLOWED = "robots.txt of its host does not allow it"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[WebSource]:
    source = WebSource(["http://docs.example/"], CrawlOptions(num_workers=1))
    await source.start(lambda line: None)
    yield source
    await source.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def site() -> AsyncIterator[Website]:
    async with Website().running() as site:
        yield site


@pytest_asyncio.fixture(loop_scope="module")
async def new(started: WebSource, site: Website) -> AsyncIterator[NewSource]:
    yield maker(started, site)
    await site.until_all_closed()


def forbid(site: Website, *lines: str) -> None:
    site.add("/robots.txt", "User-agent: *\n" + "\n".join(lines), content_type="text/plain")


async def test_a_page_that_robots_txt_forbids_is_skipped_and_does_not_count(site: Website, new: NewSource) -> None:
    forbid(site, "Disallow: /no")
    site.add("/", text("Emperor", *(f"/no/{i}-penguins-swim" for i in range(5)), "/a", "/b", "/c"))
    for path in ("/a", "/b", "/c"):
        site.add(path, text(path[1:]))
    events = await crawl(new(max_pages=3))
    assert sorted(paths(events)) == ["/", "/a", "/b"]
    assert reasons(events) == {f"/no/{i}-penguins-swim": DISALLOWED for i in range(5)}
    assert cut_short(events) == []
    assert sorted(site.paths) == ["/", "/a", "/b"]
    assert len(site.robots_requests) == 1


async def test_robots_txt_is_asked_for_once_in_the_sources_life(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor"))
    source = new()
    for _ in range(3):
        await crawl(source)
    assert len(site.robots_requests) == 1


async def test_robots_txt_is_not_asked_for_if_it_is_not_to_be_obeyed(site: Website, new: NewSource) -> None:
    forbid(site, "Disallow: /", "Crawl-delay: 1000")
    site.add("/", text("Emperor", "/a"))
    site.add("/a", text("King"))
    assert paths(await crawl(new(obey_robots=False))) == ["/", "/a"]
    assert site.robots_requests == []


async def test_a_start_page_that_is_forbidden_is_skipped(site: Website, new: NewSource) -> None:
    forbid(site, "Disallow: /")
    site.add("/", text("Emperor"))
    assert reasons(await crawl(new())) == {"/": DISALLOWED}
    assert site.requests == []


async def test_the_target_of_a_redirect_must_be_allowed_by_robots_txt_too(site: Website, new: NewSource) -> None:
    forbid(site, "Disallow: /no")
    site.add("/", text("Emperor", "/a"))
    site.add_redirect("/a", "/no")
    site.add("/no", text("King"))
    events = await crawl(new())
    assert reasons(events) == {"/a": DISALLOWED}
    assert "/no" not in site.paths


async def test_robots_txt_is_asked_about_the_page_that_a_server_may_give(site: Website, new: NewSource) -> None:
    forbid(site, "Disallow: /no")
    site.add("/", text("Emperor", site.url("/a/../no"), "/%6Eo", "/a/%2e%2E/no/penguins", site.url("/./no")))
    assert set(reasons(await crawl(new())).values()) == {DISALLOWED}
    assert site.paths == ["/"]


async def test_pages_that_redirect_to_forbidden_ones_count(site: Website, new: NewSource) -> None:
    forbid(site, "Disallow: /no")
    site.add("/", text("Emperor", *(f"/{i}" for i in range(20))))
    for i in range(20):
        site.add_redirect(f"/{i}", f"/no/{i}")
    assert set(reasons(await crawl(new(max_pages=5))).values()) == {DISALLOWED}
    assert len(site.requests) == 5


async def test_a_host_whose_robots_txt_fails_is_left_alone(site: Website, new: NewSource) -> None:
    site.add("/robots.txt", status=500)
    site.add("/", text("Emperor"))
    why = "robots.txt of its host cannot be read (the server answers HTTP 500), so nothing is allowed"
    assert reasons(await crawl(new())) == {"/": why}


async def test_a_crawler_obeys_the_rules_for_its_own_name(site: Website, new: NewSource) -> None:
    site.add("/robots.txt", "User-agent: examplebot\nDisallow: /\n")
    site.add("/", text("Emperor"))
    assert reasons(await crawl(new(user_agent="ExampleBot/2.0 (+https://example.com)"))) == {"/": DISALLOWED}
    assert paths(await crawl(new())) == ["/"]


async def test_a_crawl_delay_longer_than_the_crawl_leaves_a_gap_at_once(site: Website, new: NewSource) -> None:
    forbid(site, "Crawl-delay: 1000")
    site.add("/", text("Emperor", "/a", "/b"))
    events = await crawl(new())
    assert paths(events) == ["/"]
    assert all("when the crawl is over" in reason for reason in reasons(events).values())
    assert cut_short(events) == ["2 pages not fetched, because servers asked to wait"]
    assert site.paths == ["/"]


async def test_a_busy_host_is_asked_again_and_gives_its_page(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/a"))
    site.add("/a", status=503, headers={"Retry-After": "1"})
    source = new()
    async with asyncio.timeout(120), aclosing(source.stream(QUERY)) as stream:
        events: list[SourceEvent] = []
        async for event in stream:
            events.append(event)
            await site.until_asked("/a")
            site.add("/a", text("King"))
    assert paths(events) == ["/", "/a"]
    assert site.paths.count("/a") == 2
    assert cut_short(events) == []


async def test_a_host_that_wants_an_hour_leaves_a_gap(site: Website, new: NewSource) -> None:
    site.add("/", status=429, headers={"Retry-After": "3600"})
    events = await crawl(new())
    assert reasons(events) == {"/": "the server answers HTTP 429, and asks to wait for 3600 s"}
    assert cut_short(events) == ["1 page not fetched, because servers asked to wait"]
    assert len(site.requests) == 1


async def test_a_retry_after_a_redirect_is_no_second_visit(site: Website, new: NewSource) -> None:
    site.add_redirect("/", "/home")
    site.add("/home", status=503)
    crawling = asyncio.create_task(crawl(new()))
    await site.until_asked("/home")
    site.add("/home", text("Emperor"))
    assert paths(await crawling) == ["/home"]


async def test_pages_of_one_host_are_counted(site: Website, new: NewSource) -> None:
    other = [site.url(f"/{i}", host="localhost") for i in range(4)]
    site.add("/", text("Emperor", "/a", "/b", "/c", *other))
    for path in ("/a", "/b", "/c", *(f"/{i}" for i in range(4))):
        site.add(path, text(path[1:]))
    events = await crawl(new(same_host=False, max_pages_per_host=3))
    hosts = [event.chunk.uri.split("/")[2].split(":")[0] for event in events if isinstance(event, Append)]
    assert sorted(hosts) == ["127.0.0.1"] * 3 + ["localhost"] * 3
    events = await crawl(new([site.url("/a"), site.url("/b")], max_pages_per_host=1))
    assert reasons(events) == {"/b": "max_pages_per_host=1 is less than the number of start URLs of its host"}


async def test_bytes_of_one_crawl_are_counted(site: Website, new: NewSource) -> None:
    big = text("Emperor", *(f"/{i}" for i in range(6))) + "<!--" + "x" * 50_000 + "-->"
    site.add("/", big)
    for i in range(6):
        site.add(f"/{i}", text(f"Number {i}") + "<!--" + "x" * 50_000 + "-->")
    events = await crawl(new(max_crawl_bytes=120_000, num_fetches=1))
    assert len(paths(events)) == 2
    assert set(reasons(events).values()) == {"the crawl has reached max_crawl_bytes=120000"}
    assert cut_short(events) == []  # it is the user's own bound


async def test_leaving_while_waiting_for_a_host_closes_everything(site: Website, new: NewSource) -> None:
    forbid(site, "Crawl-delay: 20")
    site.add("/", text("Emperor", "/a", "/b"))
    source = new()
    async with asyncio.timeout(120), aclosing(source.stream(QUERY)) as stream:
        await anext(stream)
        await asyncio.sleep(0.05)
    assert {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("crawl http")} == set()
    async with source._shared.hosts.using(site.url().split("/")[2]) as host:
        assert host.num_users == 1
        assert not host._next.locked()


# --------------------------------------------------------------------------------------------------------- other kinds


async def test_a_pdf_is_a_page_and_a_bad_one_is_skipped(site: Website, new: NewSource) -> None:
    good = pdf("Penguins swim.", "They do so with their wings.")
    site.add("/", text("Emperor", "/good.pdf", "/damaged.pdf", "/locked.pdf", "/bomb.pdf"))
    site.add("/good.pdf", good, content_type="application/pdf")
    site.add("/damaged.pdf", good[:400], content_type="application/pdf")
    locked = changed(good, lambda writer: writer.encrypt("secret", algorithm="RC4-128"))
    site.add("/locked.pdf", locked, content_type="application/pdf")
    site.add("/bomb.pdf", with_content(bytes(80 << 20), 2), content_type="application/pdf")
    events = await crawl(new())
    assert sorted(paths(events)) == ["/", "/good.pdf"]
    [chunk] = [event.chunk for event in events if isinstance(event, Append) and event.chunk.uri.endswith("good.pdf")]
    assert (chunk.title, chunk.text) == ("Penguins", "Penguins swim.\n\nThey do so with their wings.")
    found = reasons(events)
    assert found["/damaged.pdf"].startswith("it is a damaged PDF: ")
    assert found["/locked.pdf"] == "it is a PDF that needs a password"
    assert found["/bomb.pdf"] == "it is a damaged PDF: none of its pages can be read"


# ------------------------------------------------------------------------------------------------------- kept on disk


async def test_a_second_question_fetches_and_cleans_nothing_again(
    site: Website, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = {"Cache-Control": "max-age=3600"}
    site.add("/robots.txt", "User-agent: *\nCrawl-delay: 0.2", headers=fresh)
    site.add("/", text("Emperor", "/a"), headers=fresh)
    site.add("/a", text("King"), headers=fresh)
    cache = tmp_path / "cache"
    first = WebSource([site.url()], CrawlOptions(allow_private=True, num_workers=1, cache_folder=cache))
    second = WebSource([site.url()], CrawlOptions(allow_private=True, num_workers=1, cache_folder=cache))
    try:
        await first.start(lambda line: None)
        events = await crawl(first)
        assert sorted(paths(events)) == ["/", "/a"]
        assert await crawl(first, "king") != events
        await second.start(lambda line: None)
        assert await crawl(second) == events
        assert sorted(site.paths) == ["/", "/a"]
        assert len(site.robots_requests) == 2  # each source asks for itself
        kept = [path for path in cache.iterdir() if b'"text":' in path.read_bytes()]
        assert len(kept) == 2
        for path in cache.iterdir():
            path.write_bytes(b"damaged")
        assert await crawl(second) == events
        assert sorted(site.paths) == ["/", "/", "/a", "/a"]
    finally:
        await first.aclose()
        await second.aclose()


# ----------------------------------------------------------------------------------------------------------- sitemaps


def add_sitemap(site: Website, path: str, *paths: str, kind: str = "url") -> None:
    entries = "".join(f"<{kind}><loc>{site.url(each)}</loc></{kind}>" for each in paths)
    site.add(path, f"<urlset>{entries}</urlset>", content_type="application/xml")


async def test_pages_that_no_link_leads_to_are_found_in_sitemaps(site: Website, new: NewSource) -> None:
    site.add("/robots.txt", f"Sitemap: {site.url('/index.xml')}\nUser-agent: *\nDisallow: /no")
    add_sitemap(site, "/index.xml", "/a.xml", "/b.xml.gz", "/index.xml", kind="sitemap")
    add_sitemap(site, "/a.xml", "/penguins/king", "/other", "/no/penguins")
    add_sitemap(site, "/b.xml.gz", "/penguins/adelie")
    site.add("/", text("Emperor", *(f"/{i}" for i in range(9))))
    for path in ("/penguins/king", "/penguins/adelie", *(f"/{i}" for i in range(9))):
        site.add(path, text(path[1:]))
    events = await crawl(new(sitemaps=True, max_pages=6))
    found = set(paths(events))
    assert {"/", "/penguins/king", "/penguins/adelie"} <= found
    assert len(found) == 6
    assert reasons(events) == {"/no/penguins": DISALLOWED}
    hints = [event.hint.num_chunks for event in events if isinstance(event, Append) and event.hint]
    assert hints[-1] == 0
    assert site.paths.count("/index.xml") == 1


async def test_a_site_without_sitemaps_is_crawled_as_ever(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", *(f"/{i}" for i in range(9))))
    for i in range(9):
        site.add(f"/{i}", text(f"Number {i}"))
    events = await crawl(new(sitemaps=True, max_pages=5))
    assert len(paths(events)) == len(events) == 5
    assert site.paths.count("/sitemap.xml") == 1


async def test_sitemaps_that_fail_are_told_and_lead_nowhere_else(site: Website, new: NewSource) -> None:
    elsewhere = site.url("/x.xml", host="localhost")
    named = (site.url(path) for path in ("/gone.xml", "/page.xml", "/away.xml"))
    site.add("/robots.txt", "\n".join(f"Sitemap: {each}" for each in (*named, elsewhere, "http://169.254.169.254/")))
    site.add("/page.xml", text("King"))
    site.add_redirect("/away.xml", elsewhere)
    site.add("/", text("Emperor"))
    events = await crawl(new(sitemaps=True))
    assert paths(events) == ["/"]
    assert reasons(events) == {
        "/gone.xml": "the server answers HTTP 404",
        "/page.xml": "it is text/html, not a sitemap",
        "/away.xml": f"it redirects to another host: {elsewhere}",
    }
    assert "/x.xml" not in site.paths


async def test_leaving_while_sitemaps_are_read_closes_everything(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/a"))
    site.add_gate("/sitemap.xml")
    async with asyncio.timeout(120), aclosing(new(sitemaps=True).stream(QUERY)) as stream:
        await anext(stream)
        await site.until_asked("/sitemap.xml")
    await site.until_all_closed()


async def test_a_sitemap_that_never_comes_leaves_the_links(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/a", "/b", "/c"))
    for path in ("/a", "/b", "/c"):
        site.add(path, text(path[1:]))
    site.add_gate("/sitemap.xml")
    events = await crawl(new(sitemaps=True, max_pages=3, page_timeout_s=5))
    assert len(paths(events)) == 3


def name_sitemaps(site: Website, *paths: str) -> None:
    site.add("/robots.txt", "\n".join(f"Sitemap: {site.url(path)}" for path in paths))


async def test_a_slow_sitemap_keeps_neither_the_others_nor_the_links_waiting(site: Website, new: NewSource) -> None:
    name_sitemaps(site, "/slow.xml", "/a.xml", "/b.xml")
    site.add_gate("/slow.xml")
    add_sitemap(site, "/a.xml", "/penguins/king")
    add_sitemap(site, "/b.xml", "/penguins/adelie")
    links = [f"/{i}" for i in range(6)]
    site.add("/", text("Emperor", *links))
    for path in ("/penguins/king", "/penguins/adelie", *links):
        site.add(path, text(path[1:]))
    events = await crawl(new(sitemaps=True, max_pages=10, crawl_timeout_s=15))
    assert sorted(paths(events)) == sorted(["/", "/penguins/king", "/penguins/adelie", *links])
    assert reasons(events) == {"/slow.xml": "it is not read: a third of crawl_timeout_s=15 is over"}
    assert cut_short(events) == ["1 sitemap not read, or not to the end"]


async def test_after_two_sitemaps_that_take_too_much_none_is_begun_and_pages_are(site: Website, new: NewSource) -> None:
    named = [f"/{i}.xml" for i in range(8)]
    name_sitemaps(site, *named)
    for path in named:
        site.add_gate(path)
    site.add("/", text("Emperor", "/a", "/b"))
    for path in ("/a", "/b"):
        site.add(path, text(path[1:]))
    events = await crawl(new(sitemaps=True, page_timeout_s=4))
    assert sorted(paths(events)) == ["/", "/a", "/b"]
    found = reasons(events)
    assert [found["/0.xml"], found["/1.xml"]] == ["it did not end within 4 s"] * 2
    assert any(
        reason.startswith("it is not read, nor are ")
        and reason.endswith(": 2 sitemaps of its host exceeded their limits")
        for reason in found.values()
    )
    assert len(set(named).intersection(site.paths)) <= 3
    assert cut_short(events) == ["8 sitemaps not read, or not to the end"]


async def test_a_sitemap_beyond_the_users_bound_is_told_and_leaves_no_gap(site: Website, new: NewSource) -> None:
    lines = "".join(f"{site.url(f'/penguins/{i:03}')}\n" for i in range(1000))
    site.add("/sitemap.xml", lines, content_type="text/plain")
    site.add("/", text("Emperor"))
    length = len(f"{site.url('/penguins/000')}\n")
    site.add("/penguins/000", text("King"))
    site.add("/penguins/001", text("Adelie"))
    events = await crawl(new(sitemaps=True, max_body_bytes=3 * length - 2))
    assert sorted(paths(events)) == ["/", "/penguins/000", "/penguins/001"]
    why = f"it is larger than max_body_bytes={3 * length - 2}: only its beginning is read"
    assert reasons(events) == {"/sitemap.xml": why}
    assert cut_short(events) == []


@pytest.mark.parametrize("max_pages", [2, 20])
async def test_a_damaged_sitemap_leaves_a_gap_where_there_is_place_for_more(
    site: Website, new: NewSource, max_pages: int
) -> None:
    whole = gzip.compress(f"{site.url('/penguins')}\n".encode() + os.urandom(2000).hex().encode())
    site.add("/sitemap.xml", whole[:-500], content_type="application/gzip")
    site.add("/", text("Emperor"))
    site.add("/penguins", text("King"))
    events = await crawl(new(sitemaps=True, max_pages=max_pages))
    assert sorted(paths(events)) == ["/", "/penguins"]
    why = "it is damaged or too large: only a part of it is read"
    assert reasons(events) == {"/sitemap.xml": why}
    assert cut_short(events) == ["1 sitemap not read, or not to the end"] * (max_pages == 20)


async def test_sitemaps_beyond_the_tenth_are_told(site: Website, new: NewSource) -> None:
    add_sitemap(site, "/sitemap.xml", *(f"/{i}.xml" for i in range(12)), kind="sitemap")
    for i in range(12):
        add_sitemap(site, f"/{i}.xml", f"/penguins/{i}")
        site.add(f"/penguins/{i}", text(f"Number {i}"))
    site.add("/", text("Emperor"))
    events = await crawl(new(sitemaps=True))
    assert sorted(paths(events)) == sorted(["/", *(f"/penguins/{i}" for i in range(9))])
    assert reasons(events) == {"/9.xml": "it is not read, nor are 2 more: 10 sitemaps of a host are"}
    assert cut_short(events) == ["3 sitemaps not read, or not to the end"]


async def test_pages_of_sitemaps_count_though_another_sitemap_is_unreachable(site: Website, new: NewSource) -> None:
    name_sitemaps(site, "/a.xml", "/b.xml", "/c.xml")
    add_sitemap(site, "/a.xml", "/penguins/king")
    site.add("/b.xml", fault="breaks off at once")
    add_sitemap(site, "/c.xml", "/penguins/adelie")
    site.add("/", text("Emperor"))
    for path in ("/penguins/king", "/penguins/adelie"):
        site.add(path, text(path[1:]))
    events = await crawl(new(sitemaps=True))
    assert sorted(paths(events)) == ["/", "/penguins/adelie", "/penguins/king"]
    assert "cannot be reached" in reasons(events)["/b.xml"]


@pytest.mark.parametrize("content_type", ["text/html", "application/octet-stream", "binary/octet-stream", None])
async def test_a_sitemap_is_recognised_by_its_content(site: Website, new: NewSource, content_type: str | None) -> None:
    body = f"<urlset><url><loc>{site.url('/penguins/king')}</loc></url></urlset>".encode()
    site.add("/robots.txt", f"Sitemap: {site.url('/map')}")
    site.add("/map", gzip.compress(body), content_type=content_type)
    site.add("/", text("Emperor"))
    site.add("/penguins/king", text("King"))
    assert set(paths(await crawl(new(sitemaps=True)))) == {"/", "/penguins/king"}


@pytest.mark.parametrize(
    "page",
    [
        '<meta http-equiv="refresh" content="0; url=/docs/">',
        "<meta http-equiv=Refresh content=\"1;URL='/docs/'\"><title>Moved</title><p>Redirecting</p>",
        '<frameset cols="20%,*"><frame src="/docs/"></frameset>',
        '<body><iframe src="/docs/"></iframe></body>',
        '<body><noscript><iframe src="/count"></iframe></noscript><iframe src="/docs/"></iframe></body>',
        '<meta http-equiv="refresh" content=".5; url=/docs/">',
        '<noscript><meta http-equiv="refresh" content="0; url=/docs/"></noscript><script>go()</script>',
    ],
)
async def test_a_start_page_that_only_leads_on_is_followed_like_a_redirect(
    site: Website, new: NewSource, page: str
) -> None:
    site.add("/", page)
    site.add("/docs/", text("Emperor"))
    events = await crawl(new(max_depth=0, max_pages=1))
    assert paths(events) == ["/docs/"]
    assert reasons(events)["/"].endswith(f"; it leads on to {site.url('/docs/')}")


@pytest.mark.parametrize("page", ["<p></p>", ""])
async def test_the_header_refresh_is_followed(site: Website, new: NewSource, page: str) -> None:
    site.add("/", page, headers={"Refresh": "0; url=/docs/"})
    site.add("/docs/", text("Emperor"))
    assert paths(await crawl(new(max_depth=0))) == ["/docs/"]


async def test_refreshes_without_end_are_followed_as_often_as_redirects(site: Website, new: NewSource) -> None:
    for i in range(20):
        site.add("/" if i == 0 else f"/{i}", f'<meta http-equiv="refresh" content="0; url=/{i + 1}">')
    await crawl(new(max_depth=0))
    assert site.paths == ["/", "/1", "/2", "/3", "/4", "/5"]


async def test_a_refresh_leads_to_no_other_host_and_no_unsafe_address(site: Website, new: NewSource) -> None:
    site.add("/", text("Emperor", "/away", "/late", "/unsafe"))
    elsewhere = site.url("/x", host="localhost")
    site.add("/away", f'<meta http-equiv="refresh" content="0; url={elsewhere}">')
    site.add("/late", '<meta http-equiv="refresh" content="300; url=/x">')
    site.add("/unsafe", '<meta http-equiv="refresh" content="0; url=file:///etc/passwd">')
    site.add("/x", text("King"))
    assert paths(await crawl(new())) == ["/"]
    assert "/x" not in site.paths


async def test_a_refresh_for_readers_without_scripts_is_not_followed_from_a_page_with_text(
    site: Website, new: NewSource
) -> None:
    site.add("/", text("Emperor") + '<noscript><meta http-equiv="refresh" content="0; url=/plain"></noscript>')
    site.add("/plain", text("King"))
    assert paths(await crawl(new(max_depth=0))) == ["/"]


async def test_sitemaps_may_be_named_without_their_host(site: Website, new: NewSource) -> None:
    site.add("/robots.txt", "Sitemap: /map")
    site.add("/map", f"<urlset><url><loc>{site.url('/penguins/king')}</loc></url></urlset>")
    site.add("/", text("Emperor"))
    site.add("/penguins/king", text("King"))
    assert set(paths(await crawl(new(sitemaps=True)))) == {"/", "/penguins/king"}


async def test_areas_backslashes_and_escapes_of_tildes_are_links_to_one_page(site: Website, new: NewSource) -> None:
    page = text("Emperor", "/%7Eking/", "/~king/", "/%7eking/", "\\adelie\\page")
    site.add("/", page + '<map><area href="/gentoo" alt="Gentoo"></map>')
    for path in ("/~king/", "/adelie/page", "/gentoo"):
        site.add(path, text(path))
    assert sorted(paths(await crawl(new()))) == ["/", "/adelie/page", "/gentoo", "/~king/"]
    assert len(site.paths) == 4
