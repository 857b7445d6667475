"""The values that travel through a query: options of sampling, chunks, prompts, events of sources and backends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from streamrag.records import RequestRecord
from streamrag.support.validation import Flag, NumberOrZero, PositiveFraction, Whole, validated

MAX_STOP_TEXTS, MAX_STOP_CHARS = 16, 256
"""Limits on stop texts. Each text is searched for at every token in the event loop: 16 take 10 us, 100,000 took 15 ms.
The longest text's length is held back from the answer. OpenAI allows 4 texts; vLLM has no limit."""

MAX_INT = (1 << 31) - 1
MAX_ANSWERS = 128  # as at OpenAI

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[
    tuple[StopText, ...],
    Field(max_length=MAX_STOP_TEXTS),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


@validated
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options for sampling an answer. By default, sampling is greedy.

    :raises ConfigurationError: a value that no engine accepts.
    """

    max_tokens: Annotated[Whole, Field(ge=1, le=MAX_INT)] = 256
    """Most tokens of the answer, which then ends with `finish_reason` "length"."""
    temperature: NumberOrZero = 0.0
    """0 always takes the most probable token; higher values sample more evenly."""
    top_p: PositiveFraction = 1.0
    """Share of probability, above 0 and at most 1, of the most probable tokens that are considered."""
    top_k: Annotated[Whole, Field(ge=0, le=MAX_INT)] = 0
    """Number of the most probable tokens that are considered; 0 for all."""
    seed: Annotated[Whole, Field(gt=-(1 << 63), lt=1 << 63)] | None = None
    """Seed of the sampling, for repeatable answers; None leaves it to the engine."""
    stop: StopTexts = ()
    """Texts at which the answer ends, without them: at most 16, of at most 256 characters."""
    ignore_eos: Flag = False
    """Whether to continue after the model's end-of-sequence token, up to `max_tokens`."""
    json_schema: Annotated[Mapping[str, Any], Field(min_length=1)] | None = None
    """JSON schema that the answer follows, if the engine can constrain answers, as vLLM can; None for free text."""
    n: Annotated[Whole, Field(ge=1, le=MAX_ANSWERS)] = 1
    """Number of answers to sample for the same prompt: the first streams, the others are `Answer.alternatives`."""
    extra: Annotated[Mapping[str, Any], Field()] = field(default_factory=dict)
    """Parameters that streamrag does not name, passed to the engine unchanged."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage of retrieved text, and where it came from.

    Two chunks with the same `uri` and `passage` are from the same place; two equal chunks also have the same text.
    """

    text: str
    """The passage, as the model reads it."""
    uri: str
    """URL or path of the document."""
    title: str = ""
    """Title of the document; "" if unknown."""
    passage: int = 0
    """Number of the passage within its document, from 0."""
    score: float | None = None
    """The retriever's own score; larger is better."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A retriever's forecast of the chunks still to come. It only affects scheduling, never the answer."""

    num_chunks: int | None = None
    """Chunk events still to come after this one."""
    end_s: float | None = None
    """Seconds from this event until retrieval is expected to end."""


@dataclass(frozen=True, slots=True)
class Append:
    """The context grows by one chunk, at its end."""

    chunk: Chunk
    """The new last chunk of the context."""
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """The context is replaced by these chunks, in prompt order."""

    chunks: tuple[Chunk, ...]
    """The whole context, in prompt order."""
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A result that retrieval could not use: an unreachable page, a wrong type, a limit that was reached."""

    uri: str
    reason: str


@dataclass(frozen=True, slots=True)
class CutShort:
    """Retrieval ends early, because its time is up or a resource that it needs is busy.

    The chunks so far are usable, but relevant ones may be missing.
    """

    reason: str


SourceEvent: TypeAlias = Append | Update | Skipped | CutShort


def common_prefix_len(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """Return the number of leading items that `a` and `b` share (LCP), given that they share the first `start`.

    Both must be of the same type, list or tuple. Slices are compared in C: about 30 us for 7,000 tokens.

    >>> common_prefix_len((1, 2, 3, 4), (1, 2, 7, 4))
    2
    """
    shared, end = start, min(len(a), len(b))
    if a[shared:end] == b[shared:end]:
        return end
    # Invariant: the items in [0, shared) are equal, those in [0, end) are not.
    while end - shared > 1:
        middle = (shared + end) // 2
        if a[shared:middle] == b[shared:middle]:
            shared = middle
        else:
            end = middle
    return shared


LengthUnit: TypeAlias = Literal["tokens", "characters"]
"""Unit of the lengths of prompts: characters for a server whose tokenizer is not available."""

RequestClass: TypeAlias = Literal["session", "pool", "stream", "draft"]
"""Urgency classes, the most urgent first: a session's question, any other query, and what no caller waits for: a
session's data, and a draft of an answer whose context may still change. Source: arXiv 2605.13784, section 3.6, which
has no drafts, and where watched questions are a class before all others."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids for the model. A prompt that is not `is_complete` is only prefilled; another prompt follows it."""

    token_ids: tuple[int, ...]
    """The whole prompt so far."""
    num_shared: int = 0
    """Leading tokens shared with the query's previous prompt (LCP); 0 for the first prompt."""
    is_complete: bool = False
    """Whether this is the query's last prompt, which is answered."""
    hint: Hint | None = None
    """The retriever's forecast of the chunks still to come."""
    source_name: str = ""
    """The `part_name` of the retriever. Retrievers of the same name are expected to behave alike."""
    request_class: RequestClass = "pool"
    """Urgency class of the request, for the engine's policy. That of the query's first prompt counts."""
    draft: tuple[int, ...] = ()
    """Tokens that the answer to a complete prompt may consist of. A backend may verify them in a few steps instead of
    sampling one by one; the answer is the same. Others ignore them."""
    conversation_id: str = ""
    """Id of the conversation or session, whose KV a router may find by it; "" for none."""
    query_id: str = field(default="", compare=False)
    """Id that a query's prompts and the drafts of its answer share, so that these find the KV of those."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_shared <= len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The backend has computed the KV of at least `num_tokens` leading tokens of the query's newest prompt."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens that the model read and wrote for an answer; None where their number is unknown."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens of the prompt and the answer together."""
        if self.num_prompt_tokens is None or self.num_output_tokens is None:
            return None
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """New text of the answer, with the tokens it was decoded from.

    `text` may be empty while a character is incomplete. `finish_reason` is set on the last chunk only.
    """

    text: str
    """The new text; all texts together are the answer."""
    token_ids: tuple[int, ...]
    """The text as tokens; empty if a server returns text only."""
    finish_reason: str | None = None
    """"stop" or "length", or a server's own reason; None until the last chunk."""
    record: RequestRecord | None = None
    """The engine's record of the request, on the last chunk only; None if the engine keeps no records."""
    logprobs: Any = None
    """Log-probabilities in the engine's own format, one entry per token, if `SamplingParams.extra` asks for them."""
    usage: TokenUsage | None = None
    """The backend's own count, on the last chunk only; None if the ids of prompt and answer are tokens to count."""
    prompt_logprobs: Any = None
    """Log-probabilities of the prompt in the engine's own format, on the first chunk only, if they were requested."""
    index: int = 0
    """Number of the answer that the chunk belongs to, from 0; with `SamplingParams.n` above 1, chunks interleave."""


BackendEvent: TypeAlias = Prefilled | AnswerChunk
