"""Log-probabilities of prompts, as the model runners collect them step by step, and forget them.

V1  vllm/v1/worker/gpu_model_runner.py: num_prompt_logprobs, _get_prompt_logprobs_dict
V2  vllm/v1/worker/gpu/sample/prompt_logprob.py: PromptLogprobsWorker
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.oracle import OracleRunner, V2OracleRunner, fingerprint

__all__ = ["PromptLogprobs", "expected_logprobs"]

WRONG = -1
"""Stands for what was computed from KV that was not loaded."""


def expected_logprobs(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return what stands for the log-probabilities of all tokens but the first: the fingerprint up to each."""
    prefix = 0
    return tuple([prefix := fingerprint(prefix, token) for token in prompt][1:])


class PromptLogprobs(OracleRunner):
    """Collects them, mixed into a runner."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._collected: dict[str, dict[int, int]] = {}  # by the position of the token
        self._ended: dict[str, Any] = {}

    def update(self, step: SchedulerOutput) -> None:
        known = self.rows.keys() - step.finished_req_ids
        super().update(step)
        has_v2_runner = isinstance(self, V2OracleRunner)
        gone = step.finished_req_ids | ((step.preempted_req_ids or set()) if has_v2_runner else set())
        for request_id in gone:
            self._collected.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            wants = new.sampling_params is not None and new.sampling_params.prompt_logprobs is not None
            # The first runner goes on with what it knows; the second begins anew, but not if there is output already.
            begins = len(self.rows[new.req_id].tokens) == len(new.prompt_token_ids or ()) if has_v2_runner else True
            if wants and begins and (has_v2_runner or new.req_id not in known):
                self._collected[new.req_id] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._ended = {}
        output = super().execute(step)
        return replace(output, prompt_logprobs_dict=self._ended) if self._ended else output

    def _sample(self, request_id: str, num_tokens: int, *, is_wrong: bool) -> list[int]:
        collected = self._collected.get(request_id)
        if collected is not None:
            row = self.rows[request_id]
            end = min(row.num_computed + num_tokens, len(row.prompt) - 1)
            for position in range(row.num_computed + 1, end + 1):
                prefix = fingerprint(row.prefixes[position], row.prompt[position])
                collected[position] = WRONG if is_wrong else prefix
            if row.num_computed + num_tokens >= len(row.prompt):
                self._ended[request_id] = tuple(collected.get(i) for i in range(1, len(row.prompt)))
                del self._collected[request_id]
        return super()._sample(request_id, num_tokens, is_wrong=is_wrong)
