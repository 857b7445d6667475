"""A source of text that is still being written, so that the next model's prompt is prefilled meanwhile.

    pieces   "The pri" │ "nter jams" │ Rewrite(4, "scanner jams")
    context  The pri   │ The printer jams │ The scanner jams

The context is the text so far, in passages. Each `Update` replaces it, and the engine keeps the KV up to the first
token that changed. So the complete prompt is that of the whole text, whatever the pieces were.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from streamrag.core import Chunk, CutShort, SourceEvent, Update
from streamrag.core.retrieval import closing
from streamrag.core.text import is_blank
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.sources.generators import GeneratorSource
from streamrag.sources.passage_reader import describe_result
from streamrag.sources.user_functions import name_of
from streamrag.support.messages import message_of, plain_text
from streamrag.support.validation import Count, CountOrZero, Text, validated


@validated
@dataclass(frozen=True, slots=True)
class Rewrite:
    """A piece of `from_tokens` that replaces the end of the text so far.

    :raises ConfigurationError: `start` is no whole number from 0, or `text` no str.
    """

    start: CountOrZero
    """Number of leading characters that stay."""
    text: Text
    """Text behind them; "" to only remove what stood there."""


@validated
def from_tokens(
    write: Callable[[str], AsyncIterable[Any] | Iterable[Any]] | AsyncIterable[Any],
    *,
    name: Text = "",
    title: Text = "",
    min_chars: Count = 256,
    passage_chars: Count = 2_000,
    max_chars: Count = 400_000,
) -> "TextSource":
    """Make a source of text that is still being written: by a model, an agent or a slow tool.

    `write(query)` yields pieces, each a `str`, a `Rewrite`, or an object with a `text`, such as an `AnswerChunk` or
    LangChain's `AIMessageChunk`. The context is the text so far: the first piece is sent at once, later ones when there
    are `min_chars` new characters, and the rest at the end, also before an error of `write` is raised. A function that
    is not async runs as in `from_passages`.

    write: the function, or an async iterable, which only one query can read; the next one gets a SourceError.
    name: the source's name, and the uri of its passages; by default that of `write`.
    title: title of the passages.
    min_chars: characters that are new or rewritten before the next update.
    passage_chars: characters of a passage before it ends at the next blank line. Passages that do not fit the token
        budget are left out, each as a whole.
    max_chars: most characters that are read, rewritten ones included. A piece that exceeds them is cut off, or not
        applied if it replaces text; then `write` is closed, and the retrieval is reported as `CutShort`.

    :raises ConfigurationError: `write` is neither a function nor an async iterable, or another value cannot work.
    """
    name = name or name_of(write)  # type: ignore[arg-type]
    write = _read_once(write) if isinstance(write, AsyncIterable) else write
    writer = GeneratorSource(write, name, lambda reader, piece: piece)
    return TextSource(name, writer, title, min_chars, passage_chars, max_chars)


@dataclass(frozen=True)
class TextSource:
    """The source that `from_tokens` returns, with its options and the source whose events are the pieces."""

    name: str
    writer: GeneratorSource
    title: str
    min_chars: int
    passage_chars: int
    max_chars: int

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield updates with the text so far, and `CutShort` if it is too long. Other errors of the writer propagate.

        :raises SourceError: a piece is no text, rewrites what is not there, or an iterator was read before; or from a
            StreamRagError of the writer that is no ConfigurationError, such as the BackendError of the query it reads.
        """
        text = sent = ""
        is_shown = False  # whether a piece was more than white space, as models often write first
        num_same = num_read = 0  # leading characters that `text` and `sent` share; characters of all pieces
        async with aclosing(self.writer.stream(query)) as pieces:
            try:
                async for piece in pieces:
                    rewrite = self._rewrite(piece, len(text))
                    num_left, num_read = self.max_chars - num_read, num_read + len(rewrite.text)
                    if num_read > self.max_chars:
                        text += rewrite.text[:num_left] if rewrite.start == len(text) else ""
                        break
                    text, num_same = text[: rewrite.start] + rewrite.text, min(num_same, rewrite.start)
                    is_shown = is_shown or not is_blank(rewrite.text)
                    if text and is_shown and (not sent or len(text) - num_same >= self.min_chars):
                        yield self._update(text)
                        sent, num_same = text, len(text)
            except Exception as error:  # what was written before it failed still counts
                if text != sent:
                    yield self._update(text)
                if not isinstance(error, StreamRagError) or isinstance(error, SourceError | ConfigurationError):
                    raise
                raise SourceError(f"{self.name} failed: {type(error).__name__}: {message_of(error)}") from error
        if text != sent:
            yield self._update(text)
        if num_read > self.max_chars:
            yield CutShort(f"{self.name} wrote more than {self.max_chars:,} characters, and was not read on")

    def _rewrite(self, piece: object, num_chars: int) -> Rewrite:
        """Return what a piece does to a text of `num_chars`; raise SourceError if it is invalid."""
        if isinstance(piece, Rewrite):
            if piece.start > num_chars:
                raise SourceError(f"{self.name} rewrites from character {piece.start:,} on, and wrote {num_chars:,}")
            return piece
        text = piece if isinstance(piece, str) else getattr(piece, "text", None)
        if not isinstance(text, str):
            raise SourceError(f"{self.name} wrote {describe_result(piece)}, not a str, Rewrite or object with a text")
        return Rewrite(num_chars, plain_text(text))

    def _update(self, text: str) -> Update:
        """Return the update to the text's passages, without the newlines that end them. More text changes the last."""
        chunks, begin = list[Chunk](), 0
        while begin < len(text):
            end = text.find("\n\n", begin + self.passage_chars)
            end = len(text) if end < 0 else end
            chunks.append(Chunk(text[begin:end], self.name, self.title, len(chunks)))
            begin = end
            while text.startswith("\n", begin):
                begin += 1
        return Update(tuple(chunks))


def _read_once(pieces: AsyncIterable[Any]) -> Callable[[str], AsyncIterator[Any]]:
    """Return a function that yields the pieces and closes them; at the second call it raises SourceError."""
    unread = [pieces]

    async def read(query: str) -> AsyncIterator[Any]:
        if not unread:
            raise SourceError("a query has read this text already: give from_tokens a function that writes it anew")
        async with closing(aiter(unread.pop())) as iterator:
            async for piece in iterator:
                yield piece

    return read
