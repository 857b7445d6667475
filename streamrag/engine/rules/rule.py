"""What a rule is: one reason why a request gets fewer tokens than it could, or waits.

A rule answers one question, and so has one of these bases:

    EvictionRule   may it take memory from others?
    TokenRule      how many tokens may it have?
    WaitRule       must it wait?
    ReserveRule    how many blocks must stay free beside it?
    LateRule       is the step better planned later?
"""

from abc import ABC, abstractmethod

from streamrag.engine.walk import Candidate, Wait, Walk


class Rule(ABC):
    """A rule of one plan. It may remember what it was told in this plan, and forgets it in `start`."""

    __slots__ = ()

    asks_complete = True
    asks_partial = True
    """Whether complete prompts, and partial ones, are asked."""
    only_saves_time = False
    """Whether it is left out where nobody could go on with it: it only keeps planning short."""

    def start(self, walk: Walk) -> None:  # noqa: B027 - most rules need nothing here
        """Look at the step before its first request."""

    @abstractmethod
    def ask(self, candidate: Candidate) -> Wait | None:
        """Return how `candidate` has to wait; None if this rule lets it pass."""

    def on_grant(self, candidate: Candidate) -> None:  # noqa: B027 - as above
        """Learn that `candidate` got its `num_allowed` tokens."""


class EvictionRule(Rule):
    """Says who may take memory from others. Without one, complete prompts may."""

    __slots__ = ()

    @abstractmethod
    def may_evict(self, candidate: Candidate) -> bool:
        """Return whether `candidate` may take memory from others."""

    def ask(self, candidate: Candidate) -> Wait | None:
        candidate.may_evict = self.may_evict(candidate)
        return None


class TokenRule(Rule):
    """Limits how many tokens a request has in this step."""

    __slots__ = ()

    @abstractmethod
    def most_tokens(self, candidate: Candidate) -> float:
        """Return the most tokens that `candidate` may have; it waits if that is none."""

    def ask(self, candidate: Candidate) -> Wait | None:
        most = self.most_tokens(candidate)
        if most < candidate.num_allowed:
            candidate.num_allowed = int(most)
        return Wait.SKIP if most <= 0 else None


class WaitRule(Rule):
    """Lets a request wait for something."""

    __slots__ = ()

    @abstractmethod
    def must_wait(self, candidate: Candidate) -> Wait | None:
        """Return how `candidate` has to wait; None if it need not."""

    def ask(self, candidate: Candidate) -> Wait | None:
        return self.must_wait(candidate)


class ReserveRule(Rule):
    """Keeps blocks free beside a request."""

    __slots__ = ()

    @abstractmethod
    def num_reserved(self, candidate: Candidate) -> int | None:
        """Return how many blocks must stay free if `candidate` computes; None if this rule keeps none for it."""

    def ask(self, candidate: Candidate) -> Wait | None:
        num_reserved = self.num_reserved(candidate)
        if num_reserved is None:
            return None
        candidate.num_reserved, candidate.held_by_memory = num_reserved, type(self).__name__
        # What it needs itself is asked at the end: that takes a while, and in most steps it would be for nothing.
        return Wait.MEMORY if candidate.walk.num_missing > -num_reserved else None


class LateRule(Rule):
    """Puts off a step. It asks no request."""

    __slots__ = ()

    asks_complete = asks_partial = False

    def ask(self, candidate: Candidate) -> Wait | None:
        return None

    @abstractmethod
    def is_better_late(self, walk: Walk) -> bool:
        """Return whether the step should be planned when the one under way has ended."""
