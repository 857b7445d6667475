"""What happened in a query, and when: one class per event, the answer with its timings, and the engine's record.

Every `at_s` counts seconds from the moment the query was submitted, on the pipeline's clock. Times of records are of
`time.monotonic`.
"""

from dataclasses import dataclass
from typing import TypeAlias

from streamrag.core import Chunk
from streamrag.errors import SourceError
from streamrag.records import ChunkRecord, PreemptionRecord, RequestRecord, RestoreRecord, read_records

__all__ = [
    "Answer",
    "Answered",
    "ChunkArrived",
    "ChunkRecord",
    "ChunksLeftOut",
    "ChunksShortened",
    "Citation",
    "ContextChanged",
    "ContextComplete",
    "DocumentSkipped",
    "Event",
    "PreemptionRecord",
    "PrefillProgressed",
    "RequestRecord",
    "RestoreRecord",
    "RetrievalCutShort",
    "RetrievalStarted",
    "SourceFailed",
    "Timings",
    "TokensGenerated",
    "read_records",
]


@dataclass(frozen=True, slots=True)
class RetrievalStarted:
    """The query was admitted and its source is at work."""

    at_s: float
    query: str


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """The source brought a chunk that the context did not hold."""

    at_s: float
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class DocumentSkipped:
    """The source could not use something, and went on."""

    at_s: float
    uri: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetrievalCutShort:
    """The source ended before it was done; what had arrived is used, and the model is told."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """The source failed and the answer is made from what had arrived (`on_source_error="answer"`)."""

    at_s: float
    error: SourceError


@dataclass(frozen=True, slots=True)
class ContextChanged:
    """A new prompt went to the backend."""

    at_s: float
    num_chunks: int
    num_tokens: int
    """Length of the new prompt."""
    num_shared: int
    """Leading tokens that the previous prompt had too: their KV stays valid."""
    num_invalidated: int
    """Tokens of the previous prompt after those: their KV is no longer valid."""
    chunks: tuple[Chunk, ...] = ()
    """The passages of the new prompt, in prompt order."""


@dataclass(frozen=True, slots=True)
class ChunksLeftOut:
    """Chunks that do not fit the context's token budget, by rank or arrival; reported when the context is complete."""

    at_s: float
    chunks: tuple[Chunk, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class ChunksShortened:
    """Chunks that fit the context's token budget only in part; the prompt has what matters most to the question."""

    at_s: float
    chunks: tuple[Chunk, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class ContextComplete:
    """Retrieval has ended; the prompt is final."""

    at_s: float
    num_chunks: int
    num_tokens: int
    chunks: tuple[Chunk, ...]
    """The passages of the prompt, in prompt order; the answer's `citations` will be these."""


@dataclass(frozen=True, slots=True)
class PrefillProgressed:
    """The backend has computed the KV of at least this many leading tokens of the newest prompt."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New text of the answer."""

    at_s: float
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one query, in seconds."""

    queued_s: float
    """Seconds from the query until it was admitted."""
    first_chunk_s: float | None
    """Seconds from the query to the first chunk of context; None when there was none."""
    retrieval_s: float
    """Seconds from the query to the end of retrieval."""
    ttft_s: float
    """Seconds from the query to the first token."""
    ttft_after_retrieval_s: float
    """Seconds from the end of retrieval to the first token (what the Stream2LLM paper calls TTFT)."""
    total_s: float
    """Seconds from the query to the last token."""


@dataclass(frozen=True, slots=True)
class Citation:
    """A passage of the prompt, with the number that the model saw."""

    number: int
    """Place in the prompt, from 1: the rank in update mode, unless its order is "stable"; the order of arrival in
    append mode."""
    uri: str
    title: str
    passage: int
    text: str
    score: float | None
    rank: int | None = None
    """Place in the retriever's last ranking, from 1; None if it ranked nothing, as a crawl does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer to one query."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """"stop" or "length"; a server may have reasons of its own."""
    citations: tuple[Citation, ...]
    """The passages of the prompt, in prompt order."""
    left_out: tuple[Chunk, ...]
    """Chunks that did not fit the token budget."""
    shortened: tuple[Chunk, ...]
    """Chunks that fit it only in part, as they arrived; `sources` has the parts."""
    num_prompt_tokens: int
    num_invalidated: int
    """Tokens that went to the backend and were replaced by a later prompt, over all prompts of the query."""
    is_exact: bool
    """Whether the model saw exactly the tokens of the prompt (not so for a server that takes only text)."""
    source_error: SourceError | None
    """The error that ended retrieval early, with `on_source_error="answer"`."""
    cut_short: str | None
    """Reason why retrieval was cut short, though it did not fail: a time limit, or a source kept busy by others."""
    submitted_s: float
    """When the query was submitted, on the pipeline's clock. With the default clock, which is `time.monotonic`, this is
    the clock of `record` too: `record.first_kv_s - submitted_s` compares with the timings and with every `at_s`."""
    timings: Timings
    record: RequestRecord | None = None
    """The engine's record of the request; None if the engine keeps no records."""
    breaks_look_alikes: bool = False
    """Whether look-alikes of special tokens were broken by a space, because a server tokenised the text. Otherwise the
    model saw them as they are, as text; in neither case as special tokens."""

    version: int | None = None
    """Version of the session's data that the answer belongs to; None outside sessions."""
    gap: float | None = None
    """Margin of the first token over the next best, as a difference of log-probabilities; None unless a
    session's question asked for it."""

    @property
    def is_in_rank_order(self) -> bool:
        """Whether the prompt has its passages in the order in which the retriever ranked them, if it did. Not so where
        `UpdateMode(order="stable")` kept those that survived in front, or `AppendMode` those that came first."""
        ranks = [citation.rank for citation in self.citations]
        return all(rank is None for rank in ranks) or (
            None not in ranks and ranks == sorted(ranks, key=lambda r: r or 0)
        )

    @property
    def has_context(self) -> bool:
        """Whether anything usable was retrieved; if not, the model was told so."""
        return bool(self.citations)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer is complete. Always the last event."""

    at_s: float
    answer: Answer


Event: TypeAlias = (
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
    | TokensGenerated
    | Answered
)
