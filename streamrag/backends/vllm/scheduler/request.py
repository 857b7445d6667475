"""vLLM's request, extended by what streaming needs."""

from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.core import RequestClass
from streamrag.engine import RequestView
from streamrag.engine.swapping import Comparison
from streamrag.records import Outcome, RequestRecord

OUTCOMES: dict[RequestStatus, Outcome] = {
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_ERROR: "failed",
}


def has_prompt_logprobs(request: Request) -> bool:
    """Whether log-probabilities of the prompt are asked for, which the model runner collects step by step."""
    params = request.sampling_params
    return params is not None and (params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None)


class StreamRequest(Request):
    """A request whose prompt may be partial. Plain requests become one too, with a prompt that is complete.

    While the prompt is partial its last token is hidden from the scheduler, but not from the model runner, which
    therefore sees an unfinished prefill and samples nothing. Whatever the last chunk is, one token is left to compute.
    """

    is_complete: bool
    is_stream: bool
    arrival_s: float
    last_chunk_s: float
    since_s: float
    """Time since which it has had something to compute."""
    expected_complete_s: float | None = None
    source_name: str = ""
    request_class: RequestClass = "pool"
    is_replaced: bool = False
    """Whether its source is known to replace what it has sent."""
    num_step_tokens: int | None = None
    """Most tokens in one step while its prompt is partial; None for no limit of its own."""
    num_messages: int = 1
    num_acknowledged: int = 0
    """Chunks for which the client has been sent a finish. It expects exactly one each."""
    step_end: int | None = None
    """Tokens that are computed after the step that vLLM plans, if that computes only some; else None."""
    num_loaded_tokens: int = 0
    """Tokens that the step for which it was admitted last loads from host memory."""
    released_blocks: set[int]
    """Device blocks that it had to give up and wants back; some may hold something else by now."""
    was_evicted: bool = False
    """Whether it has lost KV to others."""
    num_kept_tokens: int = 0
    """Leading tokens of its prompt whose KV went to host memory when it was evicted last."""
    num_blocks_claimed: int | None = None
    """Blocks claimed of the budget; None while it has no part in that."""
    comparison: Comparison | None = None
    """Decides what becomes of its KV, while it is about to be evicted."""
    view: RequestView | None = None
    """The last view of it; None when it has changed since."""
    log: RequestLog
    record: RequestRecord | None = None
    """The record of its log; None as long as the request lives."""

    @classmethod
    def adopt(cls, request: Request, chunk: PromptMessage | None, sent_s: float, now_s: float) -> "StreamRequest":
        """Make `request`, which nobody else has seen yet, one of ours. A plain one was sent at `sent_s`.

        vLLM creates its requests before any scheduler sees them; changing the class keeps all that it has set up.
        """
        request.__class__ = cls
        assert isinstance(request, cls)
        if chunk is not None:
            sent_s = now_s if chunk.arrival_s is None else chunk.arrival_s
        arrival_s = min(sent_s, now_s)
        request.is_stream = chunk is not None
        request.is_complete = chunk is None or chunk.is_complete
        # One of vLLM's own streaming sessions would wait for more input after its answer.
        request.resumable = False
        request.arrival_s = request.last_chunk_s = request.since_s = arrival_s
        if chunk is not None:
            request.expected_complete_s = chunk.expected_complete_s
            request.source_name = chunk.source_name
            request.request_class = chunk.request_class
        request.released_blocks = set()
        request.log = RequestLog(request.request_id, request.is_stream, arrival_s, now_s)
        return request

    def end(self, now_s: float) -> RequestRecord:
        """Make the record of a request whose status is final."""
        outcome = OUTCOMES.get(self.status, "finished")
        self.record = self.log.end(outcome, now_s, self.num_prompt_tokens, self.num_output_tokens)
        return self.record

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids) - (not self.is_complete) if self.step_end is None else self.step_end

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that can be computed now; one for each step of a decode, also if its last token is still unknown."""
        return self.num_tokens + self.num_output_placeholders - self.num_computed_tokens

    @property
    def num_held_tokens(self) -> int:
        """Tokens of prompt and answer, a hidden one included."""
        return len(self._all_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether it has output, and no prompt left to compute."""
        return bool(self._output_token_ids) and not self.is_prefill_chunk

    @property
    def takes_chunks(self) -> bool:
        """Whether chunks that come under its id are its own."""
        return self.is_stream and not self.is_finished()

    @property
    def has_output(self) -> bool:
        """Whether a token has been sampled, or is being."""
        return bool(self._output_token_ids) or self.num_output_placeholders > 0

    def make_view(self, num_blocks: int, is_idle: bool) -> RequestView:
        return RequestView(
            request_id=self.request_id,
            arrival_s=self.arrival_s,
            last_chunk_s=self.last_chunk_s,
            num_tokens=self.num_tokens + self.num_output_placeholders,
            num_computed_tokens=self.num_computed_tokens,
            num_blocks=num_blocks,
            is_complete=self.is_complete,
            has_output=self.has_output,
            is_idle=is_idle,
            is_running=self.status == RequestStatus.RUNNING,
            expected_complete_s=self.expected_complete_s,
            source_name=self.source_name,
            was_evicted=self.was_evicted,
            num_kept_tokens=0 if num_blocks else self.num_kept_tokens,
            num_step_tokens=self.num_step_tokens,
            is_speculative=not self.is_complete and self.is_replaced,
            request_class=self.request_class,
            since_s=self.since_s,
            num_answer_tokens=max(self.max_tokens - self.num_output_tokens, 0),
            has_claim=self.num_blocks_claimed is not None,
        )
