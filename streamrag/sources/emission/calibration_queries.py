"""Queries to calibrate a search by: a user's, or sentences of what is searched."""

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
from streamrag.query.retrieval import Retrieval
from streamrag.sources.index.index_folder import PASSAGES, read_passages
from streamrag.sources.wrapper import SourceWrapper
from streamrag.support.bounded_reading import read_bytes

MIN_WORDS, MAX_WORDS = 5, 30
"""Words of a sentence that is taken for a query."""
MAX_QUERY_CHARS = 2_000
MAX_PASSAGE_CHARS = 20_000
"""The beginning of a passage in which a sentence is looked for."""

From: TypeAlias = tuple[str, int]
"""The document and the number of the passage."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def read_queries(path: str | os.PathLike[str], most: int) -> list[str]:
    """Return the lines of a text file that are not empty, at most `most`, each once.

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
    """Draw a sentence each of at most `most` passages of an index, and return where each is from.

    Reads all passages, holds few.

    :raises ConfigurationError: there is no such index, it is damaged, or no passage has a sentence.
    """
    folder = Path(index)
    if not (folder / PASSAGES).is_file():
        raise ConfigurationError(f"the passages of {folder} cannot be read: it is no index")
    chance = random.Random(f"sentences {seed}")
    drawn: dict[int, tuple[float, str, From]] = {}  # a reservoir: as each would be, had all been shuffled
    try:
        for number, fields in enumerate(read_passages(folder, PASSAGES)):
            place = number if number < most else chance.randrange(number + 1)
            if place < most:
                sentence = _sentence(fields["text"][:MAX_PASSAGE_CHARS], chance)
                drawn[place] = (chance.random(), sentence, (fields["uri"], fields["passage"]))
    except OSError as error:
        raise ConfigurationError(f"the passages of {folder} cannot be read: {error}") from error
    found = {sentence: where for _, sentence, where in sorted(drawn.values()) if sentence}
    if not found:
        raise ConfigurationError(
            f"no passage of {folder} has a sentence of {MIN_WORDS} words; give queries of your own"
        )
    return found


class HeldOut(SourceWrapper):
    """The search of an index without the passage that the query is a sentence of, which is found at once.

    `source` searches for more than the `num` that stay.
    """

    def __init__(self, source: Source, places: Mapping[str, From], num: int) -> None:
        super().__init__(source)
        self._places = places
        self._num = num

    @property
    def name(self) -> str:
        """Name of the source, which the calibration is about."""
        return part_name(self._source)

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, updates without the query's own passage."""
        own = self._places.get(query)
        async with aclosing(Retrieval(self._source, query).events()) as events:
            async for event in events:
                if isinstance(event, Update):
                    others = tuple(chunk for chunk in event.chunks if (chunk.uri, chunk.passage) != own)
                    event = replace(event, chunks=others[: self._num])
                yield event


def _sentence(text: str, chance: random.Random) -> str:
    """Return one that is neither very short nor very long; an empty text if there is none."""
    candidates = [" ".join(each.split()) for each in _SENTENCE_END.split(text)]
    usable = [
        each for each in candidates if MIN_WORDS <= len(each.split()) <= MAX_WORDS and len(each) < MAX_QUERY_CHARS
    ]
    return chance.choice(usable) if usable else ""
