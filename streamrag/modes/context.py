"""The modes in which a context follows its retriever."""

from collections.abc import Iterable
from typing import Literal, Self

from streamrag.core import Append, Chunk, Update
from streamrag.support.validation import validated


class Context(tuple[Chunk, ...]):
    """A tuple of chunks with a membership test in constant time."""

    _places: dict[Chunk, int]
    """The place of each chunk. Shared with the shorter contexts from which this one has grown."""

    def __new__(cls, chunks: Iterable[Chunk] = ()) -> Self:
        self = super().__new__(cls, chunks)
        self._places = {chunk: place for place, chunk in enumerate(self)}
        return self

    def __contains__(self, chunk: object) -> bool:
        return self._places.get(chunk, len(self)) < len(self)  # type: ignore[call-overload, no-any-return]

    def with_chunks(self, chunks: tuple[Chunk, ...]) -> "Context":
        """Return the context of these chunks: `self` if unchanged; if one was appended, without hashing the others."""
        if chunks is self:
            return self
        if not chunks or chunks[:-1] != self or len(self._places) != len(self):
            return Context(chunks)
        grown = tuple.__new__(Context, chunks)
        grown._places = self._places
        grown._places.setdefault(chunks[-1], len(self))
        return grown


class UpdateMode:
    """The context is the retriever's latest result: an `Update` replaces it, an `Append` extends it.

    The default, and right for every source. A crawl never invalidates tokens; a refining search keeps the tokens before
    the first passage that changed.

    order: "rank" is exactly the retriever's order. "stable" keeps the passages that an `Update` repeats in their
        present order, and puts new ones behind them: fewer tokens are invalidated, but the final order depends on
        earlier updates. The answer's `is_in_rank_order` then says whether it differs, and its citations' `rank` how.
        If the token budget has no room for all passages, new ones are left out first, whatever their rank.

    :raises ConfigurationError: another order.
    """

    @validated
    def __init__(self, order: Literal["rank", "stable"] = "rank") -> None:
        self.order = order

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """Return `chunks` and an appended chunk that is new, or an update's distinct chunks, sorted as `order` says."""
        if isinstance(event, Append):
            return chunks if event.chunk in chunks else (*chunks, event.chunk)
        ranked = tuple(dict.fromkeys(event.chunks))
        return ranked if self.order == "rank" else _in_old_order(chunks, ranked)


class AppendMode:
    """The context only grows: an `Update` adds its new chunks, in their order.

    A passage that comes again with another score, as from a reranker, is not new. Prefilled tokens are never
    invalidated. The price with a refining search: passages that are not in its final result stay in the prompt, in the
    order of discovery instead of rank.
    """

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """Return `chunks` and the event's new ones behind them; those of an update need a new `passage_key`, too."""
        unique = dict.fromkeys(event.chunks if isinstance(event, Update) else (event.chunk,))
        new = [chunk for chunk in unique if chunk not in chunks]
        if new and isinstance(event, Update):
            first = {passage_key(chunk): chunk for chunk in (*reversed(new), *chunks)}
            new = [chunk for chunk in new if first[passage_key(chunk)] is chunk]
        return (*chunks, *new) if new else chunks


def _in_old_order(chunks: tuple[Chunk, ...], ranked: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Return `ranked` in another order: first passages that are in `chunks`, ordered as there, then the others."""
    place_of: dict[tuple[str, int, str], int] = {}
    for place, chunk in enumerate(chunks):
        place_of.setdefault(passage_key(chunk), place)
    return tuple(sorted(ranked, key=lambda chunk: place_of.get(passage_key(chunk), len(chunks))))


def passage_key(chunk: Chunk) -> tuple[str, int, str]:
    """Return what identifies a passage, whatever its title and score."""
    return chunk.uri, chunk.passage, chunk.text
