"""Model runners that compute nothing."""

from collections.abc import Callable, Sequence
from typing import Protocol

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.engine.costs.copy_costs import CopyCosts


class Runner(Protocol):
    """The part of a model runner that a simulated engine needs."""

    def copy(self, copies: HostCopies) -> KVConnectorOutput | None:
        """Copy between the device and host memory, before the step computes."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Return the output of one step. Steps are executed in the order in which they were scheduled."""


class BlindRunner:
    """Samples given tokens and checks nothing, for simulations of large loads. Follows vLLM's V1 runner.

    token: the token that is always sampled. Of a draft it accepts these tokens, up to the first other one.
    copy_costs: with these, reports include the duration of copies.
    token_at: returns the token of an answer, by request id and position, to be sampled instead of `token`.
    """

    def __init__(
        self,
        token: int = 1,
        copy_costs: CopyCosts | None = None,
        token_at: Callable[[str, int], int] | None = None,
    ) -> None:
        self.copy_costs = copy_costs
        self._token_at = token_at or (lambda request_id, position: token)
        self._num_prompt_tokens: dict[str, int] = {}

    def copy(self, copies: HostCopies) -> KVConnectorOutput | None:
        """Return a report that all is saved, with durations if there are `copy_costs`; None without any copies."""
        saves, loads, costs = copies.saves + copies.held_saves, copies.loads, self.copy_costs
        if not (saves or loads):
            return None
        report = CopyReport(saved=[slot for _, slot in saves])
        if costs is not None:
            report.num_blocks_out, report.num_blocks_in = len(saves), len(loads)
            report.out_s = costs.out_s(len(copies.saves)) + costs.out_s(len(copies.held_saves))
            report.in_s = costs.in_s(len(loads))
        return KVConnectorOutput(kv_connector_worker_meta=report)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Return sampled tokens for each request of which the step computes all missing tokens, none for the others."""
        for request_id in step.finished_req_ids:
            self._num_prompt_tokens.pop(request_id, None)
        counts = step.num_scheduled_tokens
        if not counts:
            return EMPTY_MODEL_RUNNER_OUTPUT
        num_missing: dict[str, int] = {}
        num_outputs: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self._num_prompt_tokens[new.req_id] = new.prompt_len
            num_missing[new.req_id] = new.prompt_len - new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, num_computed, num_output in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            num_missing[request_id] = self._num_prompt_tokens[request_id] + num_output - num_computed
            num_outputs[request_id] = num_output
        drafts = step.scheduled_spec_decode_tokens
        sampled = [
            self._sample(r, num_outputs.get(r, 0), drafts.get(r, ())) if n >= num_missing[r] else []
            for r, n in counts.items()
        ]
        return ModelRunnerOutput(list(counts), {r: i for i, r in enumerate(counts)}, sampled)

    def _sample(self, request_id: str, position: int, draft: Sequence[int]) -> list[int]:
        """Return the accepted tokens of the draft, and the one behind them."""
        sampled = [self._token_at(request_id, position)]
        for token in draft:
            if token != sampled[-1]:
                break
            sampled.append(self._token_at(request_id, position + len(sampled)))
        return sampled
