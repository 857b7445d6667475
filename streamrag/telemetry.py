"""The classes of a query's events, its answer with timings, and the engine's record. Nothing here emits or writes them.

Every `at_s` is in seconds since the query was submitted, on the pipeline's clock. Times in records are those of
`time.monotonic`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from streamrag.core import AnswerChunk, Chunk, LengthUnit, TokenUsage
from streamrag.errors import SourceError
from streamrag.records import ChunkRecord, PreemptionRecord, RequestRecord, RestoreRecord, read_records

__all__ = [
    "Alternative",
    "Answer",
    "Answered",
    "ChunkArrived",
    "ChunkRecord",
    "ChunksLeftOut",
    "ChunksShortened",
    "Citation",
    "ContextChanged",
    "ContextComplete",
    "ContextRefreshed",
    "DocumentSkipped",
    "DraftChanged",
    "DraftUse",
    "OverlapChoice",
    "OverlapWay",
    "PreemptionRecord",
    "PrefillProgressed",
    "QueryEvent",
    "RefreshSkipped",
    "RequestRecord",
    "RestoreRecord",
    "RetrievalCutShort",
    "RetrievalStarted",
    "SourceFailed",
    "Stretch",
    "Timings",
    "TokenUsage",
    "TokensGenerated",
    "read_records",
]


OverlapWay: TypeAlias = Literal["immediate", "delayed", "none"]
"""Prefill the text before the context at once and each context as it comes, only the newest context shortly before
retrieval ends, or only the complete one."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """The way in which retrieval and prefill of one query overlap, and the reason for it."""

    way: OverlapWay
    reason: str
    lead_s: float | None = None
    """Seconds before the expected end of retrieval at which prefill starts; only for "delayed"."""


@dataclass(frozen=True, slots=True)
class RetrievalStarted:
    """The query was admitted, and its source starts to retrieve."""

    at_s: float
    query: str
    overlap: OverlapChoice | None = None
    """The way in which prefill will overlap with retrieval; None if there is no prefill."""


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """The source yielded a chunk that was not in the context."""

    at_s: float
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class DocumentSkipped:
    """The source could not use a document, and continued without it."""

    at_s: float
    uri: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetrievalCutShort:
    """The source ended early. The chunks so far are used, and the model is told that some may be missing."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """The source failed, and the answer uses the chunks so far (`on_source_error="answer"`)."""

    at_s: float
    error: SourceError


@dataclass(frozen=True, slots=True)
class ContextChanged:
    """A new prompt was sent to the backend."""

    at_s: float
    num_chunks: int
    """Number of passages in the new prompt."""
    num_tokens: int
    """Length of the new prompt."""
    num_shared: int
    """Leading tokens shared with the previous prompt, whose KV stays valid."""
    num_invalidated: int
    """Tokens of the previous prompt behind these, whose KV is no longer valid."""
    chunks: tuple[Chunk, ...] = ()
    """The passages of the new prompt, in prompt order."""
    unit: LengthUnit = "tokens"
    """Unit of the three lengths."""


@dataclass(frozen=True, slots=True)
class ChunksLeftOut:
    """Chunks that do not fit the context's token budget, reported when the context is complete."""

    at_s: float
    chunks: tuple[Chunk, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class ChunksShortened:
    """Chunks that fit the context's token budget only in part; the prompt has their best passages."""

    at_s: float
    chunks: tuple[Chunk, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class ContextComplete:
    """Retrieval has ended; the prompt is final."""

    at_s: float
    num_chunks: int
    """Number of passages in the complete prompt."""
    num_tokens: int
    """Length of the complete prompt."""
    chunks: tuple[Chunk, ...]
    """The passages of the prompt, in prompt order; the answer's `citations` refer to them."""
    unit: LengthUnit = "tokens"
    """Unit of `num_tokens`."""


@dataclass(frozen=True, slots=True)
class PrefillProgressed:
    """The backend has computed the KV of at least `num_tokens` leading tokens of the newest prompt."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DraftChanged:
    """A draft of the answer changed: what the model would answer if the context were complete. It may still change."""

    at_s: float
    text: str
    """The whole draft so far, instead of the last one."""
    chunks: tuple[Chunk, ...]
    """The passages that it is based on, in prompt order."""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New text of the answer."""

    at_s: float
    chunk: AnswerChunk
    """The text with its tokens, as the backend yielded it."""

    @property
    def text(self) -> str:
        """The text of the chunk."""
        return self.chunk.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The text as tokens; empty if a server returns text only."""
        return self.chunk.token_ids

    @property
    def finish_reason(self) -> str | None:
        """The reason for which the answer ended; None until the last event of this kind."""
        return self.chunk.finish_reason

    @property
    def logprobs(self) -> Any:
        """Log-probabilities of the tokens, as in `AnswerChunk`."""
        return self.chunk.logprobs


@dataclass(frozen=True, slots=True)
class ContextRefreshed:
    """Passages were added to the prompt in mid-answer. The answer goes on behind the tokens so far."""

    at_s: float
    query: str
    """The text that the passages were retrieved for."""
    chunks: tuple[Chunk, ...]
    """The new passages, which follow the earlier ones in the prompt."""
    num_answer_tokens: int
    """Number of tokens of the answer so far."""
    num_recomputed: int
    """Tokens behind the earlier passages that are computed: new passages, question and answer so far."""


@dataclass(frozen=True, slots=True)
class RefreshSkipped:
    """A retrieval in mid-answer ended without a change of the prompt. The answer goes on."""

    at_s: float
    query: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of an answer that were generated from one prompt, up to the next stretch or the end of the answer."""

    first_token: int
    """Place of its first token in `Answer.token_ids`, from 0. The tokens before it stood behind its prompt."""
    query: str
    """The text that its newest passages were retrieved for."""
    num_passages: int
    """Number of passages of its prompt: the first ones of `Answer.citations`."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one query, in seconds."""

    queued_s: float
    """Seconds from the query until it was admitted."""
    first_chunk_s: float | None
    """Seconds from the query to the first chunk of context; None if there was none."""
    retrieval_s: float
    """Seconds from the query to the end of retrieval."""
    ttft_s: float
    """Seconds from the query to the first token."""
    ttft_after_retrieval_s: float
    """Seconds from the end of retrieval to the first token, which the Stream2LLM paper calls TTFT."""
    total_s: float
    """Seconds from the query to the last token."""


@dataclass(frozen=True, slots=True)
class Citation:
    """A passage of the prompt."""

    number: int
    """The number that the model saw: the place in the prompt, from 1. That is the rank in update mode, unless its order
    is "stable", and the order of arrival in append mode."""
    uri: str
    """URL or path of the document."""
    title: str
    """Title of the document; "" if unknown."""
    passage: int
    """Number of the passage within its document, from 0."""
    text: str
    """The text that the model saw; of a shortened chunk, its part."""
    score: float | None
    """The retriever's own score; larger is better. None if it gave none."""
    rank: int | None = None
    """Place in the retriever's last ranking, from 1; None if it does not rank, like a crawl."""


@dataclass(frozen=True, slots=True)
class DraftUse:
    """The use of drafts for one answer, in tokens."""

    num_drafted: int = 0
    """Length of the draft when the context was complete."""
    num_verified: int = 0
    """Tokens of it that were verified, those behind a wrong one perhaps several times. All, if it is the answer."""
    num_accepted: int = 0
    """Tokens that were right, and are in the answer: so many steps were saved."""
    why_none: str | None = None
    """Reason for which there was no draft; None if there could be one."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A further answer to the same prompt, sampled because `SamplingParams.n` is above 1."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The whole answer to one query."""

    text: str
    """The whole text."""
    token_ids: tuple[int, ...]
    """The text as tokens; empty if a server returns text only."""
    finish_reason: str
    """"stop" or "length"; a server may have other reasons."""
    citations: tuple[Citation, ...] = ()
    """The passages of the prompt, in prompt order."""
    left_out: tuple[Chunk, ...] = ()
    """Chunks that did not fit the token budget."""
    shortened: tuple[Chunk, ...] = ()
    """Chunks that fit it only in part, whole as they arrived; `citations` has the parts."""
    num_prompt_tokens: int
    """Length of the prompt that was sent, in `unit`. For the tokens that the model read, see `usage`."""
    num_invalidated: int = 0
    """Tokens that were sent to the backend and replaced by a later prompt, over all prompts of the query, in `unit`."""
    is_exact: bool
    """Whether the model saw exactly the tokens of the prompt; False for a server that takes only text."""
    source_error: SourceError | None = None
    """The error that ended retrieval early, with `on_source_error="answer"`."""
    cut_short: str | None = None
    """Reason for which retrieval ended early without an error: a time limit, or a busy resource. None if it did not."""
    submitted_s: float
    """When the query was submitted, on the pipeline's clock. The default clock is `time.monotonic`, as in `record`, so
    that `record.first_kv_s - submitted_s` compares with the timings and with every `at_s`."""
    timings: Timings
    """Duration of each part."""
    record: RequestRecord | None = None
    """The engine's record of the request; None if the engine keeps no records. With `alternatives`, that of the stream
    that prefilled the prompt."""
    breaks_look_alikes: bool = False
    """Whether text that looks like a special token got a space inserted, because a server tokenised the text. Otherwise
    the model saw it unchanged, as text. It never saw a special token."""

    version: int | None = None
    """Version of the session's data that the answer belongs to; None outside sessions."""
    overlap: OverlapChoice | None = None
    """The way in which retrieval and prefill overlapped, and the reason for it; None in sessions."""
    draft: DraftUse | None = None
    """The use of drafts; None without `answer_ahead` and without a `draft` of the query."""
    gap: float | None = None
    """Lead of the first token over the next best, as a difference of log-probabilities; None unless a session's
    question was asked with `with_margin`."""
    usage: TokenUsage = field(default_factory=TokenUsage)
    """The tokens of prompt and answer, as the backend reports them or as they were counted; None where unknown."""
    unit: LengthUnit = "tokens"
    """Unit of `num_prompt_tokens` and `num_invalidated`: characters if the model's tokenizer is not available."""
    alternatives: tuple[Alternative, ...] = ()
    """The further answers, if `SamplingParams.n` is above 1."""
    prompt_logprobs: Any = None
    """Log-probabilities of the prompt's tokens, as in `AnswerChunk`; None unless they were requested."""
    stretches: tuple[Stretch, ...] = ()
    """The stretches of the answer, in order; empty without `refresh`. `citations`, `num_prompt_tokens`, `usage` and
    `record` are those of the last one's prompt."""

    @property
    def is_in_rank_order(self) -> bool:
        """Whether the passages of the prompt are in the retriever's order; True if it does not rank.

        False if `UpdateMode(order="stable")` kept surviving passages in front, or `AppendMode` the earliest ones.
        """
        ranks = [citation.rank for citation in self.citations]
        if all(rank is None for rank in ranks):
            return True
        return None not in ranks and ranks == sorted(ranks, key=lambda r: r or 0)

    @property
    def has_context(self) -> bool:
        """Whether anything usable was retrieved. If not, the model was told so."""
        return bool(self.citations)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer is complete. Always the last event."""

    at_s: float
    answer: Answer


QueryEvent: TypeAlias = (
    RetrievalStarted
    | ChunkArrived
    | DocumentSkipped
    | RetrievalCutShort
    | SourceFailed
    | ContextChanged
    | ChunksLeftOut
    | ChunksShortened
    | ContextComplete
    | PrefillProgressed
    | DraftChanged
    | ContextRefreshed
    | RefreshSkipped
    | TokensGenerated
    | Answered
)
