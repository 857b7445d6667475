"""The theory of k-LPM: prompts that form a tree, the bounds of its theorem, and LPM as the paper has it.

    user 0 ─┬─ doc 0        a prompt is a path: one of n / k users, whose prefix k prompts share,
            └─ doc 1        and a document of its own
    user 1 ─┬─ doc 2
            └─ doc 3

Source: arXiv 2502.04677, definitions 2 and 4, theorem 2.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from streamrag.engine.costs.step_profiles import StepProfile, recompute_s
from streamrag.engine.policies import LongestPrefixPolicy
from streamrag.engine.request import RequestView
from streamrag.trace.values import Trace, TracedChunk, TracedQuery, TracedUpdate
from streamrag_bench.workload import NUM_TAIL_TOKENS


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a tree."""

    num_prompts: int
    num_repeats: int
    """Prompts of one user."""
    num_user_tokens: int
    num_doc_tokens: int
    """With the question, which stands behind the document."""

    def __post_init__(self) -> None:
        assert self.num_prompts % self.num_repeats == 0, "each user has equally many prompts"
        assert self.num_doc_tokens > NUM_TAIL_TOKENS, "the question is a part of the document"

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_user_tokens + self.num_doc_tokens

    @property
    def num_distinct_tokens(self) -> int:
        """Of all prompts together: the sum of the tree's edges."""
        num_users = self.num_prompts // self.num_repeats
        return num_users * self.num_user_tokens + self.num_prompts * self.num_doc_tokens


def tree(shape: Shape, seed: int) -> Trace:
    """The prompts in a random order, a second apart. Each is there as a whole when its query arrives."""
    users = [number // shape.num_repeats for number in range(shape.num_prompts)]
    random.Random(f"tree {seed}").shuffle(users)
    num_doc_tokens = shape.num_doc_tokens - NUM_TAIL_TOKENS
    queries = []
    for number, user in enumerate(users):
        chunks = (TracedChunk(f"user {user}", shape.num_user_tokens), TracedChunk(f"doc {number}", num_doc_tokens))
        queries.append(TracedQuery(f"q{number}", float(number), "", (TracedUpdate(0.0, chunks),), end_s=0.0))
    return Trace(tuple(queries))


@dataclass(frozen=True, slots=True)
class Theorem:
    """Theorem 2, with its letters: all times in seconds, so that a user takes u, and a document d."""

    n: int
    u: float
    d: float
    s: float
    """Between two arrivals."""
    T: float
    """When the queue starts to be processed. The theorem asks for T >= sn: all have arrived."""

    @classmethod
    def of(cls, shape: Shape, profile: StepProfile, budget: int, rate: float, starts_at_s: float) -> "Theorem":
        """What a user and a document take is what the profile says of prompts that are alone on the engine."""
        doc_s = recompute_s(profile, shape.num_user_tokens, shape.num_prompt_tokens, budget)
        whole_s = recompute_s(profile, 0, shape.num_prompt_tokens, budget)
        return cls(shape.num_prompts, whole_s - doc_s, doc_s, 1 / rate, starts_at_s)

    def k_lpm(self, k: int) -> float:
        """No TTFT is longer, whatever the order of arrival, if each user has k prompts.

        The proof takes for granted that `s` is at most u + kd; else it does not hold.
        """
        return self.T + self.n * (self.u / k + self.d - self.s / k)

    def fcfs(self) -> float:
        """The longest TTFT comes near this or is longer, for large n."""
        return self.T + self.n * (self.u + self.d - self.s)

    def lpm(self, num_repeats: int) -> float:
        """Likewise, if ties are broken at random."""
        return self.T + self.n * (self.u / num_repeats + self.d)


class TieBlindPolicy(LongestPrefixPolicy):
    """LPM that draws among equally long prefixes anew at each step, as theorem 2 has it; ours takes the oldest."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(float("inf"))
        self._rng = random.Random(f"ties {seed}")

    def order(self, requests: Sequence[RequestView], now_s: float) -> list[RequestView]:
        ordered = super().order(requests, now_s)
        first = [r for r in ordered if r.has_output or r.is_running]
        waiting = ordered[len(first) :]
        self._rng.shuffle(waiting)
        return first + sorted(waiting, key=lambda r: -max(r.num_computed_tokens, r.num_cached_tokens))
