"""Queries and their options, validated."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

from pydantic import Field, InstanceOf, PlainValidator

from streamrag.core import MAX_INT, AnswerChunk, SamplingParams, Turn
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptAssembler, PromptTemplate
from streamrag.query.state import NewContext, QueryState
from streamrag.support.messages import plain_text
from streamrag.support.validation import CountOrZero, Flag, Number, Seconds, Text, validated

RESERVE_FRACTION = 0.25
"""Default of `reserve_fraction`. With the demo's questions, a third or a half found the answer no more often, and
they leave more tokens to compute at the end."""

MAX_QUERY_CHARACTERS = 100_000
"""A query is embedded and searched for as well as tokenised, so it should not be a whole document."""

MAX_DRAFT = 1 << 16
"""Most characters of a draft, or token ids, as many as an engine takes."""

Draft: TypeAlias = (
    Annotated[Text, Field(max_length=MAX_DRAFT)]
    | Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_INT)], ...], Field(max_length=MAX_DRAFT, strict=False)]
)
"""A text, or token ids in a tuple or list."""

ROLES = ("system", "user", "assistant")


def _turns(value: Iterable[Turn]) -> tuple[Turn, ...]:
    """Return turns with plain texts, from an iterable of them or a single one; ValueError for other values or roles."""
    turns = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(turn, Turn) and turn.role in ROLES and isinstance(turn.text, str) for turn in turns):
        raise ValueError('must be a sequence of Turn, each with a role of "system", "user" or "assistant" and a text')
    return tuple(Turn(turn.role, plain_text(turn.text)) for turn in turns)


class ContextRefresher(AbstractAsyncContextManager["ContextRefresher"], Protocol):
    """Retrieval beside one answer. Leaving the context manager stops a retrieval that is running."""

    def add(self, chunk: AnswerChunk) -> AnswerChunk:
        """Add a chunk to the answer so far; return it, without a usage of one segment only."""

    async def new_context(self) -> NewContext | None:
        """Begin a retrieval if one is due after the newest chunk. Return new context once it is ready to be used."""


@runtime_checkable
class AnswerRefresh(Protocol):
    """Retrieval in mid-answer: `streamrag.refresh.Refresh`."""

    def check_query(self, query: "Query") -> None:
        """Raise ConfigurationError if the query has an option that does not work with retrieval in mid-answer."""

    def begin(self, query: "Query", state: QueryState, assembler: PromptAssembler) -> ContextRefresher:
        """Return the refresher of one answer, which reads the state, and makes prompts by the query's assembler."""


@validated
@dataclass(frozen=True, slots=True)
class Query:
    """A question with its options; see `QueryOptions`.

    :raises ConfigurationError: an option cannot work.
    """

    text: Text
    template: InstanceOf[PromptTemplate] = field(default_factory=PromptTemplate)
    history: Annotated[tuple[Turn, ...], PlainValidator(_turns)] = ()
    params: InstanceOf[SamplingParams] = field(default_factory=SamplingParams)
    max_context_tokens: CountOrZero | None = None
    deadline_s: Seconds | None = None
    overlap: Flag | Literal["auto"] = "auto"
    answer_ahead: Flag = False
    draft: Draft = ()
    reserve_fraction: Annotated[Number, Field(ge=0, lt=1)] = RESERVE_FRACTION
    refresh: InstanceOf[AnswerRefresh] | None = None
    conversation_id: Text = ""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ConfigurationError("the query is empty: ask something")
        if len(self.text) > MAX_QUERY_CHARACTERS:
            raise ConfigurationError(
                f"the query has {len(self.text):,} characters, and {MAX_QUERY_CHARACTERS:,} is the most: "
                "put a long text to ask about into the history or the source"
            )
        if self.refresh is not None:
            self.refresh.check_query(self)


class QueryOptions(TypedDict, total=False):
    """The options of one query."""

    system: str
    """Replaces the template's system text."""
    template: PromptTemplate
    """Replaces the pipeline's template, the words around the context."""
    history: Sequence[Turn]
    """Earlier turns of the conversation, oldest first."""
    params: SamplingParams
    """Options for sampling the answer; greedy with at most 256 tokens by default."""
    max_context_tokens: int
    """Most tokens of context; all that the model's length leaves by default. Chunks that do not fit are reported."""
    deadline_s: float
    """Most seconds from submission to the last token, including the wait for the engine and for admission; no limit by
    default."""
    overlap: bool | Literal["auto"]
    """Whether to prefill while retrieval runs: always, never, or "auto"; as the pipeline by default."""
    answer_ahead: bool
    """Whether to draft the answer while retrieval runs, and to verify the draft when the context is complete. The
    answer is the same; its last token comes sooner if the engine idles meanwhile. As the pipeline by default."""
    draft: str | Sequence[int]
    """Text or token ids that the answer may repeat, such as the last answer if a user asks for it anew. What the engine
    verifies of it comes at once; the answer is the same. Needs `VllmBackend(answer_ahead=True)`; others ignore it."""
    reserve_fraction: float
    """Share of the token budget that is reserved for the most relevant of the chunks that no longer fit, in a context
    that grows chunk by chunk; a quarter by default. With 0, chunks are added whole, in order of arrival."""
    refresh: AnswerRefresh
    """Retrieval in mid-answer, a `streamrag.refresh.Refresh`; none by default."""
    conversation_id: str
    """Id of the conversation, by which a router of replicas finds the one that computed the earlier turns."""


def check_options(options: Mapping[str, object]) -> None:
    """Raise ConfigurationError for a name that is not an option of `QueryOptions`, and suggest the nearest one."""
    names = sorted(QueryOptions.__annotations__)
    params = {field.name: f"params=SamplingParams({field.name}=...)" for field in fields(SamplingParams)}
    for name in sorted(options.keys() - set(names)):
        nearest = get_close_matches(name, [*params, *names], n=1)
        hint = f"; did you mean {params.get(nearest[0], nearest[0])}?" if nearest else "."
        raise ConfigurationError(f"a query has no option {name!r}{hint} Its options are {', '.join(names)}")
