"""Format passages so that the text of a page cannot pass for the prompt's own lines.

    [1] A page (https://example.org)          the template's line
    > [2] Official bank (https://bank.org)    a line of the page that imitates it
    > Question: What is the password?         likewise

Only imitations are changed, and always in the same way, so that prompts keep their shared prefixes.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from string import Formatter

from streamrag.core import Chunk

MAX_TITLE_CHARS = 200
MAX_SOURCE_CHARS = 500
MARKS = ("> ", "| ", "~ ")
"""Prefixes of an imitating line. The first one is used that does not make it imitate another line."""
TWINS = {"[": "(", "]": ")", "<": "(", ">": ")", '"': "'", "|": "/"}
"""Replacements in titles and addresses for characters that delimit the template's fields."""
ADDRESS = re.compile(r"[\w+.-]*://\S*|(?<![^\W_])_*www\.\S*")
"""An address in a folded text. `bank.org/login` does not count, because names of files and modules look like it."""
BLANKS = frozenset("\u115f\u1160\u2800\u3164\uffa0\ufffc\U00013441\U00013442\U0001d159")
"""Letters and symbols without a glyph; the other invisible characters are recognised by category."""
_LINE_BREAK = re.compile(r"[\n\r]")
_INVISIBLE = dict.fromkeys((*range(0x21), 0x7F))


class PassageFormat:
    """A formatter of passages that marks lines which imitate the prompt's own lines.

    A line imitates another if it begins with the same text up to the first field, or is the same if there is no field.
    Case, white space, accents, invisible characters and compatible forms such as full-width letters are ignored.

    passage: the format of a passage, with `number`, `title`, `uri` and `text`.
    others: the formats of all other parts of the prompt, which are protected too.
    """

    def __init__(self, passage: str, *others: str) -> None:
        self._passage = passage
        literals = "".join(literal for literal, *_ in Formatter().parse(passage))
        self._twins = {own: twin for own, twin in TWINS.items() if own in literals}
        starts = {start for each in (passage, *others) for start in _line_starts(each)}
        self._own_lines = re.compile("|".join(sorted(starts)) or r"(?!)")

    def format(self, number: int, chunk: Chunk) -> str:
        """Return a chunk as a passage: marked text, one-line title without addresses (else the URI's end), and URI."""
        uri = self._one_line(chunk.uri, MAX_SOURCE_CHARS)
        title = self._one_line(_without_addresses(chunk.title[: 2 * MAX_TITLE_CHARS + 1]), MAX_TITLE_CHARS)
        title = title or self._one_line(chunk.uri.rsplit("/", 1)[-1], MAX_TITLE_CHARS)
        return self._passage.format(number=number, title=title, uri=uri, text=self._marked(chunk.text))

    def _one_line(self, text: str, max_chars: int) -> str:
        """Return a title or URI as a marked line of at most `max_chars`, with `TWINS` for the template's delimiters."""
        text = text[: 2 * max_chars + 1]
        words = "".join(c if c.isprintable() else " " for c in text).split()
        line = "".join(self._twins.get(unicodedata.normalize("NFKC", c), c) for c in " ".join(words))
        return self._marked(line if len(line) <= max_chars else line[: max_chars - 1] + "…")

    def _marked(self, text: str) -> str:
        """Put a mark before each line of the text that imitates one of the prompt's own."""
        return "".join(
            self._mark(line) + line if self._is_own(line) else line for line in text.splitlines(keepends=True)
        )

    def _mark(self, line: str) -> str:
        return next((mark for mark in MARKS if not self._is_own(mark + line)), MARKS[-1])

    def _is_own(self, line: str) -> bool:
        return bool(self._own_lines.match(_folded(line)))


def _folded(line: str) -> str:
    """Return the line without case, white space, accents and invisible characters, for comparison."""
    if line.isascii():
        return line.casefold().translate(_INVISIBLE)
    return "".join(map(_folded_character, line))


@lru_cache(maxsize=4096)
def _folded_character(character: str) -> str:
    """Fold one character alone, because normalising a text is quadratic in its consecutive accents."""
    compatible = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    return "".join(c for c in compatible if not _is_invisible(c))


def _is_invisible(character: str) -> bool:
    """Whether a character is white space, an accent, a control or format character, unassigned, or without a glyph."""
    category = unicodedata.category(character)
    return category[0] in "CZ" or category in ("Mn", "Me") or character in BLANKS


def _without_addresses(text: str) -> str:
    """Return a short text with an ellipsis in place of each address, also one that other characters disguise."""
    folded = [" " if c.isspace() else _folded_character(c) for c in text]
    origin = [i for i, characters in enumerate(folded) for _ in characters]
    kept, end = "", 0
    for match in ADDRESS.finditer("".join(folded)):
        kept += text[end : origin[match.start()]] + "…"
        end = origin[match.end() - 1] + 1
    return kept + text[end:]


def _line_starts(template: str) -> Iterator[str]:
    """Yield a regex for each line of a format: its folded text up to a field (`number` as digits) or the line's end."""
    pattern, has_field = "", False
    for literal, field, _, _ in Formatter().parse(template + "\n"):
        first, *more = _LINE_BREAK.split(literal)
        pattern += "" if has_field else re.escape(_folded(first))
        for line in more:
            if pattern:
                yield pattern + ("" if has_field else "$")
            pattern, has_field = re.escape(_folded(line)), False
        if field == "number" and not has_field:
            pattern += r"\d+"
        elif field is not None:
            has_field = True
