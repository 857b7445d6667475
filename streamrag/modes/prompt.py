"""A context, its question and the model's chat template become token ids.

    | head: template, system text, history, `before_context` | passage 1 | passage 2 | ... | tail: question, template |
    |<------------------- partial prompt: head and passages ---------------------------->|

Every part is tokenised by itself. So an added passage never changes the ids before it, and the ids of a streamed prompt
are those of the same context assembled in one go.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from streamrag.core import Chunk, Prompt, Tokenizer, Turn, common_prefix_len
from streamrag.errors import ConfigurationError, PromptTooLongError
from streamrag.modes.bounds import encode_at_most
from streamrag.modes.budget import Budget, Included, Relevance
from streamrag.modes.conversation import chat_pieces
from streamrag.modes.passages import PassageFormat


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The words around the context. The model's chat template is put around all of it.

    Raises ConfigurationError when a part names a placeholder that it does not have.
    """

    system: str = (
        "Answer the question from the documents below, and cite them by their numbers in brackets. "
        "If they do not hold the answer, say so."
    )
    before_context: str = "Documents:\n\n"
    passage: str = "[{number}] {title} ({uri})\n{text}\n\n"
    """Formatted for each chunk, with `number` (from 1), `title`, `uri` and `text`."""
    no_context: str = "(no documents were found)\n\n"
    """Stands in for the passages when there are none."""
    cut_short: str = field(default="(retrieval was cut short: documents may be missing)\n\n", kw_only=True)
    """Stands behind the passages, or in place of `no_context`, when retrieval ended before it was done, or failed."""
    after_context: str = "Question: {question}"
    """Formatted with `question`. It stands last, so that nothing before it waits for retrieval to end."""

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

    def passage_format(self, chat: str = "") -> PassageFormat:
        """Return the format of chunks, which cannot imitate lines of this template, nor of `chat`, a format."""
        words = (self.before_context, self.no_context, self.cut_short)
        return PassageFormat(self.passage, *map(_escaped, words), self.after_context, chat)


@dataclass(frozen=True, slots=True)
class AssembledPrompt:
    """A prompt, and what became of each chunk."""

    prompt: Prompt
    included: tuple[Chunk, ...]
    """The passages; a shortened chunk may have two."""
    num_invalidated: int
    """Tokens of the previous prompt that this one does not share."""
    left_out: tuple[Chunk, ...] = ()
    """Chunks of which nothing is included, once the prompt is complete."""
    shortened: tuple[Chunk, ...] = ()
    """Chunks of which only a part is included."""


class PromptAssembler:
    """Turns the successive contexts of one query into prompts. Blocking, and for one thread at a time.

    `max_context_tokens` bounds the passages; None leaves them all that the model's length has room for beside the
    rest of the prompt and `max_tokens` of answer. With `relevance`, what does not fit is chosen by it in a
    context that is not ranked, and `late_share` of the budget is kept for what arrives late; see `budget`.

    Raises PromptTooLongError when that is less than nothing, ConfigurationError for a chat template that cannot be
    split.
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
        relevance: Relevance | None = None,
        late_share: float = 0.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template = template
        self._passages: dict[tuple[int, Chunk], list[int]] = {}
        self._previous: tuple[int, ...] = ()
        self._fit: list[Included] | None = None  # of the previous prompt, if that was partial
        self._head, self._end = self._split(history)
        self._tail = self.tail_of(question)
        self._no_context = tokenizer.encode(template.no_context)
        self._cut_short = tokenizer.encode(template.cut_short)
        num_fixed = len(self._head) + len(self._tail) + max(len(self._no_context), len(self._cut_short))
        room = max_model_len - num_fixed - max_tokens
        if room < 0:
            raise PromptTooLongError(
                f"system text, history and question take at least {num_fixed} tokens, and max_tokens={max_tokens} of "
                f"answer do not fit beside them into the model's length of {max_model_len}: shorten them, or lower "
                "max_tokens"
            )
        self.max_context_tokens = room if max_context_tokens is None else min(max_context_tokens, room)
        self._budget = Budget(
            self.max_context_tokens,
            lambda number, chunk: len(self._encode_passage(number, chunk)),
            relevance,
            late_share,
        )

    def assemble(
        self, chunks: Sequence[Chunk], *, is_complete: bool, is_cut_short: bool = False, is_ranked: bool = True
    ) -> AssembledPrompt:
        """The prompt for `chunks` in this order. Earlier ones go first, and what does not fit the budget is left out.

        A complete one tells the model when retrieval `is_cut_short`, behind the passages: nothing before it changes.
        Chunks that are not ranked are in the order of their arrival.
        """
        budget = self._budget
        fit = budget.by_rank(chunks) if is_ranked else budget.by_arrival(chunks, is_complete=is_complete)
        if not is_complete and fit == self._fit:
            token_ids = self._previous  # as when a chunk is waiting for room
        else:
            token_ids = self._token_ids(fit, is_complete=is_complete, is_cut_short=is_cut_short)
        self._fit = None if is_complete else fit
        num_shared = common_prefix_len(self._previous, token_ids)
        num_invalidated = len(self._previous) - num_shared
        self._previous = token_ids
        parts = {each.whole: each for each in fit}  # for a chunk that is in it twice, the last
        return AssembledPrompt(
            Prompt(token_ids, num_shared, is_complete),
            included=tuple(each.part for each in fit),
            num_invalidated=num_invalidated,
            left_out=tuple(chunk for chunk in chunks if chunk not in parts) if is_complete else (),
            shortened=tuple(chunk for chunk, last in parts.items() if last.rest),
        )

    def _token_ids(self, fit: Sequence[Included], *, is_complete: bool, is_cut_short: bool) -> tuple[int, ...]:
        ids = list(self._head)
        for number, included in enumerate(fit, 1):
            ids += self._encode_passage(number, included.part)
        if is_complete:
            if is_cut_short and self._cut_short:
                ids += self._cut_short
            elif not fit:
                ids += self._no_context
            ids += self._tail
        return tuple(ids)

    @property
    def head(self) -> tuple[int, ...]:
        """Token ids before the passages."""
        return tuple(self._head)

    @property
    def tail(self) -> tuple[int, ...]:
        """Token ids behind the passages of a complete prompt."""
        return self._tail

    def tail_of(self, question: str) -> tuple[int, ...]:
        """The same if this were the question: what stands before it has nothing to do with it."""
        tail = self._encode(self._template.after_context.format(question=question))
        return (*tail, *self._tokenizer.encode(self._end, allow_special=True))

    def count_tokens(self, chunks: Sequence[tuple[int, Chunk]]) -> list[int]:
        """Tokens of each chunk as the passage of this number; they are kept for `assemble`."""
        return [len(self._encode_passage(number, chunk)) for number, chunk in chunks]

    def _encode_passage(self, number: int, chunk: Chunk) -> list[int]:
        key = (number, chunk)
        if key not in self._passages:
            self._passages[key] = self.encode_passage(number, chunk)
        return self._passages[key]

    def encode_passage(self, number: int, chunk: Chunk) -> list[int]:
        """Token ids of a chunk as the passage of this number; they are not kept."""

        def format_text(text: str) -> str:
            return self._format.format(number, replace(chunk, text=text))

        return encode_at_most(self._tokenizer, chunk.text, self._max_model_len, format_text)

    def _encode(self, text: str) -> list[int]:
        """Token ids of a text that is not part of the chat template; if it cannot fit, those of its beginning."""
        return encode_at_most(self._tokenizer, text, self._max_model_len)

    def _split(self, history: Sequence[Turn]) -> tuple[list[int], str]:
        """Token ids before the context, and what the chat template has behind the question.

        The texts are tokenised apart from the chat template, as text, so that nothing in them can pass for a token of
        the template.
        """
        texts = [turn.text for turn in history]
        roles = [turn.role for turn in history]
        if self._template.system:
            texts.insert(0, self._template.system)
            roles.insert(0, "system")
        pieces = chat_pieces(self._tokenizer, (*roles, "user"))
        self._format = self._template.passage_format("{text}".join(map(_escaped, pieces)) + "{answer}")
        head: list[int] = []
        for template_text, text in zip(pieces, (*texts, self._template.before_context), strict=False):
            head += self._tokenizer.encode(template_text, allow_special=True)
            head += self._encode(text)
            if len(head) > self._max_model_len:
                break  # no need to know by how much
        return head, pieces[-1]


def _escaped(text: str) -> str:
    """A format string that produces this text."""
    return text.replace("{", "{{").replace("}", "}}")
