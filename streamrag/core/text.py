"""Split Markdown into passages, and texts into terms that can be compared.

The text is untrusted, so every function takes linear time: no two repeats of a regular expression can match the same
characters, no line is copied or summed up more than once, and letters are composed with their accents in pieces of
`MAX_WORD_CHARS`, because that is quadratic in consecutive accents.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias
from unicodedata import category, normalize

MAX_LEVEL = 6  # of headings; below them are the terms of definition lists
MAX_HEADING_CHARS = 200
MAX_WORD_CHARS = 100
"""Most characters of a term. Stemmers cache words, and a page may be one word of a megabyte."""

HEADING = re.compile(r"#{1,6}\s|#{7,}(?:\s|$)")
"""A heading, or with more signs a term of a definition list, or without text the list's end."""

HEADING_END = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "¶"
"""Unicode white space, and the sign that documentation tools put behind a heading as its link."""

FENCE = re.compile(r"\s*(`{3,}|~{3,})")
RULE = re.compile(r"\s*([*_-]\s*){3,}")
BREAKS = tuple(map(re.compile, (r"(?<=\n)", r"(?<=[.!?…])(?=\s)|(?<=[。！？])", r"(?<=\s)(?=\S)", r"(?s:(?<=.))")))
"""Places to break a block that is too long, best first: after lines, sentences, words, characters."""

CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff"
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
"""Thai, Lao, Burmese and Khmer: letters of scripts without spaces between words, of which we have no dictionary."""
MAX_CACHED = 1 << 14  # words of at most MAX_WORD_CHARS, as most words of a text are there many times
MAX_LETTERS = 20_000  # characters that the table remembers, of more than a million
NUM_UNSPACED = 3  # letters of a term of these scripts: about a syllable; terms overlap
ARABIC = r"\u0600-\u06ff"
VOWEL_SIGNS = (
    r"\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u064b-\u0652\u0656-\u065f\u0670\u06d6-\u06dc"
    r"\u06df-\u06e8\u06ea-\u06ed\u0730-\u074a\u08ca-\u08ff"
)
"""Marks of Hebrew, Arabic and Syriac that most texts leave out, but not those that compose with a letter."""
IGNORABLE = (
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    r"\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Characters that are not shown, such as soft hyphens: Unicode's property Default_Ignorable_Code_Point."""
NON_JOINER, TATWEEL = "\u200c", "\u0640"

_SHOWN = re.compile(rf"[^\s\x00-\x1f\x7f-\x9f\u2800{IGNORABLE}]")
_BREAK = rf"\u200b(?=[{UNSPACED}])"  # a zero-width space between words of these scripts
_BREAKS, _NOT_READ = re.compile(_BREAK), re.compile(rf"[\xad\u2060\ufeff]|(?!{_BREAK})\u200b")
_IGNORED = re.compile(rf"[{IGNORABLE}{TATWEEL}{VOWEL_SIGNS}]")
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+")
_RUN = re.compile(rf"[{CJK}]|[{UNSPACED}]+|[^{CJK}{UNSPACED}]+")
_IS_UNSPACED, _IS_ARABIC = re.compile(f"[{UNSPACED}]"), re.compile(f"[{ARABIC}]")
_CAMEL_CASE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ELISION = re.compile(r"\b[^\W\d_]['’](?=[^\W\d_])|(?<=[^\W\d_])['’][^\W\d_]\b")
"""A letter beside an apostrophe, as in "l'eau" and "it's": no word of its own in a question."""
_SPELLINGS = str.maketrans("άέήίόύώΐΰı", "αεηιουωϊϋi", "\u0307")
"""Letters whose capitals are the same: Greek ones lose the accent, and Turkish ones the dot."""

STOP_WORDS = frozenset(
    """
    a about all also am an and any are as at be because been being but by can could did do does doing during each few
    for from further had has have having he her here hers him his how i if in into is it its just me more most my no
    nor not now of off on once only or other our out over own please same she should so some such tell than that the
    their them then there these they this those through to too up very was way we were what when where which while who
    whom why will with would you your
    अपना अपनी अपने आप इन इस उन उस एक एवं ऐसे और कब कर करता करते करना करने करूँ करूं करें कहाँ कहां का कि कितना कितनी कितने
    किन किया किस किसी की के कैसा कैसी कैसे को कोई कौन क्या क्यों गई गए गया जब जा जाए जाता जाती जाते जाने जो तक तथा तब तो था
    थी थे द्वारा न नहीं ना ने पर बारे मुझे में मेरा मेरी मेरे मैं यदि यह या ये रहा रही रहे लिए व वह वाला वाली वाले वे सकता
    सकती सकते साथ से ही हुआ हुई हुए हूँ हूं है हैं हो होगा होता होती होते होना
    """.split()  # noqa: SIM905 (a list of quoted words is unreadable)
)
"""English and Hindi words that say nothing of a text's subject."""

Stem: TypeAlias = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TextPassage:
    """Consecutive blocks (paragraphs, list items, code listings) under one heading."""

    headings: tuple[str, ...]
    """Markdown headings from the page's title down to its own; with more than six `#`, terms of definition lists."""
    blocks: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        """Number of characters of the blocks and the innermost heading, with separators."""
        return sum(len(block) + 2 for block in (*self.blocks, *self.headings[-1:]))


def split_markdown(
    markdown: str, *, least: int = 0, enough: int = 600, most: int = 2000, count: Callable[[str], int] = len
) -> list[TextPassage]:
    """Split a page at headings and between blocks into passages of which `count` is at most `most`, without headings.

    A passage shorter than `least` goes on behind the next heading. One of `enough`, about what a question needs with
    its context, ends unless its last block introduces the next one.
    """
    passages: list[TextPassage] = []
    above: tuple[str, ...] = ()
    blocks: list[str] = []
    length = 0  # of `blocks`, which are the next passage below `above`

    def close() -> None:
        nonlocal blocks, length
        passages.extend([TextPassage(above, tuple(blocks))] if blocks else [])
        blocks, length = [], 0

    for headings, num_known, texts in _sections(_blocks(markdown.splitlines())):
        pieces = [piece for text in texts for piece in _pieces(text, most, count)]
        if blocks and length < least and length + count(pieces[0]) <= most:
            blocks += [heading_path(headings[num_known:])] if num_known < len(headings) else []
        else:
            close()
        for piece in pieces:
            num_new = count(piece)
            if length + num_new > most or (length >= enough and not blocks[-1].endswith(":")):
                close()
            above = above if blocks else headings
            blocks += [text] if (text := piece.strip("\n").rstrip()) else []
            length += num_new
    close()
    return passages


def heading_path(headings: Iterable[str]) -> str:
    """Return headings on one line, without their signs and those of code."""
    return " > ".join(heading.lstrip("#").lstrip().replace("`", "") for heading in headings)


def _sections(blocks: Iterable[tuple[int, str]]) -> Iterator[tuple[tuple[str, ...], int, list[str]]]:
    """Yield for each section the headings above, how many of them are above an earlier section too, and its texts.

    A heading that is too long to be repeated is text, and so is one without text of its own.
    """
    path: list[tuple[int, str]] = []
    num_known = 0
    texts: list[str] = []
    for level, text in (*blocks, (1, "")):
        if not level:
            texts += [] if is_blank(text) or RULE.fullmatch(text) else [text]
            continue
        if not texts and num_known < len(path) and path[-1][0] >= level:
            texts.append(path.pop()[1])
        if texts:
            yield tuple(f"{'#' * above} {heading}" for above, heading in path), num_known, texts
            texts, num_known = [], len(path)
        path = [outer for outer in path if outer[0] < level]
        num_known = min(num_known, len(path))
        if len(text) > MAX_HEADING_CHARS:
            texts.append(text)
        elif text:
            path.append((level, text))


def _blocks(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the level and text of headings, and 0 and the text of listings and of runs of lines between empty ones."""
    block: list[str] = []
    fence = ""
    for line in map(str.rstrip, lines):
        if fence and not (line.lstrip().startswith(fence) and not line.strip(f" \t{fence[0]}")):
            block.append(line)
        elif fence:
            code = "\n".join(block[1:]).strip("\n")
            yield 0, f"{block[0]}\n{code}\n{line}"
            block, fence = [], ""
        elif not line or HEADING.match(line) or FENCE.match(line):
            yield 0, "\n".join(block)
            opening = FENCE.match(line)
            block, fence = ([line], opening[1]) if opening else ([], "")
            if heading := HEADING.match(line):
                yield len(heading[0].rstrip()), line[heading.end() :].strip(HEADING_END)
        else:
            block.append(line)
    yield 0, "\n".join(block)


def _pieces(text: str, most: int, count: Callable[[str], int], level: int = 0) -> list[str]:
    """Cut `text` at its best breaks into few pieces of which `count` is at most `most`, and which joined are `text`."""
    if count(text) <= most:
        return [text]
    pieces: list[str] = []
    length = 0  # of the last piece
    for part in BREAKS[level].split(text):
        for piece in _pieces(part, most, count, level + 1):
            num_new = count(piece)
            if pieces and length + num_new <= most:
                pieces[-1] += piece
                length += num_new
            else:
                pieces.append(piece)
                length = num_new
    return pieces


class _Letters(dict[int, str]):
    """A table for `str.translate` of characters to what is compared of them."""

    def __missing__(self, code: int) -> str:
        letters = _comparable(chr(code))
        if len(self) < MAX_LETTERS:
            self[code] = letters
        return letters


def _comparable(character: str) -> str:
    """Return the letters, digits and accents of a character's compatible form, "" if ignored, else a space."""
    letters = _IGNORED.sub("", normalize("NFKC", "" if _IGNORED.match(character) else character))
    if letters.startswith(" "):  # an accent that stands alone, such as U+00B4
        return " "
    kinds = zip(letters, map(category, letters), strict=True)
    return "".join(each if each.isalnum() or kind in ("Mn", "Mc") else " " for each, kind in kinds if kind != "Me")


_LETTERS = _Letters({ord(NON_JOINER): NON_JOINER})


def words(text: str) -> list[str]:
    """Return the words of a text for comparison; see `terms`.

    >>> words("ＺÜrich’s Stra\\xadßen")
    ['zürich', 's', 'strassen']
    """
    return [_folded(word) for word in _words(text)]


def terms(text: str, stem: Stem = str) -> list[str]:
    """Return the stems of the words in `text`, and of parts of CamelCase words.

    Words are compared without case, invisible characters, vowel signs of Arabic and Hebrew, and differences between
    compatible characters, such as ligatures. CJK splits by character, and Thai and its like into overlapping terms.
    """
    return list(_terms(_words(text), stem))


def relevant_terms(query: str, stem: Stem = str) -> list[str]:
    """Return the distinct terms of the query, without elisions and stop words unless there are no others."""
    relevant = [word for word in _words(_ELISION.sub(" ", query)) if _folded(word) not in STOP_WORDS]
    return list(dict.fromkeys(_terms(relevant or _words(query), stem)))


def readable(text: str) -> str:
    """Return `text` without characters that only say where a word may be broken, as a model should read it."""
    return text if text.isascii() else _NOT_READ.sub("", text)


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it is empty, white space or invisible."""
    return not _SHOWN.search(text)


def _words(text: str) -> Iterator[str]:
    """Yield the words in their case; one with zero-width non-joiners in Arabic script whole, and then its parts."""
    if text.isascii():
        yield from (word[:MAX_WORD_CHARS] for word in _ASCII_WORD.findall(text))
        return
    for word in _BREAKS.sub(" ", text).translate(_LETTERS).split():
        if word.isascii():
            yield word[:MAX_WORD_CHARS]
        else:
            yield from _word_parts(word) if len(word) <= MAX_WORD_CHARS else _word_parts.__wrapped__(word)


@lru_cache(maxsize=MAX_CACHED)
def _word_parts(word: str) -> tuple[str, ...]:
    """Return the parts of a word that is not ASCII: those between non-joiners in Arabic script, behind the whole."""
    parts = word.split(NON_JOINER) if NON_JOINER in word and _IS_ARABIC.search(word) else []
    whole = word.replace(NON_JOINER, "")
    return tuple(run for part in (whole, *(parts if len(parts) > 1 else [])) for run in _runs(_composed(part)))


def _runs(word: str) -> Iterator[str]:
    """Yield the parts of a word without spaces: CJK characters, overlapping terms of unspaced letters, and others."""
    for run in _RUN.findall(word):
        if not _IS_UNSPACED.match(run):
            yield from (run[:MAX_WORD_CHARS],) if any(map(str.isalnum, run)) else ()
        else:
            yield from (run[i : i + NUM_UNSPACED] for i in range(max(1, len(run) - NUM_UNSPACED + 1)))


def _composed(word: str) -> str:
    return "".join(normalize("NFC", word[i : i + MAX_WORD_CHARS]) for i in range(0, len(word), MAX_WORD_CHARS))


@lru_cache(maxsize=MAX_CACHED)
def _folded(word: str) -> str:
    """Return a word as it is compared: without case, also where only small letters have a mark."""
    return word.lower() if word.isascii() else normalize("NFC", word.casefold()).translate(_SPELLINGS)


def _terms(found: Iterable[str], stem: Stem) -> Iterator[str]:
    """Yield each word's stem, and those of its parts if it is CamelCase."""
    for word in found:
        yield stem(_folded(word))
        if word != word.lower() and len(parts := _camel_case_parts(word)) > 1:
            yield from (stem(_folded(part)) for part in parts)


def _camel_case_parts(word: str) -> list[str]:
    if word.isascii():
        return _CAMEL_CASE.findall(word)
    kinds = "".join("A" if each.isupper() else "0" if each.isdigit() else "a" for each in word)
    return [word[slice(*match.span())] for match in _CAMEL_CASE.finditer(kinds)]
