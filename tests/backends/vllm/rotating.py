"""A scheduler for the tests on a real engine. It is made in the engine's own process, from its name."""

from typing import Any

from vllm.v1.request import Request

from streamrag.backends.vllm.scheduler.hooks import StreamingScheduler
from streamrag.backends.vllm.scheduler.kv import replacement
from streamrag.core import common_prefix_len
from streamrag.engine import make_policy

POLICIES = ["arrival", "fcfs", "lcas", "lcas_oldest", "mcps", "k_lpm(2)", "srpf"]
STEPS_PER_POLICY = 10
STALE, TRUE = "keep a stale block", "keep what is true"
"""Requests with these ids switch a fault on and off."""


class RotatingScheduler(StreamingScheduler):
    """Takes another policy every few steps, so that one engine serves under all of them."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        turn = self.current_step // STEPS_PER_POLICY
        if self.current_step % STEPS_PER_POLICY == 0:
            policy = make_policy(POLICIES[turn % len(POLICIES)])
            self.plugin.planner.policy = self.plugin.estimates.policy = policy
        return super().schedule(throttle_prefills)

    def add_request(self, request: Request) -> None:
        if request.request_id.startswith((STALE, TRUE)):  # vLLM's client appends to it
            replacement.common_prefix_len = (
                self._too_much if request.request_id.startswith(STALE) else common_prefix_len
            )
        super().add_request(request)

    def _too_much(self, old: list[int], new: list[int], start: int = 0) -> int:
        """A block of the KV of the old prompt more than is true."""
        return min(common_prefix_len(old, new, start) + self.block_size, len(old), len(new))
