"""How a session stands."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session holds, and what became of its data."""

    version: int
    """Of the data that questions are answered from at once."""
    num_appended: int
    num_waiting: int
    """Chunks that are neither in the prompt nor being computed yet."""
    num_dropped: int
    """Chunks that never were: more came than could be taken in."""
    num_slid: int
    """Chunks that were, and have gone for newer ones."""
    num_tokens: int
    """Of head and data."""
    num_frozen_tokens: int
    """Of the head."""
    window_tokens: int
    """Most that the data may take."""
    num_failures: int
    """How often the engine gave the stream up."""
