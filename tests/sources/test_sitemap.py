"""What sitemaps name, and what those that are made to be large, slow or sly may cost."""

import gzip
import tracemalloc
import zlib

import pytest

from streamrag.sources.pages import sitemap
from streamrag.sources.pages.page_content import SitemapUrls
from streamrag.sources.pages.sitemap import read_sitemap

URL = "http://docs.example/sitemap.xml"
NAMESPACE = "http://www.sitemaps.org/schemas/sitemap/0.9"


def urlset(*addresses: str) -> bytes:
    urls = "".join(f"<url><loc> {each} </loc><lastmod>2026</lastmod></url>\n" for each in addresses)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="{NAMESPACE}">{urls}</urlset>'.encode()


def index(*addresses: str) -> bytes:
    maps = "".join(f"<sitemap><loc>{each}</loc></sitemap>" for each in addresses)
    return f'<sitemapindex xmlns="{NAMESPACE}">{maps}</sitemapindex>'.encode()


def find(body: bytes, query: str = "How do penguins swim?") -> SitemapUrls:
    return read_sitemap({"url": URL, "query": query}, body, str)


PAGES = urlset(
    "http://docs.example/other",
    "http://docs.example/penguins",
    "http://docs.example/penguins-swim.html?a=1&amp;b=2",
    "/swim/relative",
    "javascript:x",
    "http://docs.example/penguins.zip",
)
FOUND = [
    "http://docs.example/penguins-swim.html?a=1&b=2",
    "http://docs.example/penguins",
    "http://docs.example/swim/relative",
]


@pytest.mark.parametrize(
    "body", [PAGES, gzip.compress(PAGES), b"\xef\xbb\xbf\n" + PAGES, PAGES.replace(b" xmlns=", b" x=")]
)
def test_pages_that_promise_something_come_in_that_order(body: bytes) -> None:
    assert find(body) == SitemapUrls(FOUND, [], is_cut=False)


def test_an_index_names_sitemaps_and_those_that_promise_more_come_first() -> None:
    body = index("http://docs.example/1.xml", "http://docs.example/penguins.xml.gz")
    expected = ["http://docs.example/penguins.xml.gz", "http://docs.example/1.xml"]
    assert find(body) == SitemapUrls([], expected, is_cut=False)


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(PAGES[:90]) + gzip.compress(PAGES[90:]),
        PAGES.replace(b"<loc>", b"<loc><!-- new -->"),
        PAGES.replace(b"&amp;", b"&"),
        PAGES.replace(
            b"<loc> http://docs.example/penguins-swim.html?a=1&amp;b=2 ",
            b"<loc><![CDATA[\n/penguins-swim.html?a=1&b=2]]>",
        ),
        PAGES.replace(
            b"<url>", b"<url><i:image xmlns:i='i'><i:loc>http://docs.example/penguins/swim/picture</i:loc></i:image>"
        ),
        PAGES.replace(b" xmlns=", b" x=").replace(b"<", b"<s:").replace(b"<s:/", b"</s:").replace(b"<s:?", b"<?"),
        b"http://docs.example/penguins\rhttp://docs.example/penguins-swim.html?a=1&b=2\rhttp://docs.example/swim/relative",
    ],
    ids=["members", "comment", "ampersand", "cdata", "picture", "prefix", "carriage returns"],
)
def test_pages_are_found_however_a_sitemap_is_written(body: bytes) -> None:
    assert find(body).pages == FOUND


def test_lines_of_text_are_a_sitemap() -> None:
    body = b"http://docs.example/penguins\r\nnonsense\n\nhttp://docs.example/other\n"
    assert find(body).pages == ["http://docs.example/penguins"]


def test_the_last_line_of_a_cut_text_sitemap_is_left_out() -> None:
    job = {"url": "http://docs.example/sitemap.txt", "query": "penguins", "is_cut": True}
    body = b"http://docs.example/penguins\nhttp://docs.example/penguins-sw"
    found = sitemap.read_sitemap(job, body, str)
    assert found == SitemapUrls(["http://docs.example/penguins"], [], is_cut=True)
    whole = sitemap.read_sitemap({**job, "is_cut": False}, body, str)
    assert whole.pages == ["http://docs.example/penguins", "http://docs.example/penguins-sw"]


def test_the_beginning_of_a_damaged_or_cut_sitemap_counts() -> None:
    assert find(PAGES[: PAGES.index(b"/swim/rel")]).pages == FOUND[:2]
    cut = gzip.compress(PAGES)[:-20]
    assert find(cut).is_cut
    for body in (
        b"",
        b"<",
        b"\x1f\x8b",
        b"\x1f\x8bxxxxxxxxxx",
        b"\xff" * 1000,
        b"<a>" * 1000,
        b"<loc>x",
        b"\x00<urlset>",
    ):
        assert find(body).pages == []


def test_entities_stay_what_they_are_and_nothing_is_loaded() -> None:
    laughs = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    sly = [
        f'<!DOCTYPE x [<!ENTITY l0 "penguins">{laughs}]><urlset><url><loc>http://docs.example/&l9;</loc></url></urlset>',
        '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><urlset><url><loc>http://a.example/penguins&e;</loc></url>',
        '<!DOCTYPE x SYSTEM "http://127.0.0.1:9/x.dtd"><urlset><url><loc>&e;</loc></url></urlset>',
    ]
    for body in sly:
        assert find(body.encode()).pages == []


def test_a_bomb_is_read_up_to_the_limit() -> None:
    compressor = zlib.compressobj(wbits=31)
    bomb = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(6)) + compressor.flush()
    tracemalloc.start()
    assert find(bomb) == SitemapUrls([], [], is_cut=True)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 * sitemap.MAX_SITEMAP_BYTES


@pytest.mark.timeout(60)
def test_many_compressed_files_in_one_are_bounded() -> None:
    found = find(gzip.compress(PAGES) + gzip.compress(b" ") * 100_000)
    assert (found.pages, found.is_cut) == (FOUND, True)


def test_many_addresses_and_deep_files_are_bounded() -> None:
    many = find(urlset(*(f"http://docs.example/penguins/{i}" for i in range(60_000))))
    assert many.is_cut
    assert 0 < len(many.pages) <= 500
    assert len(find(index(*(f"http://docs.example/{i}.xml" for i in range(1000)))).sitemaps) == sitemap.MAX_SITEMAPS
    find(b"<a>" * 1_000_000)
    find(b"<urlset>" + b"<url " + b"".join(b'a%d="" ' % i for i in range(50_000)) + b"/></urlset>")
    find(b"<urlset><url><loc>" + b"penguins" * 500_000)
    find(b"\n" * 4_000_000)


RSS = """<?xml version="1.0"?><rss version="2.0" xmlns:atom="http://www.w3.org/2005/Atom"><channel><title>Birds</title>
<link>http://docs.example/</link><item>
<atom:link href="http://docs.example/x" rel="self"/><title>How penguins swim</title><link>http://docs.example/1</link></item><item><title>Other</title><link>/other</link></item></channel></rss>"""
ATOM = """<feed xmlns="http://www.w3.org/2005/Atom"><link href="http://docs.example/"/><entry>
<title>Penguins swim</title><link rel="edit" href="http://docs.example/edit"/><link href="http://docs.example/1"/></entry></feed>"""


ATOM_BASE = """<feed xmlns="http://www.w3.org/2005/Atom" xml:base="http://docs.example/"><entry>
<title type="xhtml"><div xmlns="http://www.w3.org/1999/xhtml"><i>Penguins</i> swim</div></title>
<link href="1"/></entry></feed>"""
RSS_GUID = RSS.replace("<link>http://docs.example/1</link>", "<guid>http://docs.example/1</guid>")


@pytest.mark.parametrize("body", [RSS, RSS_GUID, ATOM, ATOM_BASE])
def test_entries_of_a_feed_are_pages_and_their_titles_count(body: str) -> None:
    assert find(body.encode()) == SitemapUrls(["http://docs.example/1"], [], is_cut=False)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_sitemap_may_begin_with_a_byte_order_mark(encoding: str) -> None:
    assert find(PAGES.decode().replace("UTF-8", "UTF-16").encode(encoding)).pages == FOUND


@pytest.mark.parametrize(
    ("body", "other"),
    [
        (b"<!doctype html><p>Not found", "text/html"),
        (b"<p>Not found", "text/html"),
        (b"Not found", "text without addresses"),
        (b'<?xml version="1.0"?><catalog/>', "XML with <catalog>"),
        (b'<?xml version="1.0"?><!-- <html> --><urlset/>', ""),
        (b"<?a?>" * 10_000, "text/html"),
        (b"", ""),
    ],
)
def test_a_file_that_is_no_sitemap_says_what_it_is(body: bytes, other: str) -> None:
    assert find(body) == SitemapUrls([], [], is_cut=False, no_sitemap=other)
