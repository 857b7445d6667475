"""Pages that are made to be slow to read, each in any size: what a regular expression or a loop may stumble over."""

from collections.abc import Callable

NBSP = "\u00a0"


def repeated(unit: str, num_chars: int) -> str:
    return (unit * (num_chars // len(unit) + 1))[:num_chars]


def _html(unit: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda num_chars: before + repeated(unit, num_chars) + after


HEADINGS = "".join(f"{'#' * i} {'swim ' * 40}\n" for i in range(1, 6))

TEXT: dict[str, Callable[[int], str]] = {
    "no-break spaces in a heading": _html(NBSP, "# x", "y"),
    "no-break spaces and signs in a heading": _html(NBSP + "¶", "# x", "y"),
    "hashes": _html("#"),
    "hashes and spaces": _html("# "),
    "rules that are none": _html("* - ", after="x"),
    "white space": _html(" ", after="#"),
    "an open fence": _html("a\n", "```\n"),
    "fences": _html("```\n"),
    "blocks that introduce each other": _html("a:\n\n"),
    "one word": _html("a"),
    "one CamelCase word": _html("aB"),
    "capitals": _html("A", after="b"),
    "combining characters": _html("\u0301", "a"),
    "one line": _html("penguins swim "),
    "line separators": _html("\u2028"),
    "sections under long headings": _html("###### a\n\nb\n\n", HEADINGS),
    "ever new words": lambda num_chars: " ".join(f"w{i}x{i % 77}" for i in range(num_chars // 10)),
    "Chinese": _html("企鹅"),
}

HTML: dict[str, Callable[[int], str]] = {
    "no-break spaces": _html(NBSP, "<h1>x", "y</h1>"),
    "no-break entities": _html("&nbsp;", "<h1>x", "y</h1>"),
    "spaces": _html(" ", "<p>x", "y</p>"),
    "hash lines in a listing": _html("# \n", "<pre>"),
    "open paragraphs": _html("<p>a"),
    "open links": _html("<a href=x>a"),
    "links in links": _html("<a href=x><div>"),
    "open lists": _html("<ul><li>a"),
    "items in deep lists": _html("a<li>", "<ul><li>" * 100),
    "open tables": _html("<table><tr><td>a"),
    "open quotations": _html("<blockquote>a"),
    "lines in deep quotations": _html("a<br>", "<blockquote>" * 200),
    "listings in deep quotations": _html("a\n", "<blockquote>" * 200 + "<pre>"),
    "nesting": _html("<div>", after="x"),
    "comments": _html("a<!--x-->"),
    "an open comment": _html("<!-- a "),
    "open tags": _html("<a "),
    "less-than signs": _html("<"),
    "base tags": _html("<base "),
    "an open declaration": _html(" ", "<?xml", "<p>x"),
    "pictures": _html("a<img>"),
    "scripts and pictures": _html("<script></script><img>a"),
    "noscript": _html("<noscript>a</noscript>b"),
    "metas": _html("<meta name=a>b", "<body><p>x"),
    "line breaks": _html("a<br>", "<p>"),
    "empty elements": _html("<span></span>a", "<p>"),
    "blank elements": _html("<span> </span>a", "<p>"),
    "empty elements in empty elements": _html("<span><i></i></span>a", "<p>"),
    "brackets": _html("[", "<p>"),
    "links of Markdown": _html("[a](", "<p>"),
    "backticks": _html("`", "<p>"),
    "code": _html("<code>a</code>", "<p>"),
    "backslashes": _html("\\", "<p>"),
    "stars": _html("*", "<p>"),
    "a long number": _html("1", "<p>", ". a"),
    "entities": _html("&amp;", "<p>"),
    "bad entities": _html("&x", "<p>"),
    "a long entity": _html("1", "<p>&#", ";"),
    "combining characters": _html("\u0301", "<p>a"),
    "a long word": _html("a", "<p>"),
    "table cells": _html("<td>a</td>", "<table><tr>"),
    "links": lambda num_chars: "".join(f"<a href=/{i}>a</a>" for i in range(num_chars // 18)),
    "links below a long base": lambda num_chars: (
        f"<base href='/{'a/' * (num_chars // 4)}'>" + "".join(f"<a href={i}>a</a>" for i in range(num_chars // 36))
    ),
    "a long link": _html("x", "<a href='", "'>a</a>"),
    "links to foreign names": _html("<a href='http://" + "ü" * 60 + ".é/'>a</a>"),
    "a long attribute": _html("x", "<p class='", "'>a</p>"),
    "hidden parts": _html("<div hidden>a</div>b"),
    "headers": _html("<header>a</header>b"),
    "definitions": _html("<dt>a<dd>b:", "<dl>"),
    "emphasis": _html("<b><i>a</b>", "<p>"),
    "short sections": _html("<h6>a</h6>b", "".join(f"<h{i}>{'swim ' * 40}</h{i}>" for i in range(1, 6))),
}


def attributes(num_chars: int) -> str:
    """libxml2 takes time quadratic in the number of one element's attributes, whoever calls it."""
    return "<p " + " ".join(f"a{i}=b" for i in range(num_chars // 9)) + ">a</p>"


def new_names(num_names: int, first: int) -> str:
    """From number `first` on. libxml2 keeps the names that it has seen, for good."""
    return "".join(
        "<b " + " ".join(f"a{i + j:x}" for j in range(20)) + ">a</b>" for i in range(first, first + num_names, 20)
    )
