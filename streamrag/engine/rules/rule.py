"""The base classes of rules."""

from abc import abstractmethod
from collections.abc import Iterable

from streamrag.engine.walk import Candidate, Wait, Walk


class Rule:
    """A reason why a request gets fewer tokens than it could, or waits. Only waiting is reported as a hold.

    `start` resets its state for each plan; only `Turns` remembers whose turn is next.
    """

    asks_complete = True
    """Whether the rule applies to complete prompts."""
    asks_partial = True
    """Whether the rule applies to partial prompts."""
    is_waived_if_nothing_runs = False
    """Whether the rule is left out where a step would otherwise compute nothing."""

    def start(self, walk: Walk) -> None:
        """Reset the rule's state for a new plan, before the first request."""

    def ask(self, candidate: Candidate) -> Wait | None:
        """Return how `candidate` has to wait; None if it may compute. May change the limits that `candidate` has."""
        return None

    def ask_measured(self, candidate: Candidate) -> Wait | None:
        """Answer as `ask`, once all rules have limited its tokens: `num_missing` is known, and `num_allowed` fixed."""
        return None

    def on_grant(self, candidate: Candidate) -> None:
        """Record that `candidate` was granted its `num_allowed` tokens."""

    def puts_off_step(self, walk: Walk) -> bool:
        """Whether to compute nothing now, and to plan the step when the step in flight has ended."""
        return False


class TokenRule(Rule):
    """A rule that limits how many tokens a request computes in this step."""

    @abstractmethod
    def most_tokens(self, candidate: Candidate) -> float:
        """Return the most tokens that `candidate` may compute; it waits if that is 0 or less."""

    def ask(self, candidate: Candidate) -> Wait | None:
        """Lower the candidate's `num_allowed` to `most_tokens`; return `Wait.SKIP` if that is 0 or less."""
        most = self.most_tokens(candidate)
        if most < candidate.num_allowed:
            candidate.num_allowed = int(most)
        return Wait.SKIP if most <= 0 else None


class RuleList:
    """Rules in the order in which they are asked, listed once by the questions that they answer."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        rules = tuple(rules)
        self.that_start = _rules_with_own(rules, "start")
        complete, partial = [r for r in rules if r.asks_complete], [r for r in rules if r.asks_partial]
        self.for_complete = _rules_with_own(complete, "ask"), _rules_with_own(complete, "ask_measured")
        self.for_partial = _rules_with_own(partial, "ask"), _rules_with_own(partial, "ask_measured")
        """Rules that are asked before the blocks that a request needs are measured, and those that are asked after."""
        self.that_observe = _rules_with_own(rules, "on_grant")
        self.that_put_off = _rules_with_own(rules, "puts_off_step")
        strict = [rule for rule in rules if not rule.is_waived_if_nothing_runs]
        self.if_nothing_runs = self if len(strict) == len(rules) else RuleList(strict)
        """The rules without those that are waived where a step would otherwise compute nothing."""


def _rules_with_own(rules: Iterable[Rule], question: str) -> list[Rule]:
    """Return the rules whose class has a method `question` of its own."""
    return [rule for rule in rules if getattr(type(rule), question) is not getattr(Rule, question)]
