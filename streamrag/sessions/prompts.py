"""The prompts of a session, as token ids. Functions that are not async block, and are for one thread at a time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from string import Formatter
from typing import Any

from streamrag.core import Chunk, ModelInfo
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import PromptTooLongError
from streamrag.modes import PromptAssembler, PromptTemplate
from streamrag.sessions.window import Numbered, Piece, num_characters

MAX_CHARACTERS = 50_000
"""Characters that are tokenised at once, in some ten milliseconds."""

PASSAGE = {"number": 1, "title": "", "uri": "", "text": ""}
"""The names that a template's `passage` may have."""

SESSION_TEMPLATE = PromptTemplate(
    system="Answer the question from the data below, in a few words. The newest data stand last.",
    before_context="Data:\n\n",
    passage="{text}\n",
    no_context="(no data yet)\n",
    after_context="\nQuestion: {question}",
)


class SessionPrompts:
    """The three regions of a session's prompts: frozen head, data, and a tail for each question.

    :raises PromptTooLongError: the head alone does not fit the model's length.
    """

    def __init__(self, model: ModelInfo, template: PromptTemplate) -> None:
        self._model = model
        self._template = template
        self.tokenizer = model.tokenizer
        self._assembler = PromptAssembler(
            model.tokenizer, template, "?", max_model_len=model.max_model_len, max_tokens=1
        )
        self.head = self._assembler.head
        bare = template.passage.format(**PASSAGE)
        self._hidden: dict[str, Any] = {
            name: "" for name in ("uri", "title") if template.passage.format(**{**PASSAGE, name: "@"}) == bare
        }
        end = ""
        for literal, name, *_ in Formatter().parse(template.passage):
            end = end + literal if name is None else ""
        self._end = end
        self.passage_end = tuple(model.tokenizer.encode(end)) if end else ()
        """Tokens that each chunk ends with, behind all that is its own: its line break."""
        self._no_data = tuple(model.tokenizer.encode(template.no_context))

    @property
    def room(self) -> int:
        """Tokens that the head leaves in the model's length."""
        return self._model.max_model_len - len(self.head)

    def with_system(self, system: str) -> "SessionPrompts":
        """Return the same prompts with another system text. Blocking.

        :raises PromptTooLongError: it alone does not fit the model's length.
        """
        return SessionPrompts(self._model, replace(self._template, system=system))

    def check_window(self, window_tokens: int) -> None:
        """Check that there is room for a question beside the window.

        :raises PromptTooLongError: there is none.
        """
        if window_tokens >= self.room:
            raise PromptTooLongError(
                f"window_tokens={window_tokens} and {len(self.head)} tokens of system text leave no room for a "
                f"question: the model's length is {self._model.max_model_len}"
            )

    def without_hidden(self, chunk: Chunk) -> Chunk:
        """Return what the prompt shows of a chunk: no window would ever bound the rest."""
        return replace(chunk, **self._hidden)

    def pieces(self, numbered: Sequence[Numbered]) -> list[Piece]:
        """Return chunks as they stand in the prompt."""
        return [Piece(each.number, tuple(self._assembler.encode_passage(each.number, each.chunk))) for each in numbered]

    async def pieces_in_background(self, numbered: Sequence[Numbered]) -> list[Piece]:
        """Return the same from threads, which give the tokenizer to others every `MAX_CHARACTERS` characters."""
        pieces: list[Piece] = []
        some: list[Numbered] = []
        size = 0
        for i, each in enumerate(numbered, 1):
            some.append(each)
            size += num_characters(each.chunk)
            if size >= MAX_CHARACTERS or i == len(numbered):
                pieces += await in_thread(self.tokenizer, partial(self.pieces, some), is_background=True)
                some, size = [], 0
        return pieces

    def texts_of(self, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """Return the number and text of each piece, without what each chunk ends with."""
        return [(each.number, self.tokenizer.decode(each.token_ids).removesuffix(self._end)) for each in pieces]

    def complete(self, data: tuple[int, ...], question: str) -> tuple[int, ...]:
        """Return the prompt for a question.

        data: a session's head and data, or its head alone.

        :raises PromptTooLongError: the question is too long, by itself or beside the data.
        """
        tail = self._assembler.tail_of(question)
        token_ids = data + (self._no_data if data == self.head else ()) + tail
        if len(token_ids) >= self._model.max_model_len:
            raise PromptTooLongError(
                f"the question takes {len(tail)} tokens, and {len(data)} of system text and data leave no room for an "
                f"answer beside it in the model's length of {self._model.max_model_len}: lower window_tokens"
            )
        return token_ids
