"""How a session stands."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogState:
    """How a session's log stands."""

    is_resumed: bool = False
    """Whether it was there when the session was opened."""
    is_torn: bool = False
    """Whether its last line was not finished then, as when its process was killed; that line is gone."""
    flushed: int = 0
    """The version that is on the disk, with all before it."""
    num_failures: int = 0
    """How often the disk did not take what was to be written."""
    error: str | None = None
    """Why it does not, at the moment. The session goes on, and it is tried again."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session holds, and what became of its data."""

    version: int
    """Of the data that questions are answered from at once."""
    num_appended: int
    """Chunks, and system texts that took another's place: the newest version."""
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
    log: LogState | None = None
    """None without one."""
