"""Reading of Markdown files: front matter becomes the title, headings are written in one way, HTML becomes text."""

import re
from html import unescape

MARKUP = re.compile(
    r"<!--.*?(?:-->|\Z)|<(?P<code>script|style)\b.*?(?:</(?P=code)\s*>|\Z)"
    r"|</?(?:(?P<inline>(?:a|abbr|b|code|em|i|kbd|mark|s|small|span|strong|sub|sup|u)\b)|[a-z!?])[^<>]*>",
    re.DOTALL | re.IGNORECASE,
)


def read_markdown(text: str) -> tuple[str, str]:
    """Return the front matter's title, or the first heading, or "", and the Markdown after it.

    Headings become plain, and HTML becomes text.
    """
    from markdown_it import MarkdownIt

    text = text.replace("\r\n", "\n").replace("\r", "\n")
    title = ""
    if front_matter := re.match(r"---\n(.*?\n)?---\n", text, re.DOTALL):
        text = text[front_matter.end() :]
        if match := re.search(r"""^title:\s*["']?(.+?)["']?\s*$""", front_matter[0], re.MULTILINE):
            title = match[1]
    lines = text.split("\n")
    blocks = []
    tokens = MarkdownIt("commonmark").parse(text)
    for number, token in enumerate(tokens):
        if token.level or not token.map or token.nesting < 0:
            continue
        if token.type == "heading_open":
            inline = tokens[number + 1].children or []
            heading = "".join(" " if part.type == "softbreak" else part.content for part in inline).strip()
            title = title or heading
            blocks.append(f"{'#' * int(token.tag[1])} {heading}")
        elif token.type == "html_block":
            blocks.append(_text_of(token.content))
        else:
            blocks.append("\n".join(lines[slice(*token.map)]))
    return title, "\n\n".join(blocks)


def _text_of(html: str) -> str:
    """Return the text of HTML inside Markdown, in its lines."""
    text = unescape(MARKUP.sub(lambda markup: "" if markup["inline"] else " ", html))
    return "\n".join(" ".join(line.split()) for line in text.splitlines())
