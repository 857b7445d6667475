"""Passages narrowed to the sentences that a reranker likes best."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from streamrag.core import Chunk, SourceEvent, Update
from streamrag.sources.index.index_folder import with_title
from streamrag.sources.search.refinement import Failures

SENTENCE_END = re.compile(r"(?<=[.!?…])\s+(?=[^\W\d_a-z]|[a-z]\w*[_=(.]\w)|(?<=[。！？])")
"""Before a capital, a letter of a script that has none, or a name as code has them."""

ITEMS = ("- ", "* ", "• ")
"""Beginnings of items of lists."""

MAX_SENTENCES = 64
"""Sentences of one passage; what comes behind them stays one."""

MIN_WORDS_SHARE = 0.5
"""Letters, digits and spaces among a sentence's characters; a line with fewer is a drawing."""


def sentences(text: str) -> list[str]:
    """Return the sentences, items of lists and other lines of a text, in order.

    >>> sentences("It ends. So does this, e.g. here.\\n- Item: one.")
    ['It ends.', 'So does this, e.g. here.', 'Item: one.']
    """
    lines = (line.strip() for line in text.split("\n"))
    whole = (line[2:].lstrip() if line.startswith(ITEMS) else line for line in lines)
    found = [part for line in whole for part in SENTENCE_END.split(line) if part]
    if len(found) > MAX_SENTENCES:
        found[MAX_SENTENCES - 1 :] = [" ".join(found[MAX_SENTENCES - 1 :])]
    return found


class BestSentences:
    """The best sentences of some passages, for one query. Each passage is scored once, when it first comes up.

        a passage's chunk  ──sentences──▶  chunks of the same place, each with one sentence as its text

    A sentence is scored behind its document's title, as passages are: alone it may not say what it is about.
    """

    def __init__(self, num_sentences: int, score: Callable[[list[str]], Awaitable[Sequence[float]]]) -> None:
        self._num = num_sentences
        self._score = score
        self._scored: dict[Chunk, list[tuple[float, Chunk]]] = {}

    async def narrow(self, passages: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Return the best sentences of all `passages`, best first; what a document says twice is there once.

        Of equals the one of the earlier passage goes first.
        """
        for passage in passages:
            if passage not in self._scored:
                texts = [text for text in sentences(passage.text) if _has_words(text)]
                scores = await self._score([with_title(passage.title, text) for text in texts]) if texts else []
                chunks = (replace(passage, text=text) for text in texts)
                self._scored[passage] = list(zip(scores, chunks, strict=True))
        every = [scored for passage in passages for scored in self._scored[passage]]
        best: dict[tuple[str, str], Chunk] = {}
        for _, chunk in sorted(every, key=lambda scored: -scored[0]):
            best.setdefault((chunk.uri, chunk.text), chunk)
        return tuple(best.values())[: self._num]

    async def narrow_events(
        self, events: AsyncGenerator[SourceEvent, None], failures: Failures
    ) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events, updates with sentences; with whole passages from the first that cannot be scored."""
        is_able = True
        sent: tuple[Chunk, ...] = ()
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Update):
                    chunks = event.chunks
                    if is_able:
                        is_able = False
                        with failures.record("finding the best sentences"):
                            chunks = await self.narrow(event.chunks)
                            is_able = True
                    if chunks == sent:
                        continue
                    sent, event = chunks, replace(event, chunks=chunks)
                yield event


def _has_words(text: str) -> bool:
    return sum(c.isalnum() or c == " " for c in text) >= MIN_WORDS_SHARE * len(text)
