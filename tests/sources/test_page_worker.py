import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hostile_pages import HTML, TEXT, attributes, new_names

from streamrag.sources.workers.pool import WorkerJobError, WorkerLimitError, WorkerPool

pytest.importorskip("crawl4ai")
pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_CPU_S = 10.0
"""Twice what the slowest of our pages takes with a million characters; what is quadratic takes minutes."""
SIZES = [200_000, pytest.param(1_000_000, marks=pytest.mark.long)]

URL = "http://docs.example/guide/page.html"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cleaner(home: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerPool]:
    scratch = str(tmp_path_factory.mktemp("scratch"))
    async with cleaning(scratch, home) as pool:
        yield pool


@asynccontextmanager
async def cleaning(scratch: str, home: Path, **limits: Any) -> AsyncIterator[WorkerPool]:
    options = {"user_agent": "test", "page_timeout_s": 100, "cdp_url": None}
    options |= {"max_page_cpu_s": MAX_CPU_S, "max_page_memory_bytes": 512 << 20, **limits}
    env = {"CRAWL4_AI_BASE_DIRECTORY": scratch, "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    pool = WorkerPool("streamrag.sources.pages.page_worker:PageCleaner", options, size=1, name="cleaner", env=env)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.aclose()


async def clean(cleaner: WorkerPool, page: str | bytes, query: str = "?", **job: Any) -> dict[str, Any]:
    """The worker's answer. The query without words keeps all text."""
    body = page.encode() if isinstance(page, str) else page
    defaults = {"url": URL, "kind": "html", "charset": "", "query": query, "max_chars": 10_000}
    return await cleaner.run({**defaults, **job}, body, timeout_s=120)


def text(answer: dict[str, Any]) -> str:
    return "\n\n".join(block for passage in answer["passages"] for block in passage["blocks"])


async def text_of(cleaner: WorkerPool, page: str | bytes, **job: Any) -> str:
    return text(await clean(cleaner, page, **job))


async def test_text_headings_and_title_are_what_is_left_of_a_page(cleaner: WorkerPool) -> None:
    answer = await clean(
        cleaner,
        """<!doctype html><html><head><title> The
        title </title><style>p { color: red }</style><script>var script</script></head><body>
        <header>Site header</header><nav>Navigation</nav><div role="navigation">More navigation</div>
        <main><h1>Heading<a class="headerlink" href="#x">¶</a></h1><p>First <b>bold</b> &amp; <code>code()</code>.</p>
        <h2>Second</h2><ul><li>an item</li></ul><!-- a comment --><p hidden>hidden</p></main>
        <aside>Beside</aside><footer>Footer</footer><noscript>No script</noscript><button>Button</button></body>""",
    )
    assert answer["title"] == "The title"
    assert answer["passages"] == [
        {"headings": ["# Heading"], "blocks": ["First bold & `code()`."]},
        {"headings": ["# Heading", "## Second"], "blocks": ["  * an item"]},
    ]
    assert answer["num_passages"] == 2
    assert answer["url"] == URL


async def test_text_that_follows_an_excluded_element_stays(cleaner: WorkerPool) -> None:
    page = (
        "<body>One <nav>navigation</nav> two <img src=a.png> three <script>x</script> four <form>five</form> six</body>"
    )
    assert (await text_of(cleaner, page)).split() == ["One", "two", "three", "four", "five", "six"]


async def test_text_between_comments_stays(cleaner: WorkerPool) -> None:
    """Vue and Svelte mark with comments what they have rendered on the server."""
    page = "<div><!--[--><p><!--[-->A task group<!--]--></p><!----><pre><!--x-->code</pre><!--]--> ends.</div>"
    assert (await text_of(cleaner, page)).split() == ["A", "task", "group", "```", "code", "```", "ends."]


async def test_code_keeps_its_lines_and_indentation(cleaner: WorkerPool) -> None:
    code = "def f():\n    if x:\n\n        return *args*  # no emphasis"
    page = f"<p>Look:</p><div><pre><span>{code}</span></pre></div><p>after</p>"
    assert await text_of(cleaner, page) == f"Look:\n\n```\n{code}\n```\n\nafter"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<html><body><p>one</p></body></html> two<p>three", "one\n\ntwo\n\nthree"),
        ("<html><p>one</html><html><body><p>two</body></html>", "one\n\ntwo"),
        ("<pre><div>if x:</div><div>    y</div></pre>", "```\nif x:\n    y\n```"),
        ("<pre><div>if x:</div>\n<div>    y</div></pre>", "```\nif x:\n    y\n```"),
        ("<pre>```md\n# a\n```\n# b</pre><p>after", "~~~~\n```md\n# a\n```\n# b\n~~~~\n\nafter"),
        ('<ol start="3"><li>third<li>fourth</ol>', "  3. third\n  4. fourth"),
        ("<noframes><a href=x>no frames</a></noframes><p>one", "one"),
    ],
)
async def test_listings_lists_and_text_behind_the_end_are_written_as_browsers_show_them(
    cleaner: WorkerPool, page: str, expected: str
) -> None:
    assert await text_of(cleaner, page) == expected


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("<svg><title>icon</title></svg><h1>Penguins</h1><p>one", "Penguins"),
        ("<title>\u200b</title><h1>Penguins</h1><p>one", "Penguins"),
        ("<h1>Penguins<br>of Peru</h1><p>one", "Penguins of Peru"),
    ],
)
async def test_the_title_of_a_page_is_its_own_and_on_one_line(cleaner: WorkerPool, page: str, title: str) -> None:
    answer = await clean(cleaner, page)
    assert answer["title"] == title
    assert answer["passages"][0]["headings"] == [f"# {title}"]


async def test_links_come_from_the_whole_page_the_contents_first(cleaner: WorkerPool) -> None:
    answer = await clean(
        cleaner,
        """<body><nav><a href="/nav/">Navigation</a></nav><p><a href="b.html#part">B</a> <a href="../c/?q=1">C</a>
        <a href="b.html">B again</a> <a href="#top">Top</a> <a href="mailto:me@docs.example">Mail</a> <a>None</a>
        <a href="javascript:void(0)">Script</a> <a href="file.ZIP?x">ZIP</a> <a href="http://other.example">Other</a>
        <a href="http://[broken">Broken</a></p>""",
    )
    assert answer["links"] == [
        "http://docs.example/guide/b.html",
        "http://docs.example/c/?q=1",
        URL,
        "http://other.example/",
        "http://docs.example/nav/",
    ]


async def test_links_that_promise_more_come_first(cleaner: WorkerPool) -> None:
    page = """<a href="a">About</a><a href="cancelling-tasks">Read on</a><a href="b">Groups of tasks</a>
        <a href="c">How task groups are cancelled</a>"""
    answer = await clean(cleaner, page, "How do I cancel a task group?")
    assert [link.rpartition("/")[2] for link in answer["links"]] == ["c", "cancelling-tasks", "b", "a"]
    assert text(answer) != ""


async def test_comments_are_no_text_of_links(cleaner: WorkerPool) -> None:
    page = f"<a href='a'><!--task group-->About</a><a href='b'>{'<!--[-->' * 30}<b>Task <!----> groups</b><!--]--></a>"
    answer = await clean(cleaner, page, "How do I cancel a task group?")
    assert [link.rpartition("/")[2] for link in answer["links"]] == ["b", "a"]


async def test_links_are_relative_to_the_base_that_the_page_declares(cleaner: WorkerPool) -> None:
    page = '<head><base href="/v2/"></head><body><a href="a">A</a></body>'
    assert (await clean(cleaner, page))["links"] == ["http://docs.example/v2/a"]


@pytest.mark.parametrize("base", ["http://[", "http://docs.example:x/", "data:text/html,x", "/" + "a" * 5000, ""])
async def test_a_base_that_is_no_address_is_none(cleaner: WorkerPool, base: str) -> None:
    answer = await clean(cleaner, f'<base href="{base}"><p>text</p><a href="a">A</a>')
    assert answer["links"] == ["http://docs.example/guide/a"]
    assert text(answer).startswith("text")


async def test_a_page_gives_a_bounded_number_of_links(cleaner: WorkerPool) -> None:
    page = "".join(f"<a href='/{i}'>{i}</a> " for i in range(3000))
    assert len((await clean(cleaner, page))["links"]) == 500
    page = "".join(f"<a href='/{'x' * 1000}{i}'>{i}</a> " for i in range(300))
    assert len((await clean(cleaner, page))["links"]) == 48


@pytest.mark.parametrize(
    ("body", "charset"),
    [
        ("<p>Grüße, 世界</p>".encode(), ""),
        ("<p>Grüße, 世界</p>".encode(), "UTF-8"),
        ("<p>Grüße, 世界</p>".encode(), "no-such-charset"),
        ("<p>Grüße, 世界</p>".encode("utf-16"), "utf-8"),
        ("<p>Grüße, 世界</p>".encode("utf-8-sig"), "latin-1"),
        ('<meta charset="gb18030"><p>Grüße, 世界</p>'.encode("gb18030"), ""),
        ("<p>Grüße, 世界</p>".encode("gb18030"), "gb18030"),
        (b"<p>Gr\xfc\xdfe, &#19990;&#30028;</p>", ""),
        (b"<p>Gr\xfc\xdfe, &#19990;&#30028;</p>", "ISO-8859-1"),
    ],
)
async def test_pages_are_read_in_their_charset(cleaner: WorkerPool, body: bytes, charset: str) -> None:
    assert await text_of(cleaner, body, charset=charset) == "Grüße, 世界"


async def test_a_bad_byte_does_not_spoil_a_declared_charset(cleaner: WorkerPool) -> None:
    assert await text_of(cleaner, "<p>Grüße".encode() + b"\xff</p>", charset="utf-8") == "Grüße\ufffd"


async def test_xhtml_with_a_declaration_is_read(cleaner: WorkerPool) -> None:
    page = """<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Strict//EN" "x">
        <html xmlns="http://www.w3.org/1999/xhtml"><head><title>T</title></head><body><p>Grüße</p></body></html>"""
    answer = await clean(cleaner, page)
    assert (text(answer), answer["title"]) == ("Grüße", "T")


async def test_plain_text_is_taken_as_it_is(cleaner: WorkerPool) -> None:
    answer = await clean(cleaner, "a <b>\n\nc & d", kind="text")
    assert (text(answer), answer["title"], answer["links"]) == ("a <b>\n\nc & d", "", [])


async def test_links_of_one_page_do_not_appear_on_the_next(cleaner: WorkerPool) -> None:
    await clean(cleaner, "<a href='/a'>A</a>")
    assert (await clean(cleaner, "text", kind="text"))["links"] == []


@pytest.mark.parametrize("page", ["<p>Hi</p>", "Hi", "<html>Hi", "<body><script>" + "x" * 3000 + "</script>Hi</body>"])
async def test_a_short_page_is_not_taken_for_a_wall(cleaner: WorkerPool, page: str) -> None:
    assert await text_of(cleaner, page) == "Hi"


@pytest.mark.parametrize("page", ["<body><script>x</script></body>", "<html></html>", "<p> </p>", "<title>T</title>"])
async def test_a_page_without_text_has_no_passages(cleaner: WorkerPool, page: str) -> None:
    assert (await clean(cleaner, page))["num_passages"] == 0


async def test_only_the_relevant_passage_of_a_page_and_its_neighbour_are_kept(cleaner: WorkerPool) -> None:
    filler = "Penguins swim well. " * 40
    page = f"<h1>Guide</h1><p>{filler}</p><h2>Tasks</h2><p>Cancelling tasks is simple: cancel the group.</p><p>{filler}"
    answer = await clean(cleaner, page, "How do I cancel a task group?")
    blocks = ["Cancelling tasks is simple: cancel the group.", filler.strip()]
    assert answer["passages"] == [{"headings": ["# Guide", "## Tasks"], "blocks": blocks}]
    assert answer["num_passages"] == 2


async def test_a_page_with_nothing_relevant_still_has_links(cleaner: WorkerPool) -> None:
    answer = await clean(cleaner, "<p>Penguins</p><a href='/a'>A</a>", "How do I cancel a task group?")
    assert (answer["passages"], answer["num_passages"], answer["links"]) == ([], 1, ["http://docs.example/a"])


async def test_a_word_of_every_passage_does_not_turn_the_ranking_around(cleaner: WorkerPool) -> None:
    """Okapi's own formula gives such words a negative weight, and the best passage the least score."""
    sections = ["Task, and more of other things.", "Task task task.", "About a task, with many other words around it."]
    page = "".join(f"<h2>{i}</h2><p>{section}</p>" for i, section in enumerate(sections))
    answer = await clean(cleaner, page, "task", max_chars=30)
    assert text(answer) == "Task task task."


@pytest.mark.parametrize(
    "page",
    [
        "<div>" * 20_000 + "deep" + "</div>" * 20_000,
        "<table><tr><td>" * 3000 + "deep",
        "<![if !IE]><p>text<![endif]>",
        "<!-- never closed <p>text",
        "<p>text\0with zero\0bytes",
        "<p a='never closed>text",
        "<" * 10_000,
        "<a href='x'>" * 5000 + "text",
        "&#x110000; &#xD800; &bogus; text",
        "<svg><foreignObject><p>text</p></foreignObject></svg>text",
        "<html hidden><body>text</body></html>",
        "<ul><li>" * 1000 + "text",
        "[text](" * 5000,
    ],
)
async def test_no_page_is_too_broken_for_the_worker(cleaner: WorkerPool, page: str) -> None:
    [process_id] = cleaner.process_ids
    with suppress(WorkerJobError):
        found = await text_of(cleaner, page)
        assert "Crawl4AI Error" not in found
        assert "Error converting" not in found
    assert cleaner.process_ids == [process_id]
    assert await text_of(cleaner, "<p>next</p>") == "next"


async def test_a_worker_writes_no_file_outside_its_scratch_folder(cleaner: WorkerPool, home: Path) -> None:
    before = os.listdir()
    await clean(cleaner, "<p>text</p>")
    assert os.listdir(home) == []
    assert os.listdir() == before


# ------------------------------------------------------------------------------------------- pages made to be slow


@pytest.mark.parametrize("num_chars", SIZES)
@pytest.mark.parametrize("family", TEXT)
async def test_a_text_that_is_made_to_be_slow_is_read_within_the_limit(
    cleaner: WorkerPool, family: str, num_chars: int
) -> None:
    await clean(cleaner, TEXT[family](num_chars), "How do penguins swim?", kind="text")


@pytest.mark.parametrize("num_chars", SIZES)
@pytest.mark.parametrize("family", HTML)
async def test_a_page_that_is_made_to_be_slow_is_read_within_the_limit(
    cleaner: WorkerPool, family: str, num_chars: int
) -> None:
    with suppress(WorkerJobError):  # some are no page at all
        await clean(cleaner, HTML[family](num_chars), "How do penguins swim?")


async def test_a_slow_page_ends_at_its_limit_of_computing_time(home: Path, tmp_path: Path) -> None:
    async with cleaning(str(tmp_path), home, max_page_cpu_s=0.3) as cleaner:
        with pytest.raises(WorkerLimitError, match="more computing time than it may"):
            await clean(cleaner, attributes(1_000_000))
        assert await text_of(cleaner, "<p>next</p>") == "next"


@pytest.mark.parametrize("page", ["<p>a" * 500_000, "penguins swim " * 1_000_000])
async def test_a_page_that_takes_too_much_memory_fails_and_the_next_is_read(
    home: Path, tmp_path: Path, page: str
) -> None:
    async with cleaning(str(tmp_path), home, max_page_memory_bytes=4 << 20) as cleaner:
        with pytest.raises(WorkerLimitError, match="more memory than it may"):
            await clean(cleaner, page, kind="html" if page.startswith("<") else "text")
        assert await text_of(cleaner, "<p>next</p>") == "next"


async def test_memory_left_by_pages_ends_a_worker_in_time_and_fails_no_page(home: Path, tmp_path: Path) -> None:
    async with cleaning(str(tmp_path), home, max_page_memory_bytes=200 << 20) as cleaner:
        [process_id] = cleaner.process_ids
        for i in range(30):
            await clean(cleaner, new_names(500_000, i * 500_000))
            if cleaner.process_ids != [process_id]:
                break
        else:
            pytest.fail("it is the same worker")
        assert await text_of(cleaner, "<p>next</p>") == "next"


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("<p>Penguins swim.</p>" + "<p>a</p>" * 50_000, "html"),
        ("<p>Penguins swim.</p>" + "&lt;" * 500_000, "html"),
        ("Penguins swim. " * 100_000, "text"),
        ("a b\n\n# c\n\n" * 9000, "text"),
    ],
)
async def test_the_beginning_of_a_page_that_is_too_large_is_read(cleaner: WorkerPool, page: str, kind: str) -> None:
    answer = await clean(cleaner, page, kind=kind)
    assert answer["is_cut"]
    assert text(answer) != ""
    assert not (await clean(cleaner, page[:1000], kind=kind))["is_cut"]


async def test_blanks_between_words_stay_where_elements_go(cleaner: WorkerPool) -> None:
    page = """<p>one<span> </span>two<b></b>three <i><u></u></i>four</p><pre>a<span>  </span>b</pre>
        <noscript>no</noscript>five"""
    assert (await text_of(cleaner, page)).split("\n\n") == ["one twothree four", "```\na  b\n```", "five"]


@pytest.mark.parametrize("charset", ["punycode", "idna", "unicode_escape", "utf-7", "rot13", "zlib", "undefined"])
async def test_codecs_that_are_no_charset_of_pages_are_not_used(cleaner: WorkerPool, charset: str) -> None:
    assert await text_of(cleaner, "<p>Grüße \\u0041 +AEE-</p>", charset=charset) == "Grüße \\u0041 +AEE-"


@pytest.mark.parametrize(
    ("body", "charset", "expected"),
    [
        ('<meta charset="gb2312"><p>朱镕基'.encode("gb18030"), "", "朱镕基"),
        ("<p>髙島屋".encode("cp932"), "x-sjis", "髙島屋"),
        ('<?xml version="1.0" encoding="euc-jp"?><html><body><p>日本'.encode("euc-jp"), "", "日本"),
    ],
)
async def test_charsets_are_those_of_browsers(cleaner: WorkerPool, body: bytes, charset: str, expected: str) -> None:
    assert await text_of(cleaner, body, charset=charset) == expected


@pytest.mark.parametrize(
    ("html", "query"),
    [
        ("Reise&shy;kosten&shy;erstattung", "Reisekostenerstattung"),
        ("Donau&ZeroWidthSpace;dampf", "Donaudampf"),
        ("Donau&NoBreak;dampf", "donaudampf"),
        ("Zu\u0308rich", "Zürich"),
        ("Ｚürich", "ZÜRICH"),
        ("misﬁts", "misfits"),
        ("كِتَاب", "كتاب"),
    ],
)
async def test_a_page_is_found_whatever_characters_its_words_are_written_with(
    cleaner: WorkerPool, html: str, query: str
) -> None:
    page = f"<h1>A page</h1><p>All of it is about {html}.</p>"
    assert (await clean(cleaner, page, query))["passages"]
    assert not (await clean(cleaner, "<p>All of it is about the rich.</p>", query))["passages"]


async def test_a_question_in_hindi_does_not_match_every_hindi_page(cleaner: WorkerPool) -> None:
    about_oslo = "<p>ओस्लो नॉर्वे की राजधानी है और यह देश का सबसे बड़ा नगर भी है।</p>"
    about_apples = "<p>सेब का पेड़ ठंडे प्रदेशों में होता है और उसके फल को लोग खाते हैं।</p>"
    question = "नॉर्वे की राजधानी क्या है और वह कहाँ है?"
    assert (await clean(cleaner, about_oslo, question))["passages"]
    assert not (await clean(cleaner, about_apples, question))["passages"]


async def test_the_model_reads_no_soft_hyphens(cleaner: WorkerPool) -> None:
    answer = await clean(cleaner, "<title>Reise&shy;kosten</title><p>Er&shy;stat&#8203;tung می&zwnj;خواهم</p>")
    assert (answer["title"], text(answer)) == ("Reisekosten", "Erstattung می\u200cخواهم")


async def test_links_with_letters_of_the_query_in_their_path_come_first(cleaner: WorkerPool) -> None:
    page = "<p>x <a href='/a'>one</a> <a href='/Z%C3%BCrich'>two</a></p>"
    assert (await clean(cleaner, page, "Zürich"))["links"][0].endswith("/Z%C3%BCrich")
