import functools
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as some

from streamrag.core.text import TextPassage, relevant_terms, split_markdown, terms
from streamrag.sources.index.document_passages import count_words
from streamrag.sources.pages.relevant_passages import MAX_STEMS, assemble, relevant_stems, select


def chosen(blocks: Sequence[str], query: str, *, title: str = "", max_chars: int = 10_000) -> list[str]:
    passages = [TextPassage((), (block,)) for block in blocks]
    found = select(passages, query, title=title, max_chars=max_chars)
    return [passage.blocks[0] for passage in found]


def test_headings_go_with_their_text() -> None:
    page = "before\n# One¶\na\n\n## Two\n### Three ###\nb\n## Four\nc\n# Five\nd\n#\ne"
    assert [(passage.headings, passage.blocks) for passage in split_markdown(page)] == [
        ((), ("before",)),
        (("# One",), ("a",)),
        (("# One", "## Two", "### Three ###"), ("b",)),
        (("# One", "## Four"), ("c",)),
        (("# Five",), ("d\n#\ne",)),
    ]


def test_paragraphs_make_a_passage_until_it_is_long_enough() -> None:
    paragraphs = [f"{i} " + "x" * 250 for i in range(5)]
    passages = split_markdown("\n\n".join(paragraphs))
    assert [passage.blocks for passage in passages] == [tuple(paragraphs[:3]), tuple(paragraphs[3:])]


def test_a_line_that_introduces_a_block_stays_with_it() -> None:
    passages = split_markdown("\n\n".join(["x" * 700 + ":", "code", "next"]))
    assert [passage.blocks for passage in passages] == [("x" * 700 + ":", "code"), ("next",)]


@pytest.mark.parametrize("fence", ["```", "~~~", "  ```"])
def test_a_code_listing_is_one_block(fence: str) -> None:
    code = f"{fence}\n# not a heading\n\n    indented\n* * *\n{fence}"
    [passage] = split_markdown(f"text\n\n{code}\nmore")
    assert passage.blocks == ("text", code, "more")


def test_unclosed_or_empty_markdown_is_split_without_trouble() -> None:
    assert split_markdown("") == []
    assert split_markdown("* * *\n---\n\n\u200b\n#######\n") == []
    longer = "````md\n```\n# code\n```\n# code\n`````"
    assert [passage.blocks for passage in split_markdown(f"{longer}\n# Next\ntext")] == [(longer,), ("text",)]
    assert split_markdown("```\nnever closed")[0].blocks == ("```\nnever closed",)


def test_a_block_that_is_too_long_is_cut_between_words() -> None:
    page = " ".join(["word"] * 2000) + "\n" + "x" * 5000
    blocks = [block for passage in split_markdown(page) for block in passage.blocks]
    assert all(len(block) <= 2000 for block in blocks)
    assert "".join("".join(blocks).split()) == "".join(page.split())
    assert blocks[0].endswith("word")


def test_a_heading_that_is_too_long_to_be_repeated_is_text() -> None:
    passages = split_markdown("# Top\n## Short\na\n## " + "x" * 350 + "\n\ntext")
    assert [(passage.headings, passage.blocks) for passage in passages] == [
        (("# Top", "## Short"), ("a",)),
        (("# Top",), ("x" * 350, "text")),
    ]


def test_a_short_passage_goes_on_behind_the_next_heading() -> None:
    page = "# Top\n## One\na\n## Two\n### Three\nb\n\n" + "c" * 30 + "\n## Four\n" + "d" * 50
    passages = split_markdown(page, least=10, enough=40, most=60)
    assert [(passage.headings, passage.blocks) for passage in passages] == [
        (("# Top", "## One"), ("a", "Two > Three", "b", "c" * 30)),
        (("# Top", "## Four"), ("d" * 50,)),
    ]


def test_a_heading_without_text_of_its_own_is_text() -> None:
    page = "# Book\n## Empty\n## Full\n### Inner\na\n# Next book\n"
    assert [(passage.headings, passage.blocks) for passage in split_markdown(page)] == [
        (("# Book",), ("Empty",)),
        (("# Book", "## Full", "### Inner"), ("a",)),
        ((), ("Next book",)),
    ]


def test_terms_are_headings_of_their_definitions_until_the_list_ends() -> None:
    page = """# Tasks
####### run(main), run(main, *, debug)

It runs.

######## Raises

An error.

########

It ends.

#######

After the list."""
    terms = "####### run(main), run(main, *, debug)"
    assert [(passage.headings, passage.blocks) for passage in split_markdown(page)] == [
        (("# Tasks", terms), ("It runs.",)),
        (("# Tasks", terms, "######## Raises"), ("An error.",)),
        (("# Tasks", terms), ("It ends.",)),
        (("# Tasks",), ("After the list.",)),
    ]


@pytest.mark.parametrize(
    "text", ["word " * 1000, "word. " * 500, "line\n" * 1000, "漢" * 1000, "x" * 5000, "a b\n" * 99]
)
def test_no_word_is_lost_and_no_passage_is_too_long(text: str) -> None:
    passages = split_markdown(text, enough=100, most=100)
    assert "".join("".join("".join(passage.blocks) for passage in passages).split()) == "".join(text.split())
    assert all(len(block) <= 100 for passage in passages for block in passage.blocks)
    assert len(passages) <= 2 * len(text) // 100 + 1


PARTS = [
    "word ",
    "x" * 40,
    "a. ",
    "\n",
    "\n\n",
    "- item",
    "```",
    "\n```\n",
    "# ",
    "\n## Head\n",
    "·",
    " * ",
    "---\n",
    "漢字",
    ": ",
]


@given(
    some.lists(some.sampled_from(PARTS), max_size=40),
    some.sampled_from([(0, 10, 10), (5, 20, 30), (1, 1, 3)]),
    some.sampled_from([len, count_words]),
)
def test_the_letters_of_any_page_are_all_in_its_passages(
    parts: list[str], sizes: tuple[int, int, int], count: Callable[[str], int]
) -> None:
    least, enough, most = sizes
    passages = split_markdown("".join(parts), least=least, enough=enough, most=most, count=count)
    rest = iter("".join(text for passage in passages for text in (*passage.headings, *passage.blocks)))
    assert all(any(letter == other for other in rest) for part in parts for letter in part if letter.isalnum())


def test_a_long_paragraph_breaks_after_sentences() -> None:
    passages = split_markdown("This sentence has six words. " * 30, enough=150, most=150)
    assert all(passage.blocks[-1].endswith("words.") for passage in passages)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Cancel a TaskGroup, now!", ["cancel", "a", "taskgroup", "task", "group", "now"]),
        ("create_task HTTPServer2", ["create", "task", "httpserver2", "http", "server", "2"]),
        ("Äpfel straße", ["äpfel", "strasse"]),
        ("東京 tower", ["東", "京", "tower"]),
        ("한국abc", ["한", "국", "abc"]),
        ("🙂 …", []),
    ],
)
def test_terms_are_words_and_their_parts(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


def test_words_of_every_text_are_left_out_of_a_query_unless_it_has_no_others() -> None:
    assert relevant_terms("How do I cancel a task, a group?") == ["cancel", "task", "group"]
    assert relevant_terms("Who is who") == ["who", "is"]
    assert relevant_terms("?!") == []


def test_stemming_only_words_that_begin_like_the_querys_chooses_the_same() -> None:
    stemmer = pytest.importorskip("snowballstemmer")
    stem = functools.lru_cache(maxsize=None)(stemmer.stemmer("english").stemWord)
    page = "\n\n".join(topics.values())  # half a megabyte of Python's documentation
    words = set(terms(page)) | {"dying", "lying", "tying", "skies", "aed", "sky", "y", "yes"}
    for word in sorted(words):
        assert relevant_stems(word, stem)(word) == stem(word)
        assert stem(word)[:2].replace("y", "i") == word[:2].replace("y", "i") or len(stem(word)) == 1
    passages = split_markdown(page)
    for query in (
        "How are classes created?",
        "dying generators",
        "import statements in packages",
        "a",
        "yield 2 values",
    ):
        options = {"title": "Topics", "max_chars": 8000}
        wanted = select(passages, query, stem=stem, **options)  # type: ignore[arg-type]
        assert wanted
        assert select(passages, query, stem=relevant_stems(query, stem), **options) == wanted  # type: ignore[arg-type]


def test_only_a_bounded_number_of_words_is_stemmed() -> None:
    stemmed: list[str] = []
    stem = relevant_stems("penguins swim", lambda word: stemmed.append(word) or word)  # type: ignore[func-returns-value]
    for i in range(20_000):
        assert stem(f"other{i}") == f"other{i}"
    assert stemmed == ["penguins", "swim"]
    for i in range(20_000):
        stem(f"swim{i}")
    assert len(stemmed) == 2 + MAX_STEMS


def test_relevant_passages_come_in_page_order() -> None:
    blocks = ["cancel task", "nothing", "cancel cancel task task", "task cancel"]
    assert chosen(blocks, "cancel task") == ["cancel task", "cancel cancel task task", "task cancel"]


def test_the_best_passages_are_kept_when_not_all_fit() -> None:
    blocks = ["task task " + "x" * 80, "task task task", "task task task task " + "y" * 80]
    assert chosen(blocks, "task", max_chars=130) == blocks[1:]


def test_a_page_with_few_of_the_querys_words_is_not_relevant() -> None:
    assert chosen(["the grp module is about a group of users"], "cancel a task group") == []
    assert chosen(["groups have tasks: a task in a group"], "cancel a task group") != []
    assert chosen(["a group"], "cancel group", title="") == ["a group"]
    assert chosen(["one two three"], "one two three four five six seven eight nine") == ["one two three"]
    assert chosen([], "cancel") == []


def test_the_title_and_headings_count() -> None:
    assert chosen(["cancel it"], "cancel all task groups now", title="Task groups") == ["cancel it"]
    passages = [TextPassage(("# Task groups",), ("cancel it",))]
    assert select(passages, "cancel task groups", title="", max_chars=100) == passages


def test_passages_far_below_the_best_are_left_out() -> None:
    blocks = ["task " * 9, "task" + " other" * 90, "task " * 3]
    assert chosen(blocks, "task") == [blocks[0], blocks[2]]


def test_a_query_without_words_takes_the_beginning() -> None:
    assert chosen(["one", "two", "three"], "🙂", max_chars=10) == ["one", "two"]


def test_text_is_assembled_with_each_heading_once() -> None:
    passages = [
        TextPassage(("# A",), ("a" * 50,)),
        TextPassage(("# A",), ("b" * 50,)),
        TextPassage(("# A", "## C"), ("c" * 50,)),
    ]
    assert assemble(passages, set()) == "\n\n".join(["# A", "a" * 50, "b" * 50, "## C", "c" * 50])


def test_blocks_with_the_same_words_appear_once_in_a_query() -> None:
    notice = "This documentation is licensed under the terms of the Apache licence."
    seen: set[bytes] = set()
    first = assemble([TextPassage(("# A",), ("Text of the first page, which is long enough.", notice))], seen)
    assert notice in first
    again = notice.upper().replace(" ", "  \n")
    second = assemble([TextPassage(("# B",), ("Text of the second page, which is long enough.", again))], seen)
    assert second == "# B\n\nText of the second page, which is long enough."


def test_a_heading_goes_with_the_last_of_its_blocks() -> None:
    block = "A paragraph that is long enough to be recognised when it comes again."
    seen: set[bytes] = set()
    assemble([TextPassage((), (block,))], seen)
    passages = [
        TextPassage(("# A",), (block,)),
        TextPassage(("# B",), ("Something that has not been there before, at all.",)),
    ]
    assert assemble(passages, seen) == "# B\n\nSomething that has not been there before, at all."


def test_short_blocks_may_repeat_but_are_nothing_new_by_themselves() -> None:
    block = "A paragraph that is long enough to be recognised when it comes again."
    seen: set[bytes] = set()
    assert assemble([TextPassage((), ("Example:", block, "Example:"))], seen) == f"Example:\n\n{block}\n\nExample:"
    assert assemble([TextPassage((), ("Example:", block))], seen) == ""
    assert assemble([TextPassage((), ("Page 2", block))], seen) == ""


def test_a_short_new_paragraph_among_known_ones_is_news() -> None:
    block = "A paragraph that is long enough to be recognised when it comes again."
    seen: set[bytes] = set()
    assemble([TextPassage((), (block,))], seen)
    assert assemble([TextPassage((), ("Penguins swim very well.", block))], seen) == "Penguins swim very well."


def test_a_page_of_short_blocks_is_a_page() -> None:
    seen: set[bytes] = set()
    passages = [TextPassage(("# Colours",), ("red", "green"))]
    assert assemble(passages, seen) == "# Colours\n\nred\n\ngreen"
    assert assemble(passages, seen) == ""
