"""How many sessions may be open at once, of one tenant and of all."""

from collections.abc import Hashable
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from streamrag.errors import ConfigurationError, PipelineClosedError, TooManySessionsError
from streamrag.support.messages import is_whole, short


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of sessions that are open at once; None is no bound.

    Tokens are those that the windows may hold: a window counts as a whole, however full it is.

    Raises ConfigurationError for what is no whole number, or less than 0.
    """

    max_sessions: int | None = None
    max_sessions_per_tenant: int | None = None
    max_tokens: int | None = None
    max_tokens_per_tenant: int | None = None

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 0):
                raise ConfigurationError(f"{name}={short(value)} must be a whole number, 0 or more, or None")


class SessionBooks:
    """Which sessions are open, whose they are, and how many tokens their windows may hold."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._open: dict[Hashable, tuple[str, int]] = {}
        self._is_closed = False

    def close(self) -> list[Any]:
        """Refuse all further sessions, and return those that are open."""
        self._is_closed = True
        return list(self._open)

    def check(self, tenant: str, num_tokens: int, *, longest_window: float = inf) -> None:
        """Whether this tenant may open another. No window counts for more than the longest that there can be.

        :raises TooManySessionsError: there are as many as may be, or their windows hold as much.
        :raises PipelineClosedError: the pipeline was closed.
        """
        if self._is_closed:
            raise PipelineClosedError("the pipeline of this session has been closed: make a new one")
        limits = self._limits
        windows = [(whose, min(num, longest_window)) for whose, num in self._open.values()]
        own = [num for whose, num in windows if whose == tenant]
        for prefix, there, most, most_tokens in (
            ("client_", own, limits.max_sessions_per_tenant, limits.max_tokens_per_tenant),
            ("", [num for _, num in windows], limits.max_sessions, limits.max_tokens),
        ):
            whose = f" of {tenant!r:.80}" if prefix and tenant else ""
            if most is not None and len(there) >= most:
                what = f"{most:,} sessions{whose} are open, which is the most: close one"
                raise TooManySessionsError(what, f"{prefix}sessions")
            if most_tokens is not None and sum(there) + num_tokens > most_tokens:
                raise TooManySessionsError(
                    f"the windows of sessions{whose} hold {sum(there):,} tokens and this one {num_tokens:,}, where "
                    f"{most_tokens:,} is the most: close one, or ask for smaller window_tokens",
                    f"{prefix}session_tokens",
                )

    def put(self, session: Hashable, tenant: str, num_tokens: int) -> None:
        """It is open, whatever the limits; or has another window than was thought."""
        self._open[session] = tenant, num_tokens

    def remove(self, session: Hashable) -> None:
        """It is not open any more."""
        self._open.pop(session, None)
