"""Pages on disk: what is used again, what is asked for again, and what damage and strangers can do."""

import asyncio
import email.utils
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_robots import AGENT, fetching
from website import Website

from streamrag.errors import ConfigurationError, UnsafeUrlError
from streamrag.sources.crawl.page_fetcher import SITEMAPS
from streamrag.sources.documents.reader import Content
from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.http.page import PAGES, ContentRules, Page, UnusablePageError
from streamrag.sources.http.page_cache import PageCache
from streamrag.sources.pages.page_content import CONTENT

pytest.importorskip("hishel")
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

FRESH = {"Cache-Control": "max-age=3600"}
MB = 1 << 20


@pytest.fixture
async def site() -> AsyncIterator[Website]:
    async with Website().running() as site:
        yield site


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore(tmp_path, 16 * MB)
    store.open()
    return store


async def fetch(store: DiskStore, url: str, rules: ContentRules = PAGES, **limits: Any) -> Page:
    allow_private = limits.setdefault("allow_private", True)
    cache = PageCache(store, allow_private=allow_private, user_agent=AGENT)
    async with fetching(**limits) as fetcher:
        fetcher.cache = cache
        return await fetcher.fetch(url, lambda url: None, rules)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


# ------------------------------------------------------------------------------------------------------ what is asked


async def test_a_fresh_page_is_not_asked_for_again(site: Website, store: DiskStore) -> None:
    url = site.add("/", "<p>text", headers=FRESH)
    assert await fetch(store, url) == await fetch(store, url)
    assert len(site.requests) == 1


async def test_a_stale_page_is_asked_for_with_what_names_its_version(site: Website, store: DiskStore) -> None:
    url = site.add("/", "<p>old", headers={"ETag": '"1"', "Cache-Control": "max-age=0"})
    first = await fetch(store, url)
    site.add("/", status=304, headers={"ETag": '"1"', **FRESH})
    assert await fetch(store, url) == first
    assert site.requests[1].headers["if-none-match"] == '"1"'
    assert await fetch(store, url) == first  # the 304 has made it fresh
    assert len(site.requests) == 2


@pytest.mark.parametrize("ahead_s", [None, 7200.0])
async def test_a_page_grows_old_also_where_its_server_gives_no_date_or_one_to_come(
    site: Website, store: DiskStore, monkeypatch: pytest.MonkeyPatch, ahead_s: float | None
) -> None:
    date = "" if ahead_s is None else email.utils.formatdate(time.time() + ahead_s, usegmt=True)
    url = site.add("/", "<p>text", headers={"Date": date, **FRESH})
    await fetch(store, url)
    await fetch(store, url)
    assert len(site.requests) == 1
    later_s = time.time() + 4000
    monkeypatch.setattr("time.time", lambda: later_s)
    await fetch(store, url)
    assert len(site.requests) == 2


async def test_a_page_is_asked_for_again_when_the_clock_was_set_back_to_before_it_came(
    site: Website, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = site.add("/", "<p>text", headers={"Date": email.utils.formatdate(time.time(), usegmt=True), **FRESH})
    await fetch(store, url)
    earlier_s = time.time() - 4000
    monkeypatch.setattr("time.time", lambda: earlier_s)
    await fetch(store, url)
    assert len(site.requests) == 2
    await fetch(store, url)
    assert len(site.requests) == 2, "the clock may be right now"


async def test_a_page_that_has_changed_takes_the_old_ones_place(
    site: Website, store: DiskStore, tmp_path: Path
) -> None:
    date = email.utils.formatdate(time.time() - 60, usegmt=True)
    url = site.add("/", "<p>old", headers={"Last-Modified": date, "Cache-Control": "no-cache"})
    await fetch(store, url)
    site.add("/", "<p>new", headers=FRESH)
    assert (await fetch(store, url)).body == (await fetch(store, url)).body == b"<p>new"
    assert site.requests[1].headers["if-modified-since"] == date
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (200, {"Cache-Control": "no-store"}),
        (200, {}),
        (302, {"Location": "/b"}),
        (404, FRESH),
        (500, FRESH),
        (429, FRESH),
    ],
)
async def test_pages_that_must_not_be_stored_are_not_stored(
    site: Website, store: DiskStore, tmp_path: Path, status: int, fields: dict[str, str]
) -> None:
    url = site.add("/", "<p>text", status=status, headers=fields)
    site.add("/b", "<p>b")
    for _ in range(2):
        try:
            await fetch(store, url)
        except UnusablePageError:
            assert status >= 400
    assert site.paths.count("/") == 2
    assert files(tmp_path) == []


async def test_a_page_that_fails_when_it_is_asked_for_again_is_not_shown_as_it_was(
    site: Website, store: DiskStore
) -> None:
    url = site.add("/", "<p>old", headers={"ETag": '"1"', "Cache-Control": "max-age=0"})
    await fetch(store, url)
    site.add("/", status=404)
    with pytest.raises(UnusablePageError, match="HTTP 404"):
        await fetch(store, url)


async def test_redirects_that_last_are_kept(site: Website, store: DiskStore) -> None:
    url = site.add("/", status=301, headers={"Location": "/b", **FRESH})
    site.add("/b", "<p>b", headers=FRESH)
    for _ in range(2):
        assert (await fetch(store, url)).url == site.url("/b")
    assert site.paths == ["/", "/b"]


async def test_a_kept_page_must_still_fit_the_limits(site: Website, store: DiskStore) -> None:
    url = site.add("/", "x" * 5000, headers=FRESH)
    await fetch(store, url)
    with pytest.raises(UnusablePageError, match="larger than max_body_bytes=1000"):
        await fetch(store, url, max_body_bytes=1000)


async def test_a_body_that_was_cut_is_not_kept_for_the_whole(site: Website, store: DiskStore) -> None:
    url = site.add("/sitemap.txt", "x" * 5000, content_type="text/plain", headers=FRESH)
    cut = await fetch(store, url, SITEMAPS, max_body_bytes=1000)
    assert (len(cut.body), cut.is_cut) == (1000, True)
    whole = await fetch(store, url, SITEMAPS)
    assert (len(whole.body), whole.is_cut) == (5000, False)
    assert await fetch(store, url, SITEMAPS, max_body_bytes=1000) == cut
    assert len(site.requests) == 2


async def test_a_kept_private_page_is_not_for_a_source_that_may_not_fetch_it(site: Website, store: DiskStore) -> None:
    url = site.add("/", "<p>secret", headers=FRESH)
    await fetch(store, url)
    with pytest.raises(UnsafeUrlError):
        await fetch(store, url, allow_private=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"Cache-Control": "max-age=" + "9" * 300, "Age": "x" * 99},
        {"Cache-Control": 'max-age="1, private="a"b", ,=,;' + "\xff", "Date": "\xff", "Expires": "0"},
        {"Cache-Control": "max-age=-1", "Date": "Mon, 99 Foo 99999 99:99:99 GMT", "ETag": "\xff\xfe"},
        {"Vary": "*", **FRESH},
        {"Vary": "," * 5000, "Last-Modified": "9" * 5000},
        {"Expires": "Thu, 01 Jan 9999999999 00:00:00 GMT", "Last-Modified": "-1"},
        {"Cache-Control": "," * 20_000},
    ],
)
async def test_fields_that_make_no_sense_cost_nothing_but_the_cache(
    site: Website, store: DiskStore, fields: dict[str, str]
) -> None:
    url = site.add("/", "<p>text", headers=fields)
    for _ in range(3):
        assert (await fetch(store, url)).body == b"<p>text"


# -------------------------------------------------------------------------------------------------------- the folder


async def test_damage_costs_a_request_and_no_more(site: Website, store: DiskStore, tmp_path: Path) -> None:
    url = site.add("/", "<p>text", headers=FRESH)
    await fetch(store, url)
    [path] = files(tmp_path)
    whole = path.read_bytes()
    damages = [
        b"",
        whole[:-1],
        whole + b"x",
        whole[:30] + bytes([whole[30] ^ 1]) + whole[31:],
        b"x" * 100_000,
        whole[:20],
    ]
    for number, damaged in enumerate(damages, 2):
        path.write_bytes(damaged)
        assert (await fetch(store, url)).body == b"<p>text"
        assert len(site.requests) == number
    path.unlink()
    path.mkdir()
    assert (await fetch(store, url)).body == b"<p>text"
    path.rmdir()
    os.mkfifo(path)
    assert (await fetch(store, url)).body == b"<p>text"
    path.unlink()
    mine = tmp_path / "mine"
    mine.write_bytes(whole)
    path.symlink_to(mine)
    assert (await fetch(store, url)).body == b"<p>text"
    assert mine.read_bytes() == whole
    num_requests = len(site.requests)
    assert (await fetch(store, url)).body == b"<p>text"
    assert len(site.requests) == num_requests


@pytest.mark.parametrize("kept", [b"", b"[]\n", b"[200, {}]", b"[200, []]\nx", b'[301, {"a": "b"}]\n', b"[" * 99_999])
async def test_a_cached_entry_that_is_no_answer_is_fetched_again(site: Website, store: DiskStore, kept: bytes) -> None:
    url = site.add("/", "<p>text", headers=FRESH)
    asked: list[str] = []
    store.get = lambda key: asked.append(key) or kept  # type: ignore[method-assign,func-returns-value]
    assert (await fetch(store, url)).body == b"<p>text"
    assert len(asked) == 1


async def test_a_folder_that_goes_away_or_is_full_costs_requests_only(
    site: Website, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "cache", 16 * MB)
    store.open()
    (tmp_path / "cache").rmdir()
    url = site.add("/", "<p>text", headers=FRESH)
    for number in (1, 2):
        assert (await fetch(store, url)).body == b"<p>text"
        assert len(site.requests) == number
    full = DiskStore(tmp_path, 16 * MB)

    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    full.put("key", b"content")
    assert files(tmp_path) == []


def test_the_least_recently_used_go_first_and_other_files_stay(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MB)
    (tmp_path / "mine.txt").write_bytes(bytes(2 * MB))
    left = tmp_path / f".writing-{'0' * 8}-{'a' * 64}"
    left.write_bytes(b"")
    os.utime(left, (time.time() - 120, time.time() - 120))
    for number in range(40):
        store.put(str(number), bytes(50_000))
        path = store._path(str(number))
        if path.exists():
            os.utime(path, (1000 + number, 1000 + number))
        if store.get("0"):
            os.utime(store._path("0"), (1000 + number, 1000 + number))
    kept = [number for number in range(40) if store.get(str(number))]
    assert kept[0] == 0
    assert kept[1:] == list(range(41 - len(kept), 40))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3.2 * MB
    assert (tmp_path / "mine.txt").exists()
    assert not left.exists()
    store.put("large", bytes(MB))
    assert store.get("large") is None


WRITE = """
import sys
from streamrag.sources.http.disk_store import DiskStore
store = DiskStore(sys.argv[1], 1 << 20)
for number in range(400):
    key = str(number % 37)
    store.put(key, key.encode() * 9000)
    found = store.get(key)
    assert found in (None, key.encode() * 9000), "another one's"
"""


def test_processes_share_a_folder_and_one_that_is_killed_leaves_nothing_broken(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path)]) for _ in range(3)]
    while not files(tmp_path):
        time.sleep(0.01)
    processes[0].kill()
    assert [process.wait() for process in processes][1:] == [0, 0]
    store = DiskStore(tmp_path, MB)
    assert all(store.get(str(number)) in (None, str(number).encode() * 9000) for number in range(37))


def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cache_folder='.*file/x' cannot be used: .*; name one that can be"):
        DiskStore(tmp_path / "file" / "x", MB).open()
    DiskStore(tmp_path / "new", MB).open()
    assert (tmp_path / "new").stat().st_mode & 0o77 == 0


async def test_cancelling_while_it_is_written_leaves_a_whole_entry_or_none(site: Website, store: DiskStore) -> None:
    url = site.add("/", "<p>text", headers=FRESH)
    for _ in range(20):
        task = asyncio.create_task(fetch(store, url))
        await asyncio.sleep(0.003)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (await fetch(store, url)).body == b"<p>text"


WRONG_LINKS = b'{"url": "u", "title": "t", "text": "x", "links": %s, "is_cut": false}'


@pytest.mark.parametrize(
    "kept",
    [b"", b"{}", b"[]", b'{"url": 1}', b"\xff", b"[" * 99_999, WRONG_LINKS % b"[]", WRONG_LINKS % b"5"],
)
def test_malformed_page_content_is_refused(kept: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (pydantic's own)
        CONTENT.validate_json(kept)
    content = Content("T", "text", links={"http://b.example/": "B"})
    assert CONTENT.validate_json(CONTENT.dump_json(content)) == content
