"""What a scheduling decision may know of a request."""

from typing import NamedTuple

from streamrag.core import RequestClass


class RequestView(NamedTuple):
    """A request at one moment. Immutable; a named tuple, because a busy engine makes hundreds per step.

    Times are in seconds on the engine's clock.
    """

    request_id: str
    arrival_s: float
    """When the request was opened."""
    last_chunk_s: float
    """When its newest chunk arrived; the arrival for a request that is not streamed."""
    num_tokens: int
    """Tokens whose KV is wanted: the prompt known so far, and the output. A partial prompt leaves out its last token,
    which is computed when the prompt is complete."""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is computed, or being computed."""
    num_blocks: int = 0
    """KV blocks held."""
    num_cached_tokens: int = 0
    """Leading tokens that the prefix cache could provide, if the policy asks for it; else 0."""
    is_complete: bool = True
    """Whether the prompt is complete. False while chunks may still come."""
    has_output: bool = False
    """Whether a token has been sampled: a reader is watching."""
    is_idle: bool = False
    """Whether it waits for its next chunk: nothing to compute, perhaps KV to lose."""
    is_running: bool = False
    """Whether it holds a sequence slot."""
    expected_complete_s: float | None = None
    """When the retriever expects the prompt to be complete, if it said so."""
    source_name: str = ""
    """Name of the retriever that its chunks come from, as the client calls it."""
    was_evicted: bool = False
    """Whether it has lost KV to others before."""
    num_kept_tokens: int = 0
    """Leading tokens whose KV it has lost to host memory, and may have back; 0 if it holds KV."""
    num_step_tokens: int | None = None
    """Most tokens of it in one step while its prompt is partial; see `Pace.num_before_replaced`. None for no limit."""
    is_speculative: bool = False
    """Whether the prompt is partial and its next chunk is likely to replace a good part of it."""
    request_class: RequestClass = "pool"
    """Urgency class of the request."""
    since_s: float = 0.0
    """Since when it has had something to compute; chunks that come before the last one is computed change nothing."""
    num_answer_tokens: int = 0
    """Tokens that may still be sampled."""
    has_claim: bool = False
    """Whether it has been taken into the budget; see `planning.Budget`."""

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to compute, or to be had back."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_likely_tokens(self) -> int:
        """Tokens that are likely to be computed: had back, the others take hardly any time."""
        return self.num_tokens - max(self.num_computed_tokens, self.num_kept_tokens)
