"""The prompts of a session, as token ids. Methods that are not async block, and must run in one thread at a time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from string import Formatter
from typing import Any

from streamrag.core import Chunk, ModelInfo
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import PromptTooLongError
from streamrag.modes import PromptAssembler, PromptTemplate
from streamrag.sessions.window import Numbered, WindowChunk, num_characters

MAX_CHARACTERS = 50_000
"""Characters that are tokenised at once, in about ten milliseconds."""

PASSAGE = {"number": 1, "title": "", "uri": "", "text": ""}
"""The names that a template's `passage` may contain."""

SESSION_TEMPLATE = PromptTemplate(
    system="Answer the question from the data below, in a few words. The newest data stand last.",
    before_context="Data:\n\n",
    passage="{text}\n",
    no_context="(no data yet)\n",
    after_context="\nQuestion: {question}",
)


class SessionPrompts:
    """The regions of a session's prompts: a frozen head, the data, and a tail for each question.

    conversation_id: lets a router send all prompts of the session to the engine that holds its KV.

    :raises PromptTooLongError: the head alone does not fit the model's length.
    """

    def __init__(self, model: ModelInfo, template: PromptTemplate, conversation_id: str = "") -> None:
        self._model = model
        self._template = template
        self.conversation_id = conversation_id
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
        """Tokens after the last field of the template's `passage`, such as a line break. Every chunk ends with them."""
        self._no_data = tuple(model.tokenizer.encode(template.no_context))

    @property
    def room(self) -> int:
        """Tokens that the head leaves in the model's length."""
        return self._model.max_model_len - len(self.head)

    def with_system(self, system: str) -> "SessionPrompts":
        """Return the same prompts with another system text; raises PromptTooLongError as the constructor does."""
        return SessionPrompts(self._model, replace(self._template, system=system), self.conversation_id)

    def check_window(self, window_tokens: int) -> None:
        """Raise PromptTooLongError if head and window take all of the model's length, which leaves no question room."""
        if window_tokens >= self.room:
            raise PromptTooLongError(
                f"window_tokens={window_tokens} and {len(self.head)} tokens of system text leave no room for a "
                f"question: the model's length is {self._model.max_model_len}"
            )

    def without_hidden(self, chunk: Chunk) -> Chunk:
        """Return `chunk` without fields that the template does not show: no window would bound their size."""
        return replace(chunk, **self._hidden)

    def pieces(self, numbered: Sequence[Numbered]) -> list[WindowChunk]:
        """Encode each chunk as its passage in the prompt, and return the number of each with its tokens, in order."""
        return [
            WindowChunk(each.number, tuple(self._assembler.encode_passage(each.number, each.chunk)))
            for each in numbered
        ]

    async def pieces_in_background(self, numbered: Sequence[Numbered]) -> list[WindowChunk]:
        """Return what `pieces` returns, computed in a thread with the tokenizer's lock, which is released after each
        `MAX_CHARACTERS` or a little more, so that questions need not wait."""
        pieces: list[WindowChunk] = []
        batch: list[Numbered] = []
        size = 0
        for i, each in enumerate(numbered, 1):
            batch.append(each)
            size += num_characters(each.chunk)
            if size >= MAX_CHARACTERS or i == len(numbered):
                pieces += await in_thread(self.tokenizer, partial(self.pieces, batch), is_background=True)
                batch, size = [], 0
        return pieces

    def texts_of(self, pieces: Sequence[WindowChunk]) -> list[tuple[int, str]]:
        """Return the number and the text of each piece, without the end that all chunks have."""
        return [(each.number, self.tokenizer.decode(each.token_ids).removesuffix(self._end)) for each in pieces]

    def complete(self, data: tuple[int, ...], question: str) -> tuple[int, ...]:
        """Return the prompt for `question`: `data`, the text for no data if that is the head alone, and the tail.

        data: a session's head and data, or its head alone.

        :raises PromptTooLongError: the prompt leaves no room for an answer in the model's length.
        """
        tail = self._assembler.tail_of(question)
        token_ids = data + (self._no_data if data == self.head else ()) + tail
        if len(token_ids) >= self._model.max_model_len:
            raise PromptTooLongError(
                f"the question takes {len(tail)} tokens, and {len(data)} of system text and data leave no room for an "
                f"answer beside it in the model's length of {self._model.max_model_len}: lower window_tokens"
            )
        return token_ids
