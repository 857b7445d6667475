"""Queries to calibrate a search by: those that a user gives, or sentences of what is searched."""

import os
import random
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from streamrag.core import Source, SourceEvent, Update, part_name
from streamrag.errors import ConfigurationError
from streamrag.retrieving import Retrieval
from streamrag.sources.index_folder import PASSAGES, corrupt
from streamrag.sources.wrapped import WrappedSource
from streamrag.support.bounded_reading import MAX_LINE_BYTES, open_regular, parse_json, read_bytes

MIN_WORDS, MAX_WORDS = 5, 30
"""Of a sentence that is taken for a query."""
MAX_QUERY_CHARS = 2_000
MAX_PASSAGE_CHARS = 20_000
"""Of a passage in which a sentence is looked for."""

From: TypeAlias = tuple[str, int]
"""The document and the number of the passage."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def read_queries(path: str | os.PathLike[str], most: int) -> list[str]:
    """The lines of a text file that are not empty, at most so many, each once.

    :raises ConfigurationError: it cannot be read, is no text, or has no query.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is one
        raise ConfigurationError(f"queries cannot be read from {path}: {error}") from error
    queries = list(dict.fromkeys(filter(None, (line.strip() for line in text.splitlines()))))[:most]
    if not queries:
        raise ConfigurationError(f"{path} has no queries: write one a line")
    if longest := [query for query in queries if len(query) > MAX_QUERY_CHARS]:
        raise ConfigurationError(
            f"{path} has a query of {len(longest[0]):,} characters; {MAX_QUERY_CHARS:,} is the most"
        )
    return queries


def sentences(index: str | os.PathLike[str], most: int, seed: int) -> dict[str, From]:
    """A sentence each of at most so many passages of an index, drawn at random, and where each is from.

    Reads all passages, holds few.

    :raises ConfigurationError: there is no such index, it is damaged, or no passage has a sentence.
    """
    folder = Path(index)
    chance = random.Random(f"sentences {seed}")
    drawn: list[tuple[float, str, From]] = []  # as each would be, had all been shuffled
    try:
        with open_regular(folder / PASSAGES, follow_links=False) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b"")):
                place = number if number < most else chance.randrange(number + 1)
                if place >= most:
                    continue
                fields = parse_json(line)
                sentence = _sentence(fields["text"][:MAX_PASSAGE_CHARS], chance)
                where = fields["uri"], fields["passage"]
                if place < len(drawn):
                    drawn[place] = (chance.random(), sentence, where)
                else:
                    drawn.append((chance.random(), sentence, where))
    except (KeyError, TypeError, ValueError) as error:
        raise corrupt(folder, f"{PASSAGES} has a line that is no passage") from error
    except OSError as error:
        raise ConfigurationError(f"the passages of {folder} cannot be read: {error}") from error
    found = {sentence: where for _, sentence, where in sorted(drawn) if sentence}
    if not found:
        raise ConfigurationError(
            f"no passage of {folder} has a sentence of {MIN_WORDS} words; give queries of your own"
        )
    return found


class HeldOut(WrappedSource):
    """The search of an index without the passage that the query is a sentence of: that one is found at once.

    `source` searches for more than the `num` that stay.
    """

    def __init__(self, source: Source, places: Mapping[str, From], num: int) -> None:
        super().__init__(source)
        self._places = places
        self._num = num

    @property
    def name(self) -> str:
        """The source's own: what is found out is about that."""
        return part_name(self._source)

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """The source's events, updates without the query's own passage."""
        own = self._places.get(query)
        async with aclosing(Retrieval(self._source, query).events()) as events:
            async for event in events:
                if isinstance(event, Update):
                    others = tuple(chunk for chunk in event.chunks if (chunk.uri, chunk.passage) != own)
                    event = replace(event, chunks=others[: self._num])
                yield event


def _sentence(text: str, chance: random.Random) -> str:
    """One that is neither very short nor very long; an empty text if there is none."""
    candidates = [" ".join(each.split()) for each in _SENTENCE_END.split(text)]
    usable = [
        each for each in candidates if MIN_WORDS <= len(each.split()) <= MAX_WORDS and len(each) < MAX_QUERY_CHARS
    ]
    return chance.choice(usable) if usable else ""
