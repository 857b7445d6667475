"""Admission control: bounds on open queries, their rate and their tokens, for all clients together and for each one."""

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from functools import partial

from streamrag.serve.failures import NotAdmittedError
from streamrag.serve.limits import Limits
from streamrag.telemetry import ContextChanged, ContextComplete, PrefillProgressed, QueryEvent, TokensGenerated

MINUTE_S = 60.0

AHEAD_SHARES = {
    "max_queries": 2,
    "max_queries_per_client": 2,
    "max_requests_per_minute": 2,
    "max_prompt_tokens_per_minute": 2,
    "max_queued_tokens": 64,
}
"""Divisors of the limits for watched questions, so that these leave room for queries that a client waits for. The share
of queued tokens is one engine step by default, which is how long other queries then wait."""

BURST_S = 4.0  # burst of prompt tokens that a client may send, in seconds of its rate: a few prompts of ordinary length
NUM_RECENT = 32  # number of recent prompts whose mean length is the expected length of the next one
REFUSED_S = 30.0  # seconds for which a client that was refused a place counts as waiting for one


class Usage:
    """The recent queries of one client, and its leaky bucket of prompt tokens, which is empty after a minute."""

    def __init__(self, tokens_per_minute: int, now_s: float) -> None:
        self.starts_s: deque[float] = deque()  # start times of the queries of the last minute
        self.prompts: deque[int] = deque(maxlen=NUM_RECENT)  # token counts of the client's last prompts
        self.changed_s = now_s
        self._tokens_per_minute = tokens_per_minute
        self._num_tokens = 0.0

    def num_tokens(self, now_s: float) -> float:
        """Return the number of prompt tokens in the bucket."""
        leaked = (now_s - self.changed_s) * self._tokens_per_minute / MINUTE_S
        return max(self._num_tokens - leaked, 0.0)

    def add_tokens(self, num: int, now_s: float) -> None:
        """Add prompt tokens to the bucket; a negative number corrects an estimate that was too high."""
        self._num_tokens = min(max(self.num_tokens(now_s) + num, 0.0), self._tokens_per_minute)
        self.changed_s = now_s


class Reservation:
    """A query's claim on the limits: at first its expected tokens, then corrected by its events."""

    def __init__(
        self, client: str, num_prompt_tokens: int, num_answer_tokens: int, is_ahead: bool, charge: Callable[[int], None]
    ) -> None:
        self.client = client
        self.is_ahead = is_ahead
        self._num_prompt = num_prompt_tokens
        self._num_answer = num_answer_tokens
        self._num_computed = 0
        self._num_expected = num_prompt_tokens
        self._charge = charge
        self.num_context_tokens = 0
        """Tokens of the newest prompt, for queries whose context grows; 0 before the first passage, for retrieval and
        for sessions."""
        charge(num_prompt_tokens)

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens of the prompt and the answer that remain to be computed."""
        return max(self._num_prompt - self._num_computed, 0) + max(self._num_answer, 0)

    def follow(self, event: QueryEvent) -> None:
        """Update the claim's queued tokens from an event. Charge the client for a new prompt's unshared tokens, in all
        less those that were expected. Before a prompt has passages, give none of these back: passages are expected."""
        match event:
            case ContextChanged():
                self._num_expected -= event.num_tokens - event.num_shared
                if event.num_chunks:
                    self.num_context_tokens = event.num_tokens
                if event.num_chunks or self._num_expected < 0:
                    self._settle()
                self._num_prompt = event.num_tokens + self._num_expected
                self._num_computed = min(self._num_computed, event.num_shared)
            case ContextComplete():
                self._settle()
                self._num_prompt = self.num_context_tokens = event.num_tokens
            case PrefillProgressed():
                self._num_computed = event.num_tokens
            case TokensGenerated():
                self._num_computed = self._num_prompt
                self._num_answer -= len(event.token_ids)

    def _settle(self) -> None:
        """Charge what the prompts had beyond the expected tokens, or give back what they lacked."""
        self._charge(-self._num_expected)
        self._num_expected = 0


class Admission:
    """Admission control over open queries. It has no queue: it admits a query or refuses it with a time to retry.

    clock: a monotonic clock, in seconds.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        shares = {name: max(getattr(limits, name) // num, 1) for name, num in AHEAD_SHARES.items()}
        self._limits_ahead = limits.model_copy(update=shares)
        self.is_draining = False
        self.is_ready = True
        self._clock = clock
        self._places: set[Reservation] = set()
        self._num_open_by_client: Counter[str] = Counter()
        self._usage: OrderedDict[str, Usage] = OrderedDict()
        """Usage by client, least recently used first; clients that were inactive for a minute are removed."""
        self._refused_s: dict[bool, OrderedDict[str, float]] = {False: OrderedDict(), True: OrderedDict()}
        """Time of each client's last refusal for lack of places, oldest first, by `is_ahead`."""
        self._prompts: deque[int] = deque(maxlen=NUM_RECENT)
        self._stays_s: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def num_queries(self) -> int:
        return len(self._places)

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens that remain to be computed for all open queries."""
        return sum(place.num_queued_tokens for place in self._places)

    def enter(
        self, client: str, *, max_tokens: int, num_prompt_tokens: int | None = None, is_ahead: bool = False
    ) -> Reservation:
        """Admit one query, and charge its expected tokens. The caller must `leave` the returned place.

        max_tokens: bound on the answer's tokens.
        num_prompt_tokens: tokens of the prompt; if None, the mean of recent prompts is assumed.
        is_ahead: whether the query is computed ahead of demand, which gives it only a share of each limit.

        :raises NotAdmittedError: the query exceeds a limit, the service drains, or the engine is not ready.
        """
        limits = self._limits_ahead if is_ahead else self.limits
        if self.is_draining:
            raise NotAdmittedError("the service is stopping: send the query to another one, or later", "draining", 5.0)
        if not self.is_ready:
            raise NotAdmittedError("the engine is starting: try again", "not_ready", 5.0)
        self._check_places(client, limits, is_ahead)
        usage = self._usage_of(client)
        self._check_rate(usage, limits, is_ahead)
        num_prompt = round(_mean(usage.prompts or self._prompts)) if num_prompt_tokens is None else num_prompt_tokens
        self._check_prompt_rate(usage, limits, num_prompt)
        self._check_queue(client, limits, is_ahead, num_prompt + max_tokens)
        usage.starts_s.append(self._clock())
        place = Reservation(client, num_prompt, max_tokens, is_ahead, partial(self._charge, client))
        self._places.add(place)
        self._num_open_by_client[client] += 1
        return place

    def leave(self, place: Reservation, *, stayed_s: float) -> None:
        """Release a place. Its prompt's length, if there was a context, and `stayed_s` improve later estimates."""
        self._places.remove(place)
        self._num_open_by_client[place.client] -= 1
        if not self._num_open_by_client[place.client]:
            del self._num_open_by_client[place.client]
        if place.num_context_tokens:
            self._prompts.append(place.num_context_tokens)
            self._usage_of(place.client).prompts.append(place.num_context_tokens)
        self._stays_s.append(stayed_s)

    def _check_places(self, client: str, limits: Limits, is_ahead: bool) -> None:
        """Raise NotAdmittedError if the client's places, or all places, are taken; if all are, record the refusal."""
        most, num_open = self._share_of(client, limits, is_ahead), self._num_open_by_client[client]
        if num_open >= most:
            why = "the most" if most == limits.max_queries_per_client else "your share while others find no place"
            message = f"{num_open} queries of yours are open, which is {why}"
            raise NotAdmittedError(message, "client_queries", self._wait_s(1))
        if len(self._places) >= limits.max_queries:
            refused_s = self._refused_s[is_ahead]
            refused_s[client] = self._clock()
            refused_s.move_to_end(client)
            raise NotAdmittedError(
                f"{limits.max_queries} queries are open, which is the most", "queries", self._wait_s(1)
            )

    def _share_of(self, client: str, limits: Limits, is_ahead: bool) -> int:
        """Return the number of places a client may have, and forget old refusals.

        It is the limit per client, but at most an even share while another client counts as waiting for a place.
        """
        since_s = self._clock() - REFUSED_S
        refused_s = self._refused_s[is_ahead]
        while refused_s and next(iter(refused_s.values())) <= since_s:
            refused_s.popitem(last=False)
        most = limits.max_queries_per_client
        if len(refused_s) == (client in refused_s):
            return most
        num_others = sum(name not in refused_s for name in {client, *self._num_open_by_client})
        return min(most, max(limits.max_queries // (len(refused_s) + num_others), 1))

    def _check_queue(self, client: str, limits: Limits, is_ahead: bool, num_tokens: int) -> None:
        """Raise NotAdmittedError if these tokens and `_queued_before` exceed the limit, unless nothing is queued."""
        queued = self._queued_before(client, is_ahead)
        if queued and queued + num_tokens > limits.max_queued_tokens:
            share = (queued + num_tokens - limits.max_queued_tokens) / queued
            message = f"{queued:,} tokens wait to be computed, and {limits.max_queued_tokens:,} is the most"
            raise NotAdmittedError(message, "tokens", self._wait_s(math.ceil(share * len(self._places))))

    def _queued_before(self, client: str, is_ahead: bool) -> int:
        """Count all clients' queued tokens, but of each other client at most an even share of `max_queued_tokens`.

        This cap keeps a client from starving the others. For a query that is computed ahead, count only this client's
        other queries that are computed ahead.
        """
        queued = Counter({client: 0})
        for place in self._places:
            if not is_ahead or (place.is_ahead and place.client == client):
                queued[place.client] += place.num_queued_tokens
        share = self.limits.max_queued_tokens // len(queued)
        return sum(num if name == client else min(num, share) for name, num in queued.items())

    def _usage_of(self, client: str) -> Usage:
        """Return a client's usage, made if missing, after removing clients that were inactive for a minute."""
        now_s = self._clock()
        while self._usage and next(iter(self._usage.values())).changed_s <= now_s - MINUTE_S:
            self._usage.popitem(last=False)
        if client not in self._usage:
            self._usage[client] = Usage(self.limits.max_prompt_tokens_per_minute, now_s)
        return self._usage[client]

    def _charge(self, client: str, num_tokens: int) -> None:
        """Add to the client's bucket of prompt tokens; the client counts as active for another minute."""
        self._usage_of(client).add_tokens(num_tokens, self._clock())
        self._usage.move_to_end(client)

    def _check_rate(self, usage: Usage, limits: Limits, is_ahead: bool) -> None:
        """Raise NotAdmittedError if the client has started as many queries as it may in a minute. Counts no query.

        For a query ahead of demand, raise it also after a sixtieth of these, at least one, in a second.
        """
        now_s, starts_s = self._clock(), usage.starts_s
        while starts_s and starts_s[0] <= now_s - MINUTE_S:
            starts_s.popleft()
        windows = [(limits.max_requests_per_minute, MINUTE_S)]
        if is_ahead:
            windows.append((max(limits.max_requests_per_minute // 60, 1), 1.0))
        for most, window_s in windows:
            if len(starts_s) >= most and starts_s[-most] > now_s - window_s:
                retry_after_s = starts_s[-most] + window_s - now_s
                raise NotAdmittedError(f"{most} queries in {window_s:g} s are the most", "client_rate", retry_after_s)

    def _check_prompt_rate(self, usage: Usage, limits: Limits, num_prompt_tokens: int) -> None:
        """Raise NotAdmittedError if the prompt overfills the client's bucket of `BURST_S`, unless that is empty."""
        most = limits.max_prompt_tokens_per_minute
        num_used = usage.num_tokens(self._clock())
        excess = min(num_used, num_used + num_prompt_tokens - most * BURST_S / MINUTE_S)
        if num_prompt_tokens and excess > 0:
            message = f"your prompts have more than {most:,} tokens a minute, which is the most"
            retry_after_s = excess * MINUTE_S / self.limits.max_prompt_tokens_per_minute
            raise NotAdmittedError(message, "client_tokens", retry_after_s)

    def _wait_s(self, num_to_end: int) -> float:
        """Return the estimated seconds until `num_to_end` of the open queries have ended, between 1 and 60."""
        mean_s = _mean(self._stays_s) if self._stays_s else 1.0
        return min(max(mean_s * num_to_end / max(len(self._places), 1), 1.0), MINUTE_S)


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0
