"""A scheduler and a worker for an engine on the CPU whose rejection sampler works as it does on a GPU.

It mends https://github.com/vllm-project/vllm/issues/55005 in the worker's process, so that a test can see whether our
use of the sampler changes the distribution.
"""

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

from streamrag.backends.vllm.scheduler.hooks import StreamingScheduler
from streamrag.backends.vllm.scheduler.step import StepPlanner


def expand(x: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Repeat each value of `x` for each token of its request."""
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


class MendedScheduler(StreamingScheduler):
    """Verifies drafts beside requests that sample at random."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        StepPlanner._can_verify_drafts = lambda self: True  # type: ignore[method-assign]


class MendedWorker:
    """An extension of vLLM's worker, which vLLM imports in the worker's process."""

    rejection_sampler.expand_batch_to_tokens = expand
