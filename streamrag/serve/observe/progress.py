"""The progress of one query, which observers count, trace, log and show."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamrag.telemetry import (
    Answer,
    ChunkArrived,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    Event,
    PrefillProgressed,
    RetrievalStarted,
    TokensGenerated,
)

Phase: TypeAlias = Literal["queued", "retrieving", "prefilling", "answering"]


@dataclass(slots=True)
class QueryProgress:
    """The progress of one query of any protocol. Times are seconds since its admission."""

    phase: Phase = "queued"
    """Queued: admitted, but not begun. Prefilling: the context is complete, and there is no token of the answer yet."""
    queued_s: float | None = None
    """Time at which retrieval began, or the first prompt went to the engine. All times are None before they come."""
    first_chunk_s: float | None = None
    retrieval_s: float | None = None
    """Time at which the context was complete."""
    ttft_s: float | None = None
    num_chunks: int = 0
    num_skipped: int = 0
    """Number of documents that the source could not use."""
    num_prompts: int = 0
    """Number of prompts that went to the engine."""
    num_updates: int = 0
    """Number of prompts that replaced something of the prompt before."""
    num_prompt_tokens: int = 0
    """Length of the newest prompt."""
    num_shared: int = 0
    """Number of tokens that prompts shared with the prompt before, over all prompts."""
    num_invalidated: int = 0
    """Number of tokens that the next prompt replaced, over all prompts."""
    num_prefilled: int = 0
    """Number of leading tokens of the newest prompt whose KV is known to be there."""
    num_output_tokens: int = 0

    def follow(self, event: Event) -> None:
        """Update the progress by an event."""
        match event:
            case TokensGenerated():
                self.num_output_tokens += len(event.token_ids)
                if self.ttft_s is None and (event.token_ids or event.text):
                    self.ttft_s = event.at_s
                    self.phase = "answering"
                    self.num_prefilled = self.num_prompt_tokens
            case PrefillProgressed():
                self.num_prefilled = event.num_tokens
            case ContextChanged():
                self._begin(event.at_s)
                self.num_prompts += 1
                self.num_updates += event.num_invalidated > 0
                self.num_prompt_tokens = event.num_tokens
                self.num_shared += event.num_shared
                self.num_invalidated += event.num_invalidated
                self.num_prefilled = min(self.num_prefilled, event.num_shared)
            case ChunkArrived():
                self.num_chunks += 1
                if self.first_chunk_s is None:
                    self.first_chunk_s = event.at_s
            case ContextComplete():
                self._begin(event.at_s)
                self.retrieval_s = event.at_s
                self.phase = "prefilling"
            case RetrievalStarted():
                self._begin(event.at_s)
            case DocumentSkipped():
                self.num_skipped += 1

    def end(self, answer: Answer | None) -> None:
        """Take the times of an answer, which are more precise."""
        if answer is not None:
            timings = answer.timings
            self.queued_s, self.first_chunk_s = timings.queued_s, timings.first_chunk_s
            self.retrieval_s, self.ttft_s = timings.retrieval_s, timings.ttft_s

    @property
    def ttft_after_retrieval_s(self) -> float | None:
        """Seconds from the end of retrieval to the first token."""
        return None if self.ttft_s is None or self.retrieval_s is None else self.ttft_s - self.retrieval_s

    def _begin(self, at_s: float) -> None:
        if self.queued_s is None:
            self.queued_s = at_s
            self.phase = "retrieving"
