"""Assemble a context, its question and the model's chat template into token ids.

    | head: template, system text, history, `before_context` | passage 1 | passage 2 | ... | tail: question, template |
    |<------------------- partial prompt: head and passages ---------------------------->|

Every part is tokenised separately. So an added passage never changes the ids before it, and a streamed prompt has the
same ids as one that is assembled at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from streamrag.core import Chunk, Prompt, Tokenizer, Turn, common_prefix_len
from streamrag.errors import ConfigurationError, PromptTooLongError
from streamrag.modes.bounds import encode_bounded
from streamrag.modes.budget import Included, PassageBudget, RelevanceJudge
from streamrag.modes.conversation import chat_pieces
from streamrag.modes.passages import PassageFormat

MAX_CACHED_PASSAGES = 1024
"""Passages of a query whose token ids are kept; with more in one context, each prompt tokenises all of them again."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The texts around the context, inside the model's chat template.

    :raises ConfigurationError: a part has an unknown placeholder, or lacks a required one.
    """

    system: str = (
        "Answer the question from the documents below, and cite them by their numbers in brackets. "
        "If they do not hold the answer, say so."
    )
    """Text of the system message; "" for none."""
    before_context: str = "Documents:\n\n"
    """Text before the passages, in the user's message."""
    passage: str = "[{number}] {title} ({uri})\n{text}\n\n"
    """Format of each chunk, with `number` (from 1), `title`, `uri` and `text`."""
    no_context: str = "(no documents were found)\n\n"
    """Text in place of the passages when there are none."""
    cut_short: str = field(default="(retrieval was cut short: documents may be missing)\n\n", kw_only=True)
    """Text behind the passages, or in place of `no_context`, when retrieval failed or was cut short."""
    after_context: str = "Question: {question}"
    """Format of the `question`. It comes last, so that everything before it can be prefilled during retrieval."""
    wrap_tokenizer: Callable[[Tokenizer, int], Tokenizer] | None = field(default=None, kw_only=True)
    """Function of the model's tokenizer and length that returns the tokenizer to use; None for the model's own."""

    def __post_init__(self) -> None:
        for name, values in (
            ("passage", {"number": 1, "title": "", "uri": "", "text": ""}),
            ("after_context", {"question": ""}),
        ):
            needed = list(values)[-1]
            try:
                formatted = getattr(self, name).format(**{**values, needed: "@@needed@@"})
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise ConfigurationError(
                    f"PromptTemplate.{name}={getattr(self, name)!r} cannot be formatted ({error!r}); "
                    f"it may use {', '.join('{' + key + '}' for key in values)}, and {{{{ and }}}} for braces"
                ) from error
            if "@@needed@@" not in formatted:
                raise ConfigurationError(f"PromptTemplate.{name}={getattr(self, name)!r} must use {{{needed}}}")

    def messages(self, question: str, history: Sequence[Turn]) -> tuple[list[Turn], list[Turn]]:
        """Return the messages up to the passages and from there on, which both have the message around the passages."""
        system = [Turn("system", self.system)] if self.system else []
        after = self.after_context.format(question=question)
        return [*system, *history, Turn("user", self.before_context)], [Turn("user", after)]

    def passage_format(self, chat: str = "") -> PassageFormat:
        """Return the formatter of chunks, which protects the lines of this template and of the format `chat`."""
        words = (self.before_context, self.no_context, self.cut_short)
        return PassageFormat(self.passage, *map(_escaped, words), self.after_context, chat)


@dataclass(frozen=True, slots=True)
class AssembledPrompt:
    """A prompt and the chunks that it includes, leaves out or shortens."""

    prompt: Prompt
    included: tuple[Chunk, ...]
    """Passages of the prompt; a large chunk may have two."""
    wholes: tuple[Chunk, ...]
    """The chunk of each passage, whole."""
    num_invalidated: int
    """Number of tokens of the previous prompt that are not in the shared prefix."""
    left_out: tuple[Chunk, ...] = ()
    """Chunks that are not included at all; empty until the prompt is complete."""
    shortened: tuple[Chunk, ...] = ()
    """Chunks of which only a part is included."""


class PromptAssembler:
    """An assembler of the successive prompts of one query. Blocking, and for one thread at a time.

    max_context_tokens: the token budget of the passages; None for all that the model's length leaves beside the rest of
        the prompt and `max_tokens` of answer.
    relevance: chooses what fits the budget in a context that is not ranked; see `budget`.
    reserve_fraction: share of the budget that is reserved for late chunks.

    :raises PromptTooLongError: the rest of the prompt and the answer exceed the model's length.
    :raises ConfigurationError: the chat template cannot be split.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: PromptTemplate,
        question: str,
        *,
        max_model_len: int,
        max_tokens: int,
        max_context_tokens: int | None = None,
        history: Sequence[Turn] = (),
        relevance: RelevanceJudge | None = None,
        reserve_fraction: float = 0.0,
    ) -> None:
        if template.wrap_tokenizer is not None:
            tokenizer = template.wrap_tokenizer(tokenizer, max_model_len)
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template = template
        self._encode_passage = lru_cache(MAX_CACHED_PASSAGES)(self.encode_passage)
        self._previous: tuple[int, ...] = ()
        self._fit: list[Included] | None = None  # of the previous prompt, if that was partial
        self._history = tuple(history)
        before, after = template.messages(question, self._history)
        self._pieces = chat_pieces(tokenizer, [turn.role for turn in (*before, *after[1:])])
        self._format = template.passage_format("{text}".join(map(_escaped, self._pieces)) + "{answer}")
        self.head = self._encode_messages(self._pieces[: len(before)], before)
        """Token ids before the passages."""
        self.tail = self.tail_of(question)
        """Token ids behind the passages of a complete prompt."""
        self._no_context = tokenizer.encode(template.no_context)
        self._cut_short = tokenizer.encode(template.cut_short)
        num_fixed = len(self.head) + len(self.tail) + max(len(self._no_context), len(self._cut_short))
        room = max_model_len - num_fixed - max_tokens
        if room < 0:
            raise PromptTooLongError(
                f"system text, history and question take at least {num_fixed} tokens, and max_tokens={max_tokens} of "
                f"answer do not fit beside them into the model's length of {max_model_len}: shorten them, or lower "
                "max_tokens"
            )
        self.max_context_tokens = room if max_context_tokens is None else min(max_context_tokens, room)
        self._budget = PassageBudget(
            self.max_context_tokens,
            lambda number, chunk: len(self._encode_passage(number, chunk)),
            relevance,
            reserve_fraction,
        )

    def assemble(
        self, chunks: Sequence[Chunk], *, is_complete: bool, is_cut_short: bool = False, is_ranked: bool = True
    ) -> AssembledPrompt:
        """Return the prompt for `chunks` in this order, as the budget allows, compared with the previous prompt.

        is_complete: whether to add the tail, and to report chunks that are left out; else only head and passages.
        is_cut_short: whether a complete prompt says, behind the passages, that retrieval was cut short.
        is_ranked: whether the chunks are in order of rank; otherwise they are in order of arrival.
        """
        fit = self._fitting(chunks, is_complete=is_complete, is_ranked=is_ranked)
        if not is_complete and fit == self._fit:
            token_ids = self._previous  # for example, when the new chunk does not fit
        else:
            token_ids = self._token_ids(fit, is_complete=is_complete, is_cut_short=is_cut_short)
        self._fit = None if is_complete else fit
        num_shared = common_prefix_len(self._previous, token_ids)
        num_invalidated = len(self._previous) - num_shared
        self._previous = token_ids
        parts = {each.whole: each for each in fit}  # of a chunk with two passages, the last
        return AssembledPrompt(
            Prompt(token_ids, num_shared, is_complete),
            included=tuple(each.part for each in fit),
            wholes=tuple(each.whole for each in fit),
            num_invalidated=num_invalidated,
            left_out=tuple(chunk for chunk in chunks if chunk not in parts) if is_complete else (),
            shortened=tuple(chunk for chunk, last in parts.items() if last.rest),
        )

    def preview(self, chunks: Sequence[Chunk], *, is_ranked: bool) -> tuple[tuple[int, ...], tuple[Chunk, ...]]:
        """Return the token ids of what would be the complete prompt if retrieval ended now, and its passages."""
        fit = self._fitting(chunks, is_complete=True, is_ranked=is_ranked)
        return self._token_ids(fit, is_complete=True, is_cut_short=False), tuple(each.part for each in fit)

    def _fitting(self, chunks: Sequence[Chunk], *, is_complete: bool, is_ranked: bool) -> list[Included]:
        if is_ranked:
            return self._budget.by_rank(chunks)
        return self._budget.by_arrival(chunks, is_complete=is_complete)

    def _token_ids(self, fit: Sequence[Included], *, is_complete: bool, is_cut_short: bool) -> tuple[int, ...]:
        """Return the ids of head and passages and, if complete, of a note if context is missing, and of the tail."""
        ids = list(self.head)
        for number, included in enumerate(fit, 1):
            ids += self._encode_passage(number, included.part)
        if is_complete:
            if is_cut_short and self._cut_short:
                ids += self._cut_short
            elif not fit:
                ids += self._no_context
            ids += self.tail
        return tuple(ids)

    def tail_of(self, question: str) -> tuple[int, ...]:
        """Return the token ids behind the passages for this question, up to where the model's answer begins."""
        before, after = self._template.messages(question, self._history)
        pieces = ["", *self._pieces[len(before) :]]
        end = self._tokenizer.encode(pieces.pop(), allow_special=True)
        return (*self._encode_messages(pieces, after), *end)

    def count_tokens(self, chunks: Sequence[tuple[int, Chunk]]) -> list[int]:
        """Return the number of tokens of each chunk as the passage of this number, and cache the newest ones' ids."""
        return [len(self._encode_passage(number, chunk)) for number, chunk in chunks]

    def encode_passage(self, number: int, chunk: Chunk) -> list[int]:
        """Return the token ids of a chunk, or of a too long one's start, as this passage, without caching them."""

        def format_text(text: str) -> str:
            return self._format.format(number, replace(chunk, text=text))

        return encode_bounded(self._tokenizer, chunk.text, self._max_model_len, format_text)

    def _encode_messages(self, pieces: Sequence[str], messages: Sequence[Turn]) -> tuple[int, ...]:
        """Return the token ids of messages, each behind its piece of the chat template.

        The texts are tokenised separately from the chat template and without special tokens, so that they cannot
        imitate the template. Messages behind the one with which the model's length is exceeded are left out.
        """
        token_ids: list[int] = []
        for piece, message in zip(pieces, messages, strict=True):
            token_ids += self._tokenizer.encode(piece, allow_special=True) if piece else []
            token_ids += encode_bounded(self._tokenizer, message.text, self._max_model_len)
            if len(token_ids) > self._max_model_len:
                break  # too long already
        return tuple(token_ids)


def _escaped(text: str) -> str:
    """Return a format string that produces this text."""
    return text.replace("{", "{{").replace("}", "}}")
