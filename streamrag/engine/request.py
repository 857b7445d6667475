"""The facts about a request, and about the KV memory, that scheduling decisions depend on."""

from typing import NamedTuple, Protocol

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
    """Tokens whose KV is wanted: the prompt so far and the output. A partial prompt leaves out its last token, which is
    computed when the prompt is complete."""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is computed or being computed."""
    num_blocks: int = 0
    """KV blocks held."""
    num_cached_tokens: int = 0
    """Leading tokens that the prefix cache could provide; 0 unless the policy has `needs_prefix_hits`."""
    is_complete: bool = True
    """Whether the prompt is complete: no more chunks will come."""
    has_output: bool = False
    """Whether a token has been sampled, so that a reader waits for the next one."""
    is_idle: bool = False
    """Whether it waits for its next chunk with nothing to compute. It may hold KV."""
    is_running: bool = False
    """Whether it holds a sequence slot."""
    expected_complete_s: float | None = None
    """When the retriever expects the prompt to be complete; None if it gave no hint."""
    source_name: str = ""
    """Name of the retriever that its chunks come from, as the client calls it."""
    was_evicted: bool = False
    """Whether it has been evicted before."""
    num_kept_tokens: int = 0
    """Leading tokens whose KV was evicted to host memory and can be loaded; 0 if it holds KV."""
    num_step_tokens: int | None = None
    """Most tokens of it in one step while its prompt is partial; see `Pace.num_step_tokens`. None for no limit."""
    is_speculative: bool = False
    """Whether the prompt is partial and its next chunk is likely to replace a good part of it."""
    request_class: RequestClass = "pool"
    """Urgency class of the request."""
    since_s: float = 0.0
    """Since when it has had tokens to compute without a break."""
    adapter_id: int | None = None
    """vLLM's number of its LoRA adapter; None without one."""
    num_answer_tokens: int = 0
    """Tokens that may still be sampled."""
    has_claim: bool = False
    """Whether its blocks are claimed in the KV budget; see `rules.KvBudget`."""

    @property
    def is_draft(self) -> bool:
        """Whether it drafts an answer whose context may still change, so that nobody waits for it."""
        return self.request_class == "draft"

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to compute or to load."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_likely_tokens(self) -> int:
        """Tokens that are likely to be computed. Loading the others from host memory takes hardly any time."""
        return self.num_tokens - max(self.num_computed_tokens, self.num_kept_tokens)


class Memory(Protocol):
    """The KV memory of an engine. Its methods may be costly, so a plan calls them only where the result matters."""

    num_free_blocks: int

    def num_present_tokens(self, request: RequestView) -> int:
        """Return how many leading tokens `request` need not compute: held, or available from the prefix cache."""

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        """Return how many free blocks `request` needs to compute `num_tokens` more."""

    def can_evict(self, request: RequestView) -> bool:
        """Whether evicting `request` frees its blocks at once: not if a step in flight may still write them."""

    def num_blocks_freed(self, request: RequestView) -> int:
        """Return how many blocks the eviction of `request` alone frees at least: those that no other request shares."""
