"""The two ways in which a context follows its retriever."""

from collections.abc import Iterable
from typing import Literal, Self

from streamrag.core import Append, Chunk, Update
from streamrag.support.validation import validated


class Context(tuple[Chunk, ...]):
    """The chunks of a context, in which one is found in constant time."""

    _places: dict[Chunk, int]
    """The place of each chunk; shared with the contexts that this one has grown from, which have only the first
    ones."""

    def __new__(cls, chunks: Iterable[Chunk] = ()) -> Self:
        self = super().__new__(cls, chunks)
        self._places = {chunk: place for place, chunk in enumerate(self)}
        return self

    def __contains__(self, chunk: object) -> bool:
        return self._places.get(chunk, len(self)) < len(self)  # type: ignore[call-overload, no-any-return]

    def become(self, chunks: tuple[Chunk, ...]) -> "Context":
        """Return the context that a mode made of this one."""
        if chunks is self:
            return self
        if not chunks or chunks[:-1] != self or len(self._places) != len(self):
            return Context(chunks)
        grown = tuple.__new__(Context, chunks)
        grown._places = self._places
        grown._places.setdefault(chunks[-1], len(self))
        return grown


class UpdateMode:
    """The context is what the retriever says it is now: an `Update` replaces it, an `Append` extends it.

    The default, and right for every source. A crawl never invalidates anything; a refining search keeps the tokens
    before the first passage that changed.

    order: "rank" is the retriever's order, exactly. "stable" keeps the passages that an `Update` has again in the order
        in which they stand, and puts newcomers behind them: fewer tokens are invalidated, and the final order depends
        on what came before. The answer's `is_in_rank_order` then tells whether it differs, and its citations' `rank`
        how. Where a token budget has no room for all passages, newcomers are left out first, whatever their rank.

    :raises ConfigurationError: another order.
    """

    @validated
    def __init__(self, order: Literal["rank", "stable"] = "rank") -> None:
        self.order = order

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """The new context, in prompt order; a chunk is never in it twice."""
        if isinstance(event, Append):
            return chunks if event.chunk in chunks else (*chunks, event.chunk)
        ranked = tuple(dict.fromkeys(event.chunks))
        return ranked if self.order == "rank" else _in_old_order(chunks, ranked)


class AppendMode:
    """The context only grows: an `Update` adds the chunks that it brings for the first time, in their order.

    A passage that comes again with another score, as from a reranker, is the one that is there. Nothing that was
    prefilled is ever invalidated. The price, with a refining search: passages that fell out of its final result stay in
    the prompt, and the order is that of discovery rather than rank.
    """

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """The new context, in prompt order; a chunk is never in it twice."""
        came = dict.fromkeys(event.chunks if isinstance(event, Update) else (event.chunk,))
        new = [chunk for chunk in came if chunk not in chunks]
        if new and isinstance(event, Update):
            first = {_passage(chunk): chunk for chunk in (*reversed(new), *chunks)}
            new = [chunk for chunk in new if first[_passage(chunk)] is chunk]
        return (*chunks, *new) if new else chunks


def _in_old_order(chunks: tuple[Chunk, ...], ranked: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Return `ranked`, scores and all, with the chunks that are in `chunks` first, in their order there."""
    place_of: dict[tuple[str, int, str], int] = {}
    for place, chunk in enumerate(chunks):
        place_of.setdefault(_passage(chunk), place)
    return tuple(sorted(ranked, key=lambda chunk: place_of.get(_passage(chunk), len(chunks))))


def _passage(chunk: Chunk) -> tuple[str, int, str]:
    return chunk.uri, chunk.passage, chunk.text
