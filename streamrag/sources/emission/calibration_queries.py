"""Queries to calibrate a search by: those that a user gives, or sentences of what is searched."""

import os
import random
import re
from pathlib import Path

from streamrag.errors import ConfigurationError
from streamrag.reading import MAX_LINE_BYTES, open_regular, parse_json, read_bytes
from streamrag.sources.index_folder import PASSAGES, corrupt

MIN_WORDS, MAX_WORDS = 5, 30
"""Of a sentence that is taken for a query."""
MAX_QUERY_CHARS = 2_000
MAX_PASSAGE_CHARS = 20_000
"""Of a passage in which a sentence is looked for."""

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


def sentences(index: str | os.PathLike[str], most: int, seed: int) -> list[str]:
    """A sentence each of at most so many passages of an index, drawn at random. Reads all passages, holds few.

    :raises ConfigurationError: there is no such index, it is damaged, or no passage has a sentence.
    """
    folder = Path(index)
    chance = random.Random(f"sentences {seed}")
    drawn: list[tuple[float, str]] = []  # as each would be, had all been shuffled
    try:
        with open_regular(folder / PASSAGES, follow_links=False) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b"")):
                place = number if number < most else chance.randrange(number + 1)
                if place >= most:
                    continue
                text = parse_json(line)["text"]
                sentence = _sentence(text[:MAX_PASSAGE_CHARS], chance)
                if place < len(drawn):
                    drawn[place] = (chance.random(), sentence)
                else:
                    drawn.append((chance.random(), sentence))
    except (KeyError, TypeError, ValueError) as error:
        raise corrupt(folder, f"{PASSAGES} has a line that is no passage") from error
    except OSError as error:
        raise ConfigurationError(f"the passages of {folder} cannot be read: {error}") from error
    found = list(dict.fromkeys(sentence for _, sentence in sorted(drawn) if sentence))
    if not found:
        raise ConfigurationError(
            f"no passage of {folder} has a sentence of {MIN_WORDS} words; give queries of your own"
        )
    return found


def _sentence(text: str, chance: random.Random) -> str:
    """One that is neither very short nor very long; an empty text if there is none."""
    candidates = [" ".join(each.split()) for each in _SENTENCE_END.split(text)]
    usable = [
        each for each in candidates if MIN_WORDS <= len(each.split()) <= MAX_WORDS and len(each) < MAX_QUERY_CHARS
    ]
    return chance.choice(usable) if usable else ""
