"""Queries for a calibration: a user's queries, or sentences of the searched passages."""

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
from streamrag.sources.emission.wrapper import SourceWrapper
from streamrag.sources.index.index_folder import PASSAGES, read_passages
from streamrag.support.bounded_reading import read_bytes

MIN_WORDS, MAX_WORDS = 5, 30
"""Least and most words of a sentence that is used as a query."""
MAX_QUERY_CHARS = 2_000
MAX_PASSAGE_CHARS = 20_000
"""Characters of a passage's beginning from which a sentence is drawn."""
Origin: TypeAlias = tuple[str, int]
"""A passage: the uri of its document and its number there."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def read_queries(path: str | os.PathLike[str], most: int) -> list[str]:
    """Return the distinct lines of a text file that are not empty, at most `most`.

    :raises ConfigurationError: the file cannot be read, is not text, or has no query or one that is too long.
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


def draw_sentences(index: str | os.PathLike[str], most: int, seed: int) -> dict[str, Origin]:
    """Draw one sentence from each of at most `most` passages of an index. Return the origin of each sentence.

    Reads all passages, and holds at most `most` sentences.

    :raises ConfigurationError: there is no such index, it is damaged, or no passage has a usable sentence.
    """
    folder = Path(index)
    if not (folder / PASSAGES).is_file():
        raise ConfigurationError(f"the passages of {folder} cannot be read: it is no index")
    rng = random.Random(f"sentences {seed}")
    drawn: dict[int, tuple[float, str, Origin]] = {}  # reservoir sampling, with a random sort key
    try:
        for number, fields in enumerate(read_passages(folder, PASSAGES)):
            place = number if number < most else rng.randrange(number + 1)
            if place < most:
                sentence = _sentence(fields["text"][:MAX_PASSAGE_CHARS], rng)
                drawn[place] = (rng.random(), sentence, (fields["uri"], fields["passage"]))
    except OSError as error:
        raise ConfigurationError(f"the passages of {folder} cannot be read: {error}") from error
    origins = {sentence: origin for _, sentence, origin in sorted(drawn.values()) if sentence}
    if not origins:
        raise ConfigurationError(
            f"no passage of {folder} has a sentence of {MIN_WORDS} words; give queries of your own"
        )
    return origins


class LeaveOneOut(SourceWrapper):
    """A search of an index that leaves out the passage from which the query was drawn.

    source: the search; it must find more than `num` passages.
    num: number of passages to keep.
    """

    def __init__(self, source: Source, places: Mapping[str, Origin], num: int) -> None:
        super().__init__(source)
        self._places = places
        self._num = num

    @property
    def name(self) -> str:
        """Name of the source that is calibrated."""
        return part_name(self._source)

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, updates without the passage of the query."""
        own = self._places.get(query)
        async with aclosing(Retrieval(self._source, query).events()) as events:
            async for event in events:
                if isinstance(event, Update):
                    others = tuple(chunk for chunk in event.chunks if (chunk.uri, chunk.passage) != own)
                    event = replace(event, chunks=others[: self._num])
                yield event


def _sentence(text: str, rng: random.Random) -> str:
    """Return a random sentence of `MIN_WORDS` to `MAX_WORDS` words; "" if there is none."""
    candidates = [" ".join(each.split()) for each in _SENTENCE_END.split(text)]
    usable = [
        each for each in candidates if MIN_WORDS <= len(each.split()) <= MAX_WORDS and len(each) < MAX_QUERY_CHARS
    ]
    return rng.choice(usable) if usable else ""
