"""The modes in which a context follows its retriever."""

from collections.abc import Container, Iterable
from typing import Literal, Self, TypeAlias

from streamrag.core import Append, Chunk, Update
from streamrag.support.validation import validated

PassageKey: TypeAlias = tuple[str, int, str]


class Context(tuple[Chunk, ...]):
    """A tuple of chunks with a membership test in constant time, of a chunk or of its `passage_key`."""

    _places: dict[Chunk | PassageKey, int]
    """The place of each chunk and of its key. Shared with the shorter contexts from which this one has grown."""

    def __new__(cls, chunks: Iterable[Chunk] = ()) -> Self:
        self = super().__new__(cls, chunks)
        self._places = {key: place for place, chunk in enumerate(self) for key in (chunk, passage_key(chunk))}
        return self

    def __contains__(self, key: object) -> bool:
        return self._places.get(key, len(self)) < len(self)  # type: ignore[call-overload, no-any-return]

    def with_chunks(self, chunks: tuple[Chunk, ...]) -> "Context":
        """Return the context of these chunks: `self` if unchanged; if one was appended, without hashing the others."""
        if chunks is self:
            return self
        if not chunks or chunks[:-1] != self or len(self._places) != 2 * len(self):
            return Context(chunks)
        grown = tuple.__new__(Context, chunks)
        grown._places = self._places
        for key in (chunks[-1], passage_key(chunks[-1])):
            grown._places.setdefault(key, len(self))
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

    A passage that comes again with another title or score, as from a reranker, is not new. Prefilled tokens are never
    invalidated. The price with a refining search: passages that are not in its final result stay in the prompt, in the
    order of discovery instead of rank.
    """

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """Return `chunks`, and behind them the event's first chunk of each new `passage_key`."""
        known: Container[object] = chunks if isinstance(chunks, Context) else Context(chunks)
        first: dict[PassageKey, Chunk] = {}
        for chunk in event.chunks if isinstance(event, Update) else (event.chunk,):
            first.setdefault(passage_key(chunk), chunk)
        new = [chunk for key, chunk in first.items() if key not in known]
        return (*chunks, *new) if new else chunks


def _in_old_order(chunks: tuple[Chunk, ...], ranked: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Return `ranked` in another order: first passages that are in `chunks`, ordered as there, then the others."""
    place_of: dict[PassageKey, int] = {}
    for place, chunk in enumerate(chunks):
        place_of.setdefault(passage_key(chunk), place)
    return tuple(sorted(ranked, key=lambda chunk: place_of.get(passage_key(chunk), len(chunks))))


def passage_key(chunk: Chunk) -> PassageKey:
    """Return what identifies a passage, whatever its title and score."""
    return chunk.uri, chunk.passage, chunk.text
