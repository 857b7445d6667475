"""vLLM's request, extended for streamed prompts."""

import sys
from dataclasses import dataclass

from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.core import RequestClass
from streamrag.engine import RequestView
from streamrag.engine.drafts import AnswerDraft
from streamrag.engine.recompute_or_swap import CostComparison
from streamrag.records import ChunkRecord, RequestOutcome, RequestRecord

NEVER_LEFT = sys.maxsize  # free blocks when a request was left without memory, if it never was

OUTCOMES: dict[RequestStatus, RequestOutcome] = {
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_ERROR: "failed",
}


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """A chunk that has replaced its stream's prompt, or has made it, and what it replaced."""

    record: ChunkRecord
    source_name: str
    num_old: int = 0  # tokens of the prompt before; 0 for the first chunk
    gap_s: float = 0.0  # time since the chunk before


def has_prompt_logprobs(request: Request) -> bool:
    """Whether log-probabilities of the prompt are requested. The model runner collects these step by step."""
    params = request.sampling_params
    return params is not None and (params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None)


class StreamRequest(Request):
    """A request whose prompt may be partial. Plain requests are converted too; their prompt is complete.

    The last token of a partial prompt is hidden from the scheduler but not from the model runner. The model runner
    therefore sees an unfinished prefill and samples nothing, and a final chunk always leaves one token to compute.
    Where vLLM keeps states of Mamba layers only at the ends of blocks, all tokens after the last such end are hidden.
    """

    is_complete: bool
    is_stream: bool
    arrival_s: float
    last_chunk_s: float
    since_s: float  # time since which the request has had tokens to compute
    expected_complete_s: float | None = None
    source_name: str = ""
    request_class: RequestClass = "pool"
    is_replaced: bool = False  # whether its source is known to replace chunks that it has sent
    prefill_unit: int = 1  # a partial prompt is computed up to a multiple of this many tokens
    num_step_tokens: int | None = None  # most tokens in one step while the prompt is partial; None for no limit
    num_messages: int = 1
    num_acknowledged: int = 0  # chunks that have been acknowledged. vLLM's client expects exactly one finish per chunk
    step_end: int | None = None
    """Tokens computed by the end of the step being planned, if the step computes only a part; else None."""
    awaits_connector: bool = False  # whether the last step had no tokens for it because of a third-party KV connector
    num_free_when_left: int = NEVER_LEFT  # free blocks when its load did not fit; until there are more, it awaits
    num_loaded_tokens: int = 0  # tokens that the step that last admitted the request loads from host memory
    released_blocks: set[int]  # device blocks that the request lost and wants back; some may hold other KV by now
    was_evicted: bool = False  # whether the request has ever lost KV to others
    num_kept_tokens: int = 0  # leading prompt tokens whose KV went to host memory in the last eviction
    num_blocks_claimed: int | None = None  # blocks claimed of the KV budget; None without a claim
    draft: AnswerDraft | None = None  # a guess of the answer, verified while it is sampled
    comparison: CostComparison | None = None
    """The choice between dropping and saving its KV, set while an eviction is being planned."""
    view: RequestView | None = None  # the cached view of the request; None after a change
    log: RequestLog
    record: RequestRecord | None = None  # the final record; None until the request ends

    @classmethod
    def adopt(cls, request: Request, chunk: PromptMessage | None, arrival_s: float, now_s: float) -> "StreamRequest":
        """Convert `request`, which the scheduler has not seen yet, in place, and turn vLLM's own streaming off.

        Changing the class keeps all that vLLM has set up. A plain request counts as one chunk.
        """
        request.__class__ = cls
        assert isinstance(request, cls)
        request.is_stream = chunk is not None
        request.is_complete = chunk is None or chunk.is_complete
        # vLLM would have a resumable request wait for more input after its answer.
        request.resumable = False
        request.arrival_s = request.last_chunk_s = request.since_s = arrival_s
        if chunk is not None:
            request.expected_complete_s = chunk.expected_complete_s
            request.source_name = chunk.source_name
            request.request_class = chunk.request_class
        request.released_blocks = set()
        request.log = RequestLog(request.request_id, request.is_stream, arrival_s, now_s)
        return request

    def drop_grammar(self) -> None:
        """Do not wait for the grammar of a first chunk. Compiling it now makes vLLM's cache have it at the end."""
        self.structured_output_request = None
        self.status = RequestStatus.WAITING

    def take_grammar(self, chunk: Request) -> None:
        """Constrain the answer by the grammar of `chunk`, if that is the last one. vLLM waits until it is compiled."""
        if self.is_complete and chunk.use_structured_output:
            self.structured_output_request = chunk.structured_output_request
            self.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def limit_answer(self, max_tokens: int, max_model_len: int) -> None:
        """Set `max_tokens`, or what the model's length leaves beside the prompt if that is less, but at least 1."""
        self.max_tokens = max(min(max_tokens, max_model_len - self.num_prompt_tokens), 1)

    def propose_tokens(self, most: int) -> int:
        """Propose at most `most` tokens of the draft for the next step, and no more than the answer may still have.

        They replace earlier ones. Returns their number; without a draft, changes nothing and returns 0.
        """
        if self.draft is None:
            return 0
        most = min(most, self.max_tokens - self.num_output_tokens - 1)  # the model's own token follows them
        self.spec_token_ids = self.draft.next_tokens(self._output_token_ids, most)
        self.view = None
        return len(self.spec_token_ids)

    def end(self, now_s: float) -> RequestRecord:
        """Make the final record, by the request's status, and keep it in `record`."""
        outcome = OUTCOMES.get(self.status, "finished")
        self.record = self.log.end(outcome, now_s, self.num_prompt_tokens, self.num_output_tokens)
        return self.record

    def end_step_at(self, end: int) -> None:
        """Have the step being planned end at token `end`: cut the proposed tokens, or set `step_end` in the prompt."""
        num_known = self.num_all_tokens
        self.spec_token_ids = self.spec_token_ids[: max(end - num_known, 0)]
        if end < num_known:
            self.step_end = end

    @property
    def num_tokens(self) -> int:
        """Number of tokens shown to the scheduler: up to `step_end`, or all but a hidden end of a partial prompt."""
        if self.step_end is not None:
            return self.step_end
        num_tokens = len(self._all_token_ids)
        return num_tokens if self.is_complete else (num_tokens - 1) // self.prefill_unit * self.prefill_unit

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that can be computed now. One per decode step, even if the previous token is still being sampled."""
        return self.num_tokens + self.num_output_placeholders - self.num_computed_tokens

    @property
    def num_all_tokens(self) -> int:
        """Tokens of prompt and answer, including a hidden one."""
        return len(self._all_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the request has output and no prompt left to compute."""
        return bool(self._output_token_ids) and not self.is_prefill_chunk

    @property
    def ends_in_flight(self) -> bool:
        """Whether a step in flight samples the last token of the answer, so that vLLM computes nothing more for it."""
        num_sampling = self.num_output_placeholders
        # As in vLLM's `schedule`: the computed tokens include all that are being sampled but the newest.
        num_at_least = self.num_computed_tokens + 1 - (num_sampling - 1)
        return num_sampling > 0 and num_at_least >= self.num_prompt_tokens + self.max_tokens

    @property
    def can_start(self) -> bool:
        """Whether this is a complete prompt without KV, no draft, that the last plan could choose."""
        view = self.view
        return view is not None and view.is_complete and not view.num_blocks and not view.is_draft

    @property
    def takes_chunks(self) -> bool:
        """Whether a chunk with this request's id belongs to it."""
        return self.is_stream and not self.is_finished()

    @property
    def has_output(self) -> bool:
        """Whether a token has been sampled, or is being sampled."""
        return bool(self._output_token_ids) or self.num_output_placeholders > 0

    @property
    def adapter_id(self) -> int | None:
        return self.lora_request.lora_int_id if self.lora_request else None

    def make_view(self, num_blocks: int, is_idle: bool) -> RequestView:
        """Return the view of this request, with `num_blocks` KV blocks, as the planner sees it."""
        return RequestView(
            request_id=self.request_id,
            arrival_s=self.arrival_s,
            last_chunk_s=self.last_chunk_s,
            num_tokens=self.num_tokens_with_spec + self.num_output_placeholders,
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
            adapter_id=self.adapter_id,
            num_answer_tokens=max(self.max_tokens - self.num_output_tokens, 0),
            has_claim=self.num_blocks_claimed is not None,
        )
