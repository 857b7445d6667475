"""Encode a conversation with the model's chat template. It has no passages: its messages are the context.

| template | text 1 | template | text 2 | ... | template | text n | template, up to the answer |
|<------------------------ partial prompt ----------------------->|
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrag.core import Tokenizer, Turn, common_prefix_len
from streamrag.errors import ConfigurationError, PromptTooLongError
from streamrag.modes.bounds import encode_bounded

_PLACEHOLDER = re.compile(r"@@streamrag-(\d+)@@")


def chat_pieces(tokenizer: Tokenizer, roles: Sequence[str]) -> list[str]:
    """Return the parts of the chat template before, between and behind the texts of messages with these roles.

    The template is rendered with a placeholder for each text, so that no text can change it.

    :raises ConfigurationError: the template does not repeat each text once, unchanged and in order.
    """
    turns = [Turn(role, f"@@streamrag-{i}@@") for i, role in enumerate(roles)]  # type: ignore[arg-type]
    rendered = tokenizer.render_chat(turns)
    pieces: list[Any] = _PLACEHOLDER.split(rendered)  # template, "0", template, "1", ..., template
    if pieces[1::2] != [str(i) for i in range(len(turns))]:
        raise ConfigurationError(
            "the model's chat template does not repeat each message once, as it is and in order, "
            f"so it cannot be filled while retrieval runs; it made: {rendered!r}"
        )
    return pieces[::2]


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """The token ids of a conversation, up to the beginning of the answer."""

    token_ids: tuple[int, ...]
    num_tail: int
    """Number of the template's tokens behind the last text."""
    num_shared: int
    """Number of leading tokens shared with the previous conversation, up to its last text."""

    @property
    def partial(self) -> tuple[int, ...]:
        """Token ids up to the end of the last text."""
        return self.token_ids[: len(self.token_ids) - self.num_tail]


class Conversation:
    """An encoder of the successive states of a growing conversation. Blocking, and for one thread at a time.

    The ids depend only on the turns. The ids of repeated texts are cached from one state to the next.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._known: dict[tuple[str, bool], list[int]] = {}
        self._previous: tuple[int, ...] = ()

    def encode(self, turns: Sequence[Turn], *, max_tokens: int) -> ConversationPrompt:
        """Return the token ids of `turns`, and the number that they share with the conversation encoded before.

        :raises PromptTooLongError: they and an answer of `max_tokens` exceed the model's length.
        :raises ConfigurationError: the chat template does not support these turns.
        """
        known, self._known = self._known, {}
        pieces = chat_pieces(self._tokenizer, [turn.role for turn in turns])
        token_ids: list[int] = []
        for piece, turn in zip(pieces, turns, strict=False):
            token_ids += self._encode((piece, True), known)
            token_ids += self._encode((turn.text, False), known)
            if len(token_ids) > self._max_model_len:
                break  # too long already
        tail = self._encode((pieces[-1], True), known)
        if len(token_ids) + len(tail) + max_tokens > self._max_model_len:
            raise PromptTooLongError(
                f"the conversation has at least {len(token_ids) + len(tail)} tokens, and max_tokens={max_tokens} of "
                f"answer do not fit beside them into the model's length of {self._max_model_len}: shorten it, or lower "
                "max_tokens"
            )
        head = tuple(token_ids)
        num_shared = common_prefix_len(self._previous, head)
        self._previous = head
        return ConversationPrompt((*head, *tail), len(tail), num_shared)

    def _encode(self, key: tuple[str, bool], known: dict[tuple[str, bool], list[int]]) -> list[int]:
        """Return the ids of `key`, a text and whether it is the template's; they are cached for the next state only."""
        text, is_template = key
        ids = self._known.get(key) or known.get(key)
        if ids is None and is_template:
            ids = self._tokenizer.encode(text, allow_special=True)
        elif ids is None:
            ids = encode_bounded(self._tokenizer, text, self._max_model_len)
        self._known[key] = ids
        return ids
