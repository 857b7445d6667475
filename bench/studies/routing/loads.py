"""What is asked of a fleet: arrivals of production traces, or of generators in their likeness.

text      pieces of (what it is, so many tokens), of which equal ones have equal tokens
query     texts that come one after the other, the last one complete; most have one
"""

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

BLOCK = 64
MOST_BLOCKS = 1 << 20
"""Of a piece."""
QUESTION = 64
"""Tokens of a question, behind all else."""


class Piece(NamedTuple):
    """Tokens that are the same wherever the piece stands."""

    number: int
    num_tokens: int


Text: TypeAlias = tuple[Piece, ...]


def blocks(text: Text) -> tuple[int, ...]:
    """Return what a router and an engine are given for a text: whole blocks, so that each piece is rounded up."""
    starts = ((piece.number * MOST_BLOCKS, math.ceil(piece.num_tokens / BLOCK)) for piece in text)
    return tuple(chain.from_iterable(range(start, start + num) for start, num in starts))


@dataclass(frozen=True, slots=True)
class Query:
    arrival_s: float
    texts: tuple[tuple[float, Text], ...]
    """(seconds after its arrival, text); the last one is complete."""
    num_output: int
    session: str | None = None

    @property
    def num_blocks(self) -> int:
        """Of its complete prompt."""
        return sum(math.ceil(piece.num_tokens / BLOCK) for piece in self.texts[-1][1])


class Pieces:
    """Numbers of pieces, in the order in which they are first named."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def __call__(self, name: object, num_tokens: int) -> Piece:
        return Piece(self._numbers.setdefault(name, len(self._numbers) + 1), num_tokens)


def poisson(rate: float, num: int, rng: random.Random) -> Iterator[float]:
    return accumulate(rng.expovariate(rate) for _ in range(num))


def lognormal(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return round(min(max(rng.lognormvariate(math.log(median), sigma), least), most))


def zipf(rng: random.Random, num: int, exponent: float) -> Callable[[], int]:
    """Draws from 0 to num - 1, the first most often."""
    sums = list(accumulate((n + 1) ** -exponent for n in range(num)))
    return lambda: rng.choices(range(num), cum_weights=sums)[0]


# ----------------------------------------------------------------------------------------------------------- traces


def mooncake(rate: float, num: int, seed: int, path: Path | None = None) -> list[Query]:
    """Conversations, in blocks of 512 tokens. Without a file they are generated in the likeness of Mooncake's.

    A file's arrivals are sped up or slowed down to `rate`; another seed takes other rows of it.
    """
    if path is None:
        return _like_mooncake(rate, num, random.Random(f"mooncake {seed}"))
    with path.open() as lines:
        rows = [json.loads(line) for line in islice(lines, (seed - 1) * num, seed * num)]
    first = rows[0]["timestamp"]
    stretch = len(rows) / rate / max(rows[-1]["timestamp"] - first, 1)
    named = Pieces()
    queries: list[Query] = []
    for row in rows:
        # The last block is not full, and is nobody else's.
        whole = [named(number, 512) for number in row["hash_ids"][: row["input_length"] // 512]]
        rest = row["input_length"] - 512 * len(whole)
        text = (*whole, named(f"rest {len(queries)}", rest)) if rest > 0 else tuple(whole)
        queries.append(Query((row["timestamp"] - first) * stretch, ((0.0, text),), max(row["output_length"], 2)))
    return queries


def _like_mooncake(rate: float, num: int, rng: random.Random) -> list[Query]:
    """Three fifths begin a conversation; the others go on with one of the last ones. All share one block."""
    named = Pieces()
    open_ones: list[list[Piece]] = []
    queries: list[Query] = []
    for arrival_s in poisson(rate, num, rng):
        if open_ones and rng.random() < 0.39:
            text = open_ones.pop(max(len(open_ones) - 1 - int(rng.expovariate(1 / 60)), 0))
        else:
            text = [named("system", 512)]
        for _ in range(math.ceil(lognormal(rng, 5_000, 1.1, 200, 60_000) / 512)):
            text = [*text, named(("block", rng.random()), 512)]
        query = Query(arrival_s, ((0.0, (*text, named(rng.random(), QUESTION))),), lognormal(rng, 300, 0.9, 2, 2_000))
        queries.append(query)
        if sum(piece.num_tokens for piece in text) < 60_000:
            open_ones.append(text)
        del open_ones[:-400]
    return queries


def azure(rate: float, num: int, seed: int, path: Path | None = None) -> list[Query]:
    """Chats of which only the lengths are known, so that they share nothing but a system prompt.

    Without a file they are generated in the likeness of Azure's. A file's arrivals are sped up or slowed down.
    """
    rng, named = random.Random(f"azure {seed}"), Pieces()
    if path is None:
        rows = [
            (at_s, lognormal(rng, 1_000, 0.9, 10, 8_000), lognormal(rng, 130, 0.9, 2, 1_000))
            for at_s in poisson(rate, num, rng)
        ]
    else:
        with path.open(newline="") as lines:
            read = list(islice(csv.DictReader(lines), (seed - 1) * num, seed * num))
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in read]
        stretch = len(read) / rate / (times[-1] - times[0])
        rows = [
            ((at - times[0]) * stretch, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for at, row in zip(times, read, strict=True)
        ]
    system = named("system", 128)
    return [
        Query(at_s, ((0.0, (system, named(n, max(length, 1)))),), max(num_output, 2))
        for n, (at_s, length, num_output) in enumerate(rows)
    ]


# ------------------------------------------------------------------------------------------------------- generators


def conversations(rate: float, num: int, seed: int) -> list[Query]:
    """Five turns on average, one every 20 s or so, each with all before it. They name their session.

    The first begin at zero, so that the rate is reached after a minute or so.
    """
    rng, named = random.Random(f"conversations {seed}"), Pieces()
    queries: list[Query] = []
    for n, start_s in enumerate(poisson(rate / 5, num, rng)):
        at_s, text = start_s, [named("system", 1_024)]
        while True:
            text = [*text, named(rng.random(), lognormal(rng, 250, 0.8, 32, 3_000))]
            num_output = lognormal(rng, 200, 0.6, 16, 800)
            queries.append(Query(at_s, ((0.0, tuple(text)),), num_output, f"session {n}"))
            if rng.random() < 0.2:
                break
            text = [*text, named(rng.random(), num_output)]
            at_s += 5 + rng.expovariate(1 / 15)
    return sorted(queries, key=lambda query: query.arrival_s)[:num]


def trees(rate: float, num: int, seed: int) -> list[Query]:
    """Prompts that form a tree as in the theory of k-LPM: users of four prompts each, in a random order."""
    rng, named = random.Random(f"trees {seed}"), Pieces()
    users = [n // 4 for n in range(num)]
    window = 200  # a user's prompts come while it is open
    order = sorted(range(num), key=lambda n: n + rng.random() * window)
    texts = [(named(("user", users[n]), 6_656), named(("doc", n), 1_536)) for n in order]
    return [Query(at_s, ((0.0, text),), 32) for at_s, text in zip(poisson(rate, num, rng), texts, strict=True)]


def rag(rate: float, num: int, seed: int, hot: tuple[float, float, float] = (1.0, 1.0, 0.0)) -> list[Query]:
    """Questions whose documents stream in, a retrieval of a second or so.

    Topics and documents are popular by Zipf's law. Questions on a topic find nearly the same documents in nearly the
    same order. From `hot[0]` to `hot[1]`, shares of the run, one topic that was never asked before takes `hot[2]` of
    all questions.
    """
    rng, named = random.Random(f"rag {seed}"), Pieces()
    topic_of, document_of, size_of = zipf(rng, 2_000, 0.9), zipf(rng, 20_000, 0.6), dict[int, int]()
    found_on: dict[int, list[int]] = {}
    system = named("system", 512)
    queries: list[Query] = []
    for n, arrival_s in enumerate(poisson(rate, num, rng)):
        is_hot = hot[0] <= n / num < hot[1] and rng.random() < hot[2]
        topic = -1 if is_hot else topic_of()
        documents = list(found_on.setdefault(topic, [document_of() for _ in range(6)]))
        if rng.random() < 0.3:
            documents[rng.randrange(6)] = document_of()
        question = named(("question", n), QUESTION)
        at_s, text, texts = 0.1, tuple[Piece, ...]((system,)), []
        for document in dict.fromkeys(documents):
            at_s += rng.expovariate(1 / 0.15)
            num_tokens = size_of.setdefault(document, lognormal(rng, 900, 0.6, 100, 4_000))
            text = (*text, named(("document", document), num_tokens))
            texts.append((at_s, (*text, question)))
        queries.append(Query(arrival_s, tuple(texts), lognormal(rng, 120, 0.6, 16, 500)))
    return queries


def hot_document(rate: float, num: int, seed: int) -> list[Query]:
    return rag(rate, num, seed, hot=(0.4, 0.7, 0.5))


LOADS: Mapping[str, Callable[..., list[Query]]] = {
    "mooncake": mooncake,
    "azure": azure,
    "conversations": conversations,
    "trees": trees,
    "rag": rag,
    "hot document": hot_document,
}
