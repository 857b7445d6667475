"""The two ways in which a context follows its retriever."""

from streamrag.core import Append, Chunk, Update

__all__ = ["AppendMode", "UpdateMode"]


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
        new = event.chunks if isinstance(event, Update) else (event.chunk,)
        return tuple(dict.fromkeys((*chunks, *new)))
