"""Select the sentences of passages that a reranker scores best."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from streamrag.core import Chunk, SourceEvent, Update
from streamrag.sources.index.index_folder import with_title
from streamrag.sources.search.refinement import Failures

SENTENCE_END = re.compile(r"(?<=[.!?…])\s+(?=[^\W\d_a-z]|[a-z]\w*[_=(.]\w)|(?<=[。！？])")
"""Before a capital, a letter of a script without case, or an identifier of code."""
ITEMS = ("- ", "* ", "• ")
"""Markers of list items."""
MAX_SENTENCES = 64  # most sentences of one passage; the last one holds the rest
MIN_WORDS_SHARE = 0.5  # least share of letters, digits and spaces in a sentence; a line with fewer is a drawing


def split_sentences(text: str) -> list[str]:
    """Split a text into its sentences, list items and other lines, `MAX_SENTENCES` at most; the last has the rest.

    >>> split_sentences("It ends. So does this, e.g. here.\\n- Item: one.")
    ['It ends.', 'So does this, e.g. here.', 'Item: one.']
    """
    lines = (line.strip() for line in text.split("\n"))
    items = (line[2:].lstrip() if line.startswith(ITEMS) else line for line in lines)
    parts = [part for item in items for part in SENTENCE_END.split(item) if part]
    if len(parts) > MAX_SENTENCES:
        parts[MAX_SENTENCES - 1 :] = [" ".join(parts[MAX_SENTENCES - 1 :])]
    return parts


class BestSentences:
    """A selection of the best sentences of passages, for one query. Each passage is scored once.

        a passage's chunk  ──sentences──▶  chunks of the same uri and passage, each with one sentence as its text

    A sentence is scored behind its document's title, because alone it may not say what it is about.
    """

    def __init__(self, num_sentences: int, score: Callable[[list[str]], Awaitable[Sequence[float]]]) -> None:
        self._num = num_sentences
        self._score = score
        self._scored: dict[Chunk, list[tuple[float, Chunk]]] = {}

    async def select(self, passages: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Return the `num_sentences` best sentences of all `passages`, without repetitions within a document.

        Of equal scores, the sentence of the earlier passage comes first. `passages` are returned whole if they have no
        sentence. They are, too, if the best sentence is not in the first passage, because the scorer then contradicts
        the ranking: see docs/hybrid-search.md.
        """
        for passage in passages:
            if passage not in self._scored:
                texts = [text for text in split_sentences(passage.text) if _has_words(text)]
                scores = await self._score([with_title(passage.title, text) for text in texts]) if texts else []
                chunks = (replace(passage, text=text) for text in texts)
                self._scored[passage] = list(zip(scores, chunks, strict=True))
        candidates = [scored for passage in passages for scored in self._scored[passage]]
        candidates.sort(key=lambda scored: -scored[0])
        if not candidates or candidates[0] not in self._scored[passages[0]]:
            return tuple(passages)
        best: dict[tuple[str, str], Chunk] = {}
        for _, chunk in candidates:
            best.setdefault((chunk.uri, chunk.text), chunk)
        return tuple(best.values())[: self._num]

    async def select_in_events(
        self, events: AsyncGenerator[SourceEvent, None], failures: Failures
    ) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events, updates with sentences; omit unchanged updates.

        Once scoring fails, which is recorded in `failures`, updates have whole passages.
        """
        can_score = True
        sent: tuple[Chunk, ...] = ()
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Update):
                    chunks = event.chunks
                    if can_score:
                        can_score = False
                        with failures.record("finding the best sentences"):
                            chunks = await self.select(event.chunks)
                            can_score = True
                    if chunks == sent:
                        continue
                    sent, event = chunks, replace(event, chunks=chunks)
                yield event


def _has_words(text: str) -> bool:
    """Whether at least half of the characters are letters, digits or spaces."""
    return sum(c.isalnum() or c == " " for c in text) >= MIN_WORDS_SHARE * len(text)
