"""How many sessions may be open at once, of one tenant and of all."""

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Any

from streamrag.errors import PipelineClosedError, TooManySessionsError
from streamrag.support.validation import CountOrZero, validated


@validated
@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of sessions that are open at once; None is no bound.

    Tokens are those that the windows may hold: a window counts as a whole, however full it is.

    :raises ConfigurationError: a value is no whole number, or less than 0.
    """

    max_sessions: CountOrZero | None = None
    max_sessions_per_tenant: CountOrZero | None = None
    max_tokens: CountOrZero | None = None
    max_tokens_per_tenant: CountOrZero | None = None


class SessionBooks:
    """A register of open sessions: their tenants, and the tokens that their windows may hold."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._open: dict[Hashable, tuple[str, int]] = {}
        self._is_closed = False

    def close(self) -> list[Any]:
        """Refuse all further sessions, and return those that are open."""
        self._is_closed = True
        return list(self._open)

    def enter(self, session: Hashable, tenant: str, num_tokens: int) -> None:
        """Count a session that is opened.

        :raises TooManySessionsError, PipelineClosedError: there is no place for it; see `check`.
        """
        self.check(tenant, num_tokens)
        self.put(session, tenant, num_tokens)

    def check(self, tenant: str, num_tokens: int, *, longest_window: float = inf) -> None:
        """Check that this tenant may open another. No window counts for more than the longest that there can be.

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
        """Count a session, whatever the limits; or the tokens that its window turned out to have."""
        self._open[session] = tenant, num_tokens

    def remove(self, session: Hashable) -> None:
        """Forget a session that is closed."""
        self._open.pop(session, None)
