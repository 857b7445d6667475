"""Limits on the data that wait in a session, and on open sessions, per tenant and in total."""

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Any

from streamrag.errors import PipelineClosedError, TooManySessionsError
from streamrag.support.validation import CountOrZero, validated

MAX_WAITING = 4096
MAX_WAITING_CHARACTERS = 4_000_000
"""Default limits of the chunks that wait in a session's buffer for the engine, and of their characters."""


@validated
@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits on sessions that are open at the same time; None is no limit.

    Tokens are the capacity of the windows, however full they are.

    :raises ConfigurationError: a value is not a whole number of at least 0.
    """

    max_sessions: CountOrZero | None = None
    max_sessions_per_tenant: CountOrZero | None = None
    max_tokens: CountOrZero | None = None
    max_tokens_per_tenant: CountOrZero | None = None


class SessionRegistry:
    """A registry of open sessions, with their tenants and the capacity of their windows in tokens."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._open: dict[Hashable, tuple[str, int]] = {}
        self._is_closed = False

    def close(self) -> list[Any]:
        """Reject further sessions, and return those that are open."""
        self._is_closed = True
        return list(self._open)

    def enter(self, session: Hashable, tenant: str, num_tokens: int) -> None:
        """Register a session if the limits allow it; raises as `check` does."""
        self.check(tenant, num_tokens)
        self.put(session, tenant, num_tokens)

    def check(self, tenant: str, num_tokens: int, *, longest_window: float = inf) -> None:
        """Check that `tenant` may open a session of `num_tokens`. Open ones count at most `longest_window` tokens each.

        :raises TooManySessionsError: a limit of sessions or tokens, of the tenant or in total, would be exceeded.
        :raises PipelineClosedError: the pipeline was closed.
        """
        if self._is_closed:
            raise PipelineClosedError("the pipeline of this session has been closed: make a new one")
        limits = self._limits
        windows = [(owner, min(num, longest_window)) for owner, num in self._open.values()]
        for prefix, tokens, most, most_tokens in (
            (
                "client_",
                [num for owner, num in windows if owner == tenant],
                limits.max_sessions_per_tenant,
                limits.max_tokens_per_tenant,
            ),
            ("", [num for _, num in windows], limits.max_sessions, limits.max_tokens),
        ):
            owner = f" of {tenant!r:.80}" if prefix and tenant else ""
            if most is not None and len(tokens) >= most:
                message = f"{most:,} sessions{owner} are open, which is the limit: close one"
                raise TooManySessionsError(message, f"{prefix}sessions")
            if most_tokens is not None and sum(tokens) + num_tokens > most_tokens:
                raise TooManySessionsError(
                    f"the windows of sessions{owner} hold {sum(tokens):,} tokens, and this one has {num_tokens:,}: "
                    f"the limit is {most_tokens:,}. Close one, or ask for smaller window_tokens",
                    f"{prefix}session_tokens",
                )

    def put(self, session: Hashable, tenant: str, num_tokens: int) -> None:
        """Register a session, or correct its tokens, regardless of the limits."""
        self._open[session] = tenant, num_tokens

    def remove(self, session: Hashable) -> None:
        """Remove a session, if it is registered."""
        self._open.pop(session, None)
