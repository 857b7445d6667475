"""Who comes while a step computes can be in the next one, if that is not planned yet."""

from collections.abc import Callable

from streamrag.engine.rules.rule import LateRule
from streamrag.engine.rules.sized_steps import SizedSteps
from streamrag.engine.walk import Walk


class LateBinding(LateRule):
    """Puts off a step of partial prompts, or a long one, while another step computes.

    Nobody waits for partial prompts, and one that becomes complete before the step starts would wait for its end.

    is_early: returns whether a step computes prompts now, so that there is time.
    sized: says which steps of complete prompts are long; None if no step is.
    """

    __slots__ = ("_is_early", "_sized")

    def __init__(self, is_early: Callable[[], bool], sized: SizedSteps | None = None) -> None:
        self._is_early = is_early
        self._sized = sized

    def is_better_late(self, walk: Walk) -> bool:
        if walk.num_ahead or not self._is_early():
            return False
        if not any(grant.request.is_complete for grant in walk.grants):
            return True
        return self._sized is not None and self._sized.is_long(walk.grants)
