"""Where an answer cites its passages: [2], or [1, 3]."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

_CITED = re.compile(r"\[(\d{1,4}(?:\s?,\s?\d{1,4}){0,15})\]", re.ASCII)

LONGEST_MARK = 96
"""Characters of the longest mark that is taken for a citation, brackets included."""


class Passage(Protocol):
    """What is cited: a `Chunk`, or a `Citation`."""

    @property
    def uri(self) -> str: ...

    @property
    def title(self) -> str: ...


P = TypeVar("P", bound=Passage)


@dataclass(frozen=True, slots=True)
class Mark:
    """Characters `start` to `end` of an answer cite the passage of this number, from 1."""

    start: int
    end: int
    number: int


def marks_in(text: str, num_passages: int, start: int = 0) -> list[Mark]:
    """The citations in `text` from `start` on; numbers that no passage has are none."""
    return [
        Mark(match.start(), match.end(), number)
        for match in _CITED.finditer(text, start)
        for number in dict.fromkeys(map(int, match[1].split(",")))
        if 1 <= number <= num_passages
    ]


def url_citations(text: str, passages: Sequence[P]) -> list[dict[str, object]]:
    """The citations in `text` as OpenAI's chat completions have them."""
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": mark.start,
                "end_index": mark.end,
                "title": passages[mark.number - 1].title,
                "url": passages[mark.number - 1].uri,
            },
        }
        for mark in marks_in(text, len(passages))
    ]
