"""The share of a pipeline's places that queries ahead may take, and their counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class QueriesAhead:
    """The counts of a pipeline's queries ahead, of which at most half as many run as the pipeline has places."""

    max_running: int
    """Most of them that run at the same time."""
    num_running: int = 0
    """Number that run, of questions that are not committed yet."""
    num_begun: int = 0
    num_used: int = 0
    """Number that have become the query of a committed question."""
    num_unused_tokens: int = 0
    """Number of prompt tokens that were computed for the others."""

    def may_begin(self) -> bool:
        """Whether one more may run."""
        return self.num_running < self.max_running

    def begin(self) -> None:
        """Count one that has begun."""
        self.num_running += 1
        self.num_begun += 1

    def use(self) -> None:
        """Count one whose question was committed."""
        self.num_running -= 1
        self.num_used += 1

    def drop(self, num_tokens: int) -> None:
        """Count one that was stopped after `num_tokens` prompt tokens were computed for it."""
        self.num_running -= 1
        self.num_unused_tokens += num_tokens
