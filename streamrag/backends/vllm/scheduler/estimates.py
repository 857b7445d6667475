"""Estimates learned from steps and chunks while the engine runs."""

import math

from streamrag.backends.vllm.scheduler.request import PromptUpdate, StreamRequest
from streamrag.backends.vllm.scheduler.request_log import HostClock
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.engine import Pace, Policy
from streamrag.engine.drafts import DraftSurvival
from streamrag.engine.forecast import ChunkForecast
from streamrag.engine.step_size import StepCostEstimator


class Estimates:
    """Speed of steps, rate of complete prompts, and behavior of each source's chunks."""

    def __init__(self, options: EngineOptions, *, clock: HostClock, policy: Policy) -> None:
        self.forecast = ChunkForecast()
        self.step_costs = StepCostEstimator()
        self.pace = Pace(options.num_partial_tokens, options.partial_step_s)
        self.survival = DraftSurvival()
        self._clock = clock
        self.policy = policy

    def on_step(self, num_tokens: int, num_pairs: float, duration_s: float) -> None:
        """Learn the speed and the costs of steps from one step, and report the new speed to the policy.

        For `num_pairs`, see `StepCostEstimator.observe_step`.
        """
        self.pace.observe(num_tokens, duration_s)
        if num_tokens:
            self.step_costs.observe_step(num_tokens, num_pairs, duration_s)
        if self.pace.tokens_per_s:
            self.policy.on_speed(self.pace.tokens_per_s)

    def on_complete(self) -> None:
        self.step_costs.observe_complete(self._clock.monotonic())

    def on_end(self, request: StreamRequest) -> None:
        """Learn how many tokens a draft sampled itself, or how many of its draft's tokens an answer accepted."""
        if request.request_class == "draft":
            self.survival.on_draft(request.num_output_tokens - request.log.num_accepted)
        elif request.draft is not None and not request.draft.is_empty:
            self.survival.on_answer(request.log.num_accepted)

    def on_chunk(self, stream: StreamRequest, update: PromptUpdate) -> None:
        """Learn from a chunk how its source's chunks come, unless it follows a prompt of another source, as a head is.
        Set the stream's `source_name`, `is_replaced` and `num_step_tokens`."""
        follows_its_own = update.num_old > 0 and stream.source_name == update.source_name
        stream.source_name = update.source_name
        if follows_its_own:
            self.forecast.observe(update.source_name, update.gap_s, update.record.num_shared / update.num_old)
        replaced_every_s = self.forecast.replaced_every_s(stream.source_name)
        stream.is_replaced = replaced_every_s < math.inf
        costs = self.step_costs.at(self._clock.monotonic())
        stream.num_step_tokens = self.pace.num_step_tokens(replaced_every_s, costs.overhead if costs else None)
