"""What a session's prompts are made of, as token ids. What does not await is blocking, and for one thread at a time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from string import Formatter
from typing import Any

from streamrag.core import Chunk, ModelInfo
from streamrag.errors import ConfigurationError, PromptTooLongError
from streamrag.modes import PromptAssembler, PromptTemplate
from streamrag.sessions.buffer import Numbered, num_characters
from streamrag.sessions.window import Piece
from streamrag.support.messages import plain_text, short
from streamrag.tokenizing import in_thread

MAX_CHARACTERS = 50_000
"""Of chunks that are tokenised at once: some ten milliseconds."""

PASSAGE = {"number": 1, "title": "", "uri": "", "text": ""}
"""What a template's `passage` may name."""

SESSION_TEMPLATE = PromptTemplate(
    system="Answer the question from the data below, in a few words. The newest data stand last.",
    before_context="Data:\n\n",
    passage="{text}\n",
    no_context="(no data yet)\n",
    after_context="\nQuestion: {question}",
)


class SessionPrompts:
    """The three regions of one session: frozen head, data, and a tail for each question.

    Raises PromptTooLongError if the head alone does not fit the model's length.
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
        """What each chunk ends with, behind all that is its own: its line break."""
        self._no_data = tuple(model.tokenizer.encode(template.no_context))

    @property
    def room(self) -> int:
        """Tokens that the head leaves in the model's length."""
        return self._model.max_model_len - len(self.head)

    def with_system(self, system: str) -> "SessionPrompts":
        """The same with another system text. Blocking.

        :raises PromptTooLongError: it alone does not fit the model's length.
        """
        return SessionPrompts(self._model, replace(self._template, system=system))

    def check_window(self, window_tokens: int) -> None:
        """Whether there is room for a question beside it.

        :raises PromptTooLongError: there is none.
        """
        if window_tokens >= self.room:
            raise PromptTooLongError(
                f"window_tokens={window_tokens} and {len(self.head)} tokens of system text leave no room for a "
                f"question: the model's length is {self._model.max_model_len}"
            )

    def shown(self, chunk: Chunk) -> Chunk:
        """What of it stands in the prompt: no window would ever bound the rest."""
        return replace(chunk, **self._hidden)

    def pieces(self, numbered: Sequence[Numbered]) -> list[Piece]:
        """Chunks as they stand in the prompt."""
        return [Piece(each.number, tuple(self._assembler.encode_passage(each.number, each.chunk))) for each in numbered]

    def text_of(self, piece: Piece) -> str:
        """As it stands in the prompt, without what each chunk ends with."""
        return self.tokenizer.decode(piece.token_ids).removesuffix(self._end)

    async def pieces_in_background(self, numbered: Sequence[Numbered]) -> list[Piece]:
        """The same in threads: the tokenizer is there for others every `MAX_CHARACTERS` characters."""
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

    def complete(self, data: tuple[int, ...], question: str) -> tuple[int, ...]:
        """The prompt for `question`, about what is a session's head and data, or its head alone.

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


def session_template(template: PromptTemplate | None, system: str | None) -> PromptTemplate:
    """The words around a session's data.

    :raises ConfigurationError: of another type.
    """
    if not isinstance(template, PromptTemplate | None):
        raise ConfigurationError(f"template={short(template)} must be a PromptTemplate")
    if not isinstance(system, str | None):
        raise ConfigurationError(f"system={short(system)} must be a str")
    chosen = SESSION_TEMPLATE if template is None else template
    return chosen if system is None else replace(chosen, system=plain_text(system))
