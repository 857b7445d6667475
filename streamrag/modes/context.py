"""The two ways in which a context follows its retriever."""

from collections.abc import Iterable
from typing import Self

from streamrag.core import Append, Chunk, Update

__all__ = ["AppendMode", "Context", "UpdateMode"]


class Context(tuple[Chunk, ...]):
    """The chunks of a context, among which one is found in the same time however many they are."""

    _held: set[Chunk]

    def __new__(cls, chunks: Iterable[Chunk] = ()) -> Self:
        self = super().__new__(cls, chunks)
        self._held = set(self)
        return self

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._held

    def become(self, chunks: tuple[Chunk, ...]) -> "Context":
        """What a mode made of this one, which is not used any more: the two share what they know."""
        if chunks is self:
            return self
        if not chunks or chunks[:-1] != self:
            return Context(chunks)
        grown = tuple.__new__(Context, chunks)
        grown._held = self._held
        grown._held.add(chunks[-1])
        return grown


class UpdateMode:
    """The context is what the retriever says it is now: an `Update` replaces it, an `Append` extends it.

    The default, and right for every source. A crawl never invalidates anything; a refining search keeps the tokens
    before the first passage that changed.
    """

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """The new context, in prompt order; a chunk is never in it twice."""
        if isinstance(event, Update):
            return tuple(dict.fromkeys(event.chunks))
        return chunks if event.chunk in chunks else (*chunks, event.chunk)


class AppendMode:
    """The context only grows: an `Update` adds the chunks that it brings for the first time, in their order.

    Nothing that was prefilled is ever invalidated. The price, with a refining search: passages that fell out of its
    final result stay in the prompt, and the order is that of discovery rather than rank.
    """

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """The new context, in prompt order; a chunk is never in it twice."""
        came = dict.fromkeys(event.chunks if isinstance(event, Update) else (event.chunk,))
        new = [chunk for chunk in came if chunk not in chunks]
        return (*chunks, *new) if new else chunks
