import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fpdf import FPDF

from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.sources.documents.file_worker import file_worker
from streamrag.sources.documents.reader import Content, Read, UnreadableError
from streamrag.sources.index.document_passages import (
    count_words,
    find_documents,
    read_document,
    read_documents,
    split_content,
)


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    with file_worker() as read_file:
        yield read_file


MARKDOWN = """\
---
title: "From the front matter"
---
# Top *heading* with `code`

A paragraph with a [link](https://example.org).
Its second line.

Underlined
----------
- one
- two
  # not a heading

```python
# not a heading

x = 1
```
<!-- a licence nobody reads -->
<div><b>Markup</b> in<i>side</i>, <table><tr><td>a</td><td>b</td></tr></table></div>
"""

HTML = """\
<!DOCTYPE html><html><head><title> A  title </title><style>p {}</style></head><body>
<nav>Home</nav><!-- hidden --><header>Site</header>
<main><h1>Head&amp;ing<a class="headerlink" href="#x">¶</a></h1>
<p>un<b>believ</b>able<br>break <script>alert()</script></p>
<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>
<pre>
  x = 1

    y
</pre>
<ul><li>one</li><li>two</li></ul>&lt;tag&gt; 日本</main><footer>Imprint</footer></body></html>
"""


def text_file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def words(count: int, word: str = "word") -> str:
    return " ".join([word] * count)


def test_documents_are_found_at_any_depth_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.txt", "a/b/c.HTML", "a.markdown", "c.htm", "d.xhtml"):
        text_file(tmp_path, name, "text")
    found, skipped = find_documents(tmp_path, max_file_bytes=100, leave_out=tmp_path / "out")
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["a/b/c.HTML", "a/z.txt", "a.markdown", "b.md", "c.htm", "d.xhtml"]
    assert skipped == []


def test_files_that_are_not_read_are_listed_with_the_reason(tmp_path: Path) -> None:
    folder, outside = tmp_path / "docs", text_file(tmp_path, "outside.md", "secret")
    text_file(folder, "ok.md", "ok")
    text_file(folder, ".hidden.md", "hidden")
    text_file(folder, ".git/config.txt", "hidden")
    text_file(folder, "image.png", b"\x89PNG")
    text_file(folder, "long.txt", "x" * 101)
    text_file(folder, "out/manifest.md", "the index itself")
    (folder / "link.md").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    found, skipped = find_documents(folder, max_file_bytes=100, leave_out=folder / "out")
    assert found == [folder / "ok.md"]
    assert dict(skipped) == {
        ".git": "hidden",
        ".hidden.md": "hidden",
        "image.png": "not text, Markdown, HTML or PDF by its name",
        "link.md": "symbolic link",
        "long.txt": "101 bytes, more than 100",
        "loop": "symbolic link",
        "out": "is the index",
        "pipe.txt": "not a regular file",
    }


@pytest.mark.parametrize("name", ["missing", "file.txt"])
def test_a_documents_path_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    text_file(tmp_path, "file.txt", "text")
    with pytest.raises(ConfigurationError, match=f"{name} is not a folder"):
        find_documents(tmp_path / name, max_file_bytes=100, leave_out=tmp_path / "out")


def test_markdown_gives_its_headings_and_blocks(tmp_path: Path, read: Read) -> None:
    actual = read_document(text_file(tmp_path, "a/page.md", MARKDOWN), tmp_path, 100, read)
    assert (actual.uri, actual.title) == ("a/page.md", "From the front matter")
    assert actual.passages == [
        "Top heading with code\n\nA paragraph with a [link](https://example.org).\nIts second line.\n\nUnderlined\n\n"
        "- one\n- two\n  # not a heading\n\n```python\n# not a heading\n\nx = 1\n```\n\nMarkup inside, a b"
    ]


def test_html_gives_the_markdown_of_its_main_part(tmp_path: Path, read: Read) -> None:
    actual = read_document(text_file(tmp_path, "page.html", HTML), tmp_path, 100, read)
    assert actual.title == "A title"
    assert actual.passages == [
        "Head&ing\n\nunbelievable\nbreak\n\n| a | b |\n| --- | --- |\n| c |\n\n```\n  x = 1\n\n    y\n```\n\n"
        "  * one\n  * two\n\n<tag> 日本"
    ]


def test_inline_code_has_one_space_between_words_and_is_plain_in_headings(tmp_path: Path, read: Read) -> None:
    code = "<code>\n    run\t<b>  it</b>\n    now  </code>"
    page = f"<title>All of run: a manual</title><h1>All of <code>run</code></h1><p>Type {code} and wait.</p>"
    path = text_file(tmp_path, "page.html", f"{page}<h2>On <code>x</code></h2><pre>a\n    b</pre>")
    assert read_document(path, tmp_path, 100, read).passages == [
        "Type ` run  it now ` and wait.\n\nOn x\n\n```\na\n    b\n```"
    ]


def test_html_is_read_without_the_menu_that_no_element_declares(tmp_path: Path, read: Read) -> None:
    menu = '<div class="menu"><ul><li><a href="/a">Sport</a></li><li><a href="/b">Weather</a></li></ul></div>'
    article = "".join(f"<p>Paragraph {i} says that penguins swim, and steer with their feet.</p>" for i in range(9))
    path = text_file(tmp_path, "page.html", f'<body>{menu}<div class="article-body">{article}</div></body>')
    [passage] = read_document(path, tmp_path, 500, read).passages
    assert passage.startswith("Paragraph 0 says")
    assert "Weather" not in passage


def test_html_beyond_the_limits_of_crawled_pages_is_read_whole(tmp_path: Path, read: Read) -> None:
    page = "".join(f"<p>Paragraph {i}</p>" for i in range(40_000))
    document = read_document(text_file(tmp_path, "page.html", page), tmp_path, 1000, read)
    assert document.passages[-1].endswith("Paragraph 39999")
    assert document.left_out == ""


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("page.html", "<p>no title</p><h2>First heading</h2>text", "First heading"),
        ("page.md", "text\n\n# First heading\n\ntext\n\n# Second", "First heading"),
        ("some page.txt", "First line", "some page"),
    ],
)
def test_without_a_title_the_first_heading_or_the_name_stands_in(
    tmp_path: Path, read: Read, name: str, content: str, title: str
) -> None:
    assert read_document(text_file(tmp_path, name, content), tmp_path, 100, read).title == title


def test_html_nested_very_deeply_is_read_as_far_as_its_parser_goes(tmp_path: Path, read: Read) -> None:
    path = text_file(tmp_path, "deep.html", "<div>" * 200 + "deep" + "</div>" * 200)
    assert read_document(path, tmp_path, 100, read).passages == ["deep"]
    document = read_document(text_file(tmp_path, "deeper.html", "shallow" + "<div>" * 5000 + "x"), tmp_path, 100, read)
    assert (document.passages, document.left_out) == (["shallow"], "its end, because it is too long")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("page.txt", "naïve 漢".encode("utf-16")),
        ("page.txt", "naïve 漢".encode("utf-8-sig")),
        ("page.html", "naïve 漢".encode()),
        ("page.html", '<meta charset="gb18030"><p>naïve 漢'.encode("gb18030")),
        ("page.txt", b"\xfe\xff" + "naïve 漢".encode("utf-16-be")),
        ("page.txt", "na\xadïve 漢\ufeff".encode()),
        ("page.html", "<p>na&shy;ïve 漢".encode()),
        ("page.md", '<meta charset="gb2312">\n\nnaïve 漢'.encode()),
        ("page.html", '<meta charset="gb2312"><p>naïve 漢'.encode("gb18030")),
        ("page.xhtml", '<?xml version="1.0" encoding="gb2312"?><p>naïve 漢</p>'.encode("gb18030")),
        ("page.html", '<?xml version="1.0" encoding="utf-8"?><html><body>naïve 漢</body></html>'.encode()),
    ],
)
def test_encodings_that_declare_themselves_are_understood(
    tmp_path: Path, read: Read, name: str, content: bytes
) -> None:
    assert read_document(text_file(tmp_path, name, content), tmp_path, 100, read).passages == ["naïve 漢"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("binary.txt", b"ab\0cd", "binary"),
        ("latin1.txt", "naïve".encode("latin-1"), "not UTF-8: byte 2"),
        ("empty.txt", b" \n\n", "no text in it"),
        ("empty.html", b"<nav>menu</nav>", "no text in it"),
        ("empty.md", b"<!-- -->", "no text in it"),
    ],
)
def test_files_that_give_no_text_say_why(tmp_path: Path, read: Read, name: str, content: bytes, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        read_document(text_file(tmp_path, name, content), tmp_path, 100, read)


def test_a_file_that_is_gone_says_so(tmp_path: Path, read: Read) -> None:
    with pytest.raises(UnreadableError, match="cannot be read: No such file"):
        read_document(tmp_path / "gone.md", tmp_path, 100, read)


def test_names_that_are_not_text_become_text(tmp_path: Path, read: Read) -> None:
    path = tmp_path / os.fsdecode(b"bad\xff.txt")
    path.write_text("text")
    assert read_document(path, tmp_path, 100, read).uri == "bad\N{REPLACEMENT CHARACTER}.txt"


def split(text: str, passage_words: int, title: str = "Title") -> list[str]:
    """The passages of a Markdown file with this text and title."""
    return split_content(Content(title, text), passage_words)


def test_passages_keep_the_heading_they_stand_under() -> None:
    page = f"# One\n\n{words(60)}\n\n{words(60)}\n\n# Two\n\n{words(60)}"
    assert split(page, 100) == [f"One\n\n{words(60)}", f"One\n\n{words(60)}", f"Two\n\n{words(60)}"]


def test_small_sections_are_joined() -> None:
    page = f"# Top\n## Small\n\n{words(10)}\n\n## Also small\n\n{words(10)}\n\n# Large\n\n{words(95)}"
    assert split(page, 100) == [
        f"Top > Small\n\n{words(10)}\n\nAlso small\n\n{words(10)}",
        f"Large\n\n{words(95)}",
    ]


def test_passages_repeat_the_path_of_headings_above_them() -> None:
    sections = ("# Top\n## One", "", "### Deep", "", "## Two")
    assert split("\n\n".join(f"{headings}\n\n{words(60)}" for headings in sections), 100) == [
        f"Top > One\n\n{words(60)}",
        f"Top > One\n\n{words(60)}",
        f"Top > One > Deep\n\n{words(60)}",
        f"Top > One > Deep\n\n{words(60)}",
        f"Top > Two\n\n{words(60)}",
    ]


def test_headings_of_the_title_and_endless_ones_are_not_repeated_whole() -> None:
    page = f"# Manual\n## {'x' * 300}\n\n{words(90)}\n\n{words(60)}"
    assert split(page, 100, "The Manual of streamrag")[-1] == words(60)
    deep = "\n".join(f"{'#' * level} h{level}" for level in range(1, 13))
    assert split(f"{deep}\n\n{words(60)}", 100) == [f"h7 > h8 > h9 > h10 > h11 > h12\n\n{words(60)}"]


def test_the_terms_of_definition_lists_are_headings_of_their_definitions(tmp_path: Path, read: Read) -> None:
    inner = f"<dl><dt>inner</dt><dd><p>{words(60)}</p><p>{words(60)}</p></dd></dl>"
    terms = "<dt><code>outer()</code></dt>\n<dt><code>outer(x)</code></dt>"
    page = f"<h2>Functions</h2><dl>{terms}<dd><p>{words(60)}</p>{inner}</dd></dl>"
    path = text_file(tmp_path, "page.html", f"<title>A page</title><main>{page}<p>{words(95)}</p></main>")
    assert read_document(path, tmp_path, 100, read).passages == [
        f"Functions > outer(), outer(x)\n\n{words(60)}",
        f"Functions > outer(), outer(x) > inner\n\n{words(60)}",
        f"Functions > outer(), outer(x) > inner\n\n{words(60)}",
        f"Functions\n\n{words(95)}",
    ]


def test_terms_without_definitions_are_text(tmp_path: Path, read: Read) -> None:
    terms = "".join(f"<dt>term {number}</dt>" for number in range(100))
    path = text_file(tmp_path, "page.html", f"<title>A page</title><dl>{terms}</dl><p>End</p>")
    passages = read_document(path, tmp_path, 30, read).passages
    assert all(count_words(passage) <= 90 for passage in passages)
    found = " ".join(passages).replace(",", " ").split()
    assert {*map(str, range(100)), "End"} <= {*found}


def test_a_document_of_headings_only_is_one_passage() -> None:
    assert split("# One\n\n# Two", 100) == ["One\n\nTwo"]


@pytest.mark.parametrize(
    "text",
    [words(1000), "word. " * 500, "line\n" * 1000, "漢" * 1000, words(1, "x" * 5000), "!" * 1000, "a-b\n" * 400],
)
def test_no_word_is_lost_and_no_passage_is_too_long(text: str) -> None:
    passages = split(text, 100)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(count_words(passage) <= 100 for passage in passages)
    assert len(passages) <= count_words(text) // 100 + 1


def test_pdfs_are_read_and_what_is_wrong_with_them_is_listed(tmp_path: Path, read: Read) -> None:
    document = FPDF()
    document.set_title("Penguins")
    document.set_font("helvetica")
    for page in ("They swim with their wings.", "They steer with their feet."):
        document.add_page()
        document.multi_cell(0, 6, page)
    (tmp_path / "good.PDF").write_bytes(document.output())
    (tmp_path / "text.pdf").write_text("They swim.")
    scan = FPDF()
    scan.add_page()
    (tmp_path / "scan.pdf").write_bytes(scan.output())
    paths, skipped = find_documents(tmp_path, max_file_bytes=1 << 20)
    (penguins,) = read_documents(tmp_path, paths, skipped, 180, lambda num_done: None, read)
    assert (penguins.uri, penguins.title) == ("good.PDF", "Penguins")
    assert penguins.passages == ["They swim with their wings.\n\nThey steer with their feet."]
    assert skipped == [("scan.pdf", "no text in it"), ("text.pdf", "it is no PDF")]


def test_a_pdf_that_is_read_in_part_is_a_document_and_says_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "long.pdf").write_bytes(b"%PDF")
    skipped: list[tuple[str, str]] = []
    documents = read_documents(
        tmp_path, [tmp_path / "long.pdf"], skipped, 180, lambda num_done: None, lambda *_: Content("", "a", "page 2")
    )
    assert [document.title for document in documents] == ["long"]
    assert skipped == [("long.pdf", "page 2")]


def test_html_without_the_extra_crawl_names_it_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Read
) -> None:
    text_file(tmp_path, "page.md", "text")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "crawl4ai" else object())

    def passages() -> list[str]:
        paths, skipped = find_documents(tmp_path, max_file_bytes=100)
        documents = read_documents(tmp_path, paths, skipped, 180, lambda num_done: None, read)
        return [passage for document in documents for passage in document.passages]

    assert passages() == ["text"]
    text_file(tmp_path, "page.html", "<p>text")
    with pytest.raises(MissingDependencyError, match=r"crawl4ai is not installed.*pip install '\.\[crawl\]'"):
        passages()
