"""Schedulers for the tests on a real engine. They are made in the engine's own process, from their names."""

from typing import Any

from streamrag.backends import prompts
from streamrag.backends.scheduler import StreamingScheduler
from streamrag.engine import make_policy

POLICIES = ["arrival", "fcfs", "lcas", "lcas_oldest", "mcps", "k_lpm(2)", "srpf"]
STEPS_PER_POLICY = 10


class RotatingScheduler(StreamingScheduler):
    """Takes another policy every few steps, so that one engine serves under all of them."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        turn = self.current_step // STEPS_PER_POLICY
        if self.current_step % STEPS_PER_POLICY == 0:
            self.streaming_policy = make_policy(POLICIES[turn % len(POLICIES)])
        return super().schedule(throttle_prefills)


class StaleScheduler(RotatingScheduler):
    """Keeps a block too much of the KV of an old prompt."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        true_lcp, block_size = prompts.common_prefix_len, self.block_size

        def too_much(old: list[int], new: list[int], start: int = 0) -> int:
            return min(true_lcp(old, new, start) + block_size, len(old), len(new))

        prompts.common_prefix_len = too_much
