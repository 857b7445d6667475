"""Mean seconds of what is done again and again."""

from dataclasses import dataclass

DECAY = 0.8
"""Weight of all earlier observations at the next one."""


@dataclass(slots=True)
class MeanSeconds:
    """The mean seconds per unit of work, in which the newest observations count most.

    >>> prefill = MeanSeconds()
    >>> prefill.observe(100, 0.5)
    >>> prefill.seconds(200)
    1.0
    """

    amount: float = 0.0
    """Units of work that were observed, decayed; 0 before the first observation."""
    total_s: float = 0.0
    """Seconds that they took, decayed."""

    def observe(self, amount: float, seconds: float) -> None:
        """Record that `amount` units took `seconds`."""
        self.amount = DECAY * self.amount + amount
        self.total_s = DECAY * self.total_s + seconds

    def seconds(self, amount: float) -> float:
        """Return the seconds that `amount` units are expected to take; 0 before the first observation."""
        return amount * self.total_s / self.amount if self.amount else 0.0
