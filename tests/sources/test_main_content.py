"""What of a page is left for the model: its main content."""

import pytest
from lxml import html as lxml_html

pytest.importorskip("trafilatura")

from streamrag.sources.documents import main_content
from streamrag.sources.documents import prune as pruning
from streamrag.sources.documents.reader import Content, ReadingLimits

URL = "https://news.example/2026/penguins.html"
LIMITS = ReadingLimits(max_cpu_s=10)

PARAGRAPHS = [
    "The colony at the southern cape has grown by a third since the last count, researchers said on Tuesday.",
    "They had walked the coast for six weeks, and counted every nest between the lighthouse and the river mouth.",
    "Most of the growth is due to a cold current that brings more krill, although fewer ships pass the cape as well.",
    "The next count is planned for the spring, when the chicks of this year return for the first time.",
]
TEASERS = "".join(
    f'<li class="teaser"><a href="/{name}">{name.title()} wins the local election again</a></li>'
    for name in ("alice", "bob", "carol", "dave", "eve")
)


def news(inside: str = "", *, head: str = "<title>News</title>") -> str:
    paragraphs = "".join(f"<p>{paragraph}</p>" for paragraph in PARAGRAPHS[:2]) + inside
    paragraphs += "".join(f"<p>{paragraph}</p>" for paragraph in PARAGRAPHS[2:])
    return f"""<html><head>{head}</head><body><div class="menu"><ul><li><a href="/sport">Sport and more sport</a></li>
        <li><a href="/weather">The weather of the coming week</a></li></ul></div><div class="page">
        <div class="article-body"><h1>Penguins return</h1>{paragraphs}</div>
        <div class="related-posts"><h3>Most read this week</h3><ul>{TEASERS}</ul></div></div>
        <div class="site-footer">Subscribe to our newsletter, and never miss a story again.</div></body></html>"""


def prune(url: str, page: str) -> Content:
    return pruning.prune(url, page, LIMITS)


def words(page: str) -> str:
    body = lxml_html.document_fromstring(prune(URL, page).text).find("body")
    return " ".join(" ".join(body.itertext()).split())


def test_an_article_is_kept_without_menu_teasers_and_newsletter() -> None:
    assert words(news()) == " ".join(["Penguins return", *PARAGRAPHS])


def test_links_outside_the_article_are_still_followed() -> None:
    assert {"https://news.example/sport", "https://news.example/alice"} <= prune(URL, news()).links.keys()


def test_a_heading_that_is_the_title_is_not_kept_twice() -> None:
    page = news(head="<title>Penguins return - The Daily News</title>")
    assert "Penguins return" not in words(page)
    assert prune(URL, page).title == "Penguins return - The Daily News"


def test_a_table_in_an_article_is_kept_as_a_table() -> None:
    table = "<table><tr><th>Year</th><th>Nests</th></tr><tr><td>2025</td><td>1,204</td></tr></table>"
    found = lxml_html.document_fromstring(prune(URL, news(table)).text)
    rows = [[cell.text_content() for cell in row] for row in found.iter("tr")]
    assert rows == [["Year", "Nests"], ["2025", "1,204"]]


def test_the_terms_of_definitions_in_an_article_are_kept() -> None:
    definitions = f"<dl><dt>Krill</dt><dt>Euphausiacea</dt><dd>{PARAGRAPHS[2]}</dd></dl>"
    assert f"Krill Euphausiacea {PARAGRAPHS[2]}" in words(news(definitions).replace(f"<p>{PARAGRAPHS[2]}</p>", ""))


@pytest.mark.parametrize("tag", ["main", "article", "section"])
@pytest.mark.parametrize("after", ["", "<p>After", "after"])
def test_a_page_that_omits_the_tags_of_head_and_body_is_read(tag: str, after: str) -> None:
    page = prune(URL, f"<!doctype html><title>A page</title><{tag}><h1>Penguins</h1><p>They swim.</{tag}>{after}")
    body = lxml_html.document_fromstring(page.text).find("body")
    assert (
        " ".join(" ".join(body.itertext()).split()).lower() == f"penguins they swim. {'after' if after else ''}".strip()
    )
    assert page.title == "A page"


def test_line_breaks_in_an_article_stay() -> None:
    page = prune(URL, news(f"<p>{PARAGRAPHS[0]} First.<br>Second.</p>")).text
    assert "First.<br>Second." in page


LISTING = "def swim():\n    if cold:\n\n        return *krill*\n"
OUTSIDE = '<div class="sidebar"><ul><li><a href="/a">Another chapter of the guide</a></li></ul></div>'
INSIDE = f"""<h1>Swimming</h1><p>Call <code>swim()</code>:</p><pre>{LISTING}</pre>
    <table><tr><td>cold</td><td>bool</td></tr></table><dl><dt>krill</dt><dd>Food.</dd></dl>
    <aside role="doc-footnote">A footnote.</aside>"""


@pytest.mark.parametrize(
    ("begin", "end"), [("<main>", "</main>"), ('<div role="main">', "</div>"), ("<article>", "</article>")]
)
def test_the_main_element_of_a_page_with_code_is_taken_whole(begin: str, end: str) -> None:
    page = f"<body>{OUTSIDE}{begin}{INSIDE}{end}<div>Copyright of somebody</div></body>"
    if begin == "<article>":
        page = page.replace('<aside role="doc-footnote">A footnote.</aside>', "<p>A footnote.</p>")
    assert words(page) == f"Swimming Call swim() : {' '.join(LISTING.split())} cold bool krill Food. A footnote."
    assert LISTING in prune(URL, page).text


def test_the_article_in_a_main_element_is_taken_if_it_has_all_code() -> None:
    beside = "<div>On this page</div>"
    assert "On this page" not in words(f"<main>{beside}<article>{INSIDE}</article></main>")
    assert "On this page" in words(f"<main>{beside}<article>A card</article>{INSIDE}</main>")


def test_every_listing_of_a_page_without_a_main_element_is_kept() -> None:
    listings = "".join(f"<h2>Step {i}</h2><pre>step({i})</pre>" for i in range(5))
    paragraphs = "".join(f"<p>{paragraph}</p>" for paragraph in PARAGRAPHS)
    page = f"""<div class="navheader"><a href="/prev">Prev</a> <a href="/next">Next</a></div>
        <div class="sect1">{listings}{paragraphs}{listings}</div><div class="navfooter"><a href="/up">Up</a></div>"""
    found = words(page)
    assert [found.count(f"step({i})") for i in range(5)] == [2] * 5
    assert "Prev" not in found


@pytest.mark.parametrize(("begin", "end"), [("<main>", "</main>"), ('<div role="main">', "</div>")])
def test_a_table_of_contents_is_the_content_of_a_page(begin: str, end: str) -> None:
    chapters = "".join(f"<li><a href='/{i}'>Chapter {i}: how penguins of kind {i} swim</a></li>" for i in range(20))
    introduction = f"<h1>The book</h1><p>{PARAGRAPHS[0]}</p><p>{PARAGRAPHS[1]}</p><p>{PARAGRAPHS[2]}</p>"
    found = words(f"<body>{OUTSIDE}{begin}{introduction}<div><ul>{chapters}</ul></div>{end}</body>")
    assert found.startswith("The book The colony")
    assert found.count("Chapter") == 20
    assert "Another chapter of the guide" not in found


def test_teasers_in_the_main_element_of_an_article_are_not_content() -> None:
    page = (
        news().replace('<div class="page">', '<main class="page">').replace("</ul></div></div>", "</ul></div></main>")
    )
    assert words(page) == " ".join(["Penguins return", *PARAGRAPHS])


@pytest.mark.parametrize("page", ["<p>Hi</p>", "<ul><li><a href=/a>Guide</a><li><a href=/b>Reference</a></ul>"])
def test_a_page_with_little_text_is_kept_whole(page: str) -> None:
    assert words(page) == words(f"<div>{page}</div>") != ""


def test_a_page_that_the_extractor_fails_on_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RecursionError

    monkeypatch.setattr(main_content.trafilatura, "extract", fail)
    assert "newsletter" in words(news())


def test_running_out_of_memory_in_the_extractor_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(main_content.trafilatura, "extract", fail)
    with pytest.raises(MemoryError):
        prune(URL, news())


def test_headings_in_an_article_stay_with_the_text_under_them() -> None:
    page = news(f"<h2>Nests</h2><p>{PARAGRAPHS[0][::-1]}</p><h3>Eggs</h3><p>{PARAGRAPHS[1][::-1]}</p>")
    assert f"Nests {PARAGRAPHS[0][::-1]} Eggs {PARAGRAPHS[1][::-1]}" in words(page)


def test_variation_selectors_in_a_page_are_kept_and_choose_no_other_article() -> None:
    variants = "The name is spelled 葛\U000e0100 \U000e01ef\U000e01efand 葛\U000e0101"
    found = words(news(f"<p>{PARAGRAPHS[0]} {variants}</p>"))
    assert f"{PARAGRAPHS[0]} {variants}" in found
    assert found.count(PARAGRAPHS[0]) == 2
    assert "newsletter" not in found


@pytest.mark.parametrize(("begin", "end"), [("<article>", "</article>"), ('<div class="post">', "</div>")])
def test_all_articles_of_a_list_and_all_posts_of_a_thread_are_kept(begin: str, end: str) -> None:
    posts = "".join(f"{begin}<h2>Post {i}</h2><p>{' '.join(PARAGRAPHS)}</p>{end}" for i in range(3))
    found = words(f"<title>Posts</title><body><ul class=menu><li><a href=/a>Sport</a></ul><div>{posts}</div>")
    assert found.count(PARAGRAPHS[0]) == 3
    assert "Post 2" in found
    assert "Sport" not in found


def test_comments_that_are_shorter_than_the_article_are_not_content() -> None:
    comment = f'<div class="post"><p>{PARAGRAPHS[0]} Well said.</p></div>'
    article = f'<div class="post"><p>{"</p><p>".join(PARAGRAPHS)}</p></div>'
    assert "Well said." not in words(f"<title>News</title><body><div>{article}{comment}</div>")


def test_a_repeated_sentence_beside_the_article_is_not_content() -> None:
    page = news().replace(TEASERS, f"{TEASERS}<li class='teaser'><a href='/x'>{PARAGRAPHS[0]}</a></li>")
    assert words(page).count(PARAGRAPHS[0]) == 1


def test_a_page_in_chinese_is_kept_without_its_menu() -> None:
    paragraph = "企鹅的数量在过去的一年里增加了三分之一，研究人员在星期二说，他们沿着海岸走了六个星期，数了每一个巢穴。"
    article = "".join(f"<p>第{i}段：{paragraph}</p>" for i in "一二三四五六七八")
    menu = '<div class="menu"><ul><li><a href="/a">体育新闻</a></li><li><a href="/b">天气预报</a></li></ul></div>'
    found = words(f'<body>{menu}<div class="article-body">{article}</div></body>')
    assert found.count("企鹅") == 8
    assert "体育新闻" not in found


def test_the_extractor_gets_only_attributes_that_content_is_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    monkeypatch.setattr(
        main_content.trafilatura, "extract", lambda document, **_: names.update(*(e.keys() for e in document.iter()))
    )
    prune(URL, news(f'<p class="{"x" * 1000}" data-x="1" onclick="y">z</p>'))
    assert names == {"class"}
