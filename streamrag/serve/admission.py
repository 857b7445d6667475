"""Who may come in: bounds on queries and on the tokens that wait to be computed, for all and for each client."""

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from streamrag.serve.failures import RefusedError
from streamrag.serve.limits import Limits
from streamrag.telemetry import ContextChanged, Event, PrefillProgressed, TokensGenerated

MINUTE_S = 60.0

AHEAD_SHARES = {"max_queries": 2, "max_queries_per_client": 2, "max_requests_per_minute": 2, "max_queued_tokens": 64}
"""Parts of a bound of which one is for watched questions: nobody waits for them yet, so they leave the rest to others.
Of tokens it is a step of the engine by default, which is how long others then wait for them."""

LEARNS_FROM = 32
"""Prompts whose mean length the next one is expected to have."""

WANTED_S = 30.0
"""After a client found no place it counts as waiting for one."""


class Place:
    """What one query has claimed. It starts with what is expected of it, and follows what it turns out to be."""

    def __init__(self, client: str, num_prompt_tokens: int, num_answer_tokens: int, is_ahead: bool = False) -> None:
        self.client = client
        self.is_ahead = is_ahead
        self._num_prompt = num_prompt_tokens
        self._num_answer = num_answer_tokens
        self._num_computed = 0
        self.num_context_tokens = 0
        """Tokens of the newest prompt, if it is one whose context grew. Retrieval and sessions have none."""

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of prompt and answer that are still to be computed."""
        return max(self._num_prompt - self._num_computed, 0) + max(self._num_answer, 0)

    def follow(self, event: Event) -> None:
        """Take in what happened to it."""
        match event:
            case ContextChanged():
                self._num_prompt = self.num_context_tokens = event.num_tokens
                self._num_computed = min(self._num_computed, event.num_shared)
            case PrefillProgressed():
                self._num_computed = event.num_tokens
            case TokensGenerated():
                self._num_computed = self._num_prompt
                self._num_answer -= len(event.token_ids)


class Admission:
    """Counts who is in. Nothing waits here: whoever has no place is told when to come again.

    clock: seconds; of `time.monotonic` unless a test says otherwise.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        shares = {name: max(getattr(limits, name) // num, 1) for name, num in AHEAD_SHARES.items()}
        self._limits_ahead = limits.model_copy(update=shares)
        self.is_draining = False
        self.is_ready = True
        self._clock = clock
        self._places: set[Place] = set()
        self._of_client: Counter[str] = Counter()
        self._begun: OrderedDict[str, deque[float]] = OrderedDict()
        """Begin of each query of the last minute, by client. The client whose newest query is oldest comes first."""
        self._wanted_s: dict[bool, OrderedDict[str, float]] = {False: OrderedDict(), True: OrderedDict()}
        """When clients last found no place, oldest first, for questions and for what is computed ahead (True)."""
        self._prompts: deque[int] = deque(maxlen=LEARNS_FROM)
        self._stays: deque[float] = deque(maxlen=LEARNS_FROM)

    @property
    def num_queries(self) -> int:
        """Queries that are open."""
        return len(self._places)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed for them."""
        return sum(place.num_queued_tokens for place in self._places)

    def enter(
        self, client: str, *, max_tokens: int, num_prompt_tokens: int | None = None, is_ahead: bool = False
    ) -> Place:
        """Claim a place for one query, to be given back with `leave`.

        max_tokens: of its answer. num_prompt_tokens: of its prompt, if that is known; else as long as those before.
        is_ahead: whether nobody waits for its answer yet. It counts as any other, and has a share of each bound.

        :raises RefusedError: there is none.
        """
        limits = self._limits_ahead if is_ahead else self.limits
        if self.is_draining:
            raise RefusedError("the service is stopping: ask another one, or later", "draining", 5.0)
        if not self.is_ready:
            raise RefusedError("the engine is starting: try again", "not_ready", 5.0)
        most, num_open = self._share_of(client, limits, is_ahead), self._of_client[client]
        if num_open >= most:
            why = "the most" if most == limits.max_queries_per_client else "your share while others find no place"
            raise RefusedError(
                f"{num_open} queries of yours are open, which is {why}", "client_queries", self._wait_s(1)
            )
        if len(self._places) >= limits.max_queries:
            wanted = self._wanted_s[is_ahead]
            wanted[client] = self._clock()
            wanted.move_to_end(client)
            raise RefusedError(f"{limits.max_queries} queries are open, which is the most", "queries", self._wait_s(1))
        self._check_rate(client, limits, is_ahead)
        expected = num_prompt_tokens if num_prompt_tokens is not None else self._expected_prompt_tokens()
        place = Place(client, expected, max_tokens, is_ahead)
        queued = self._queued_before(client, is_ahead)
        if queued and queued + place.num_queued_tokens > limits.max_queued_tokens:
            share = (queued + place.num_queued_tokens - limits.max_queued_tokens) / max(queued, 1)
            raise RefusedError(
                f"{queued:,} tokens wait to be computed, and {limits.max_queued_tokens:,} is the most",
                "tokens",
                self._wait_s(math.ceil(share * len(self._places))),
            )
        self._begun.setdefault(client, deque()).append(self._clock())
        self._begun.move_to_end(client)
        self._places.add(place)
        self._of_client[client] += 1
        return place

    def leave(self, place: Place, *, stayed_s: float) -> None:
        """Its query has ended, after so many seconds."""
        self._places.remove(place)
        self._of_client[place.client] -= 1
        if not self._of_client[place.client]:
            del self._of_client[place.client]
        if place.num_context_tokens:
            self._prompts.append(place.num_context_tokens)
        self._stays.append(stayed_s)

    def _share_of(self, client: str, limits: Limits, is_ahead: bool) -> int:
        """Return how many places a client may have: as many as each, while another one has found none."""
        since_s = self._clock() - WANTED_S
        wanted = self._wanted_s[is_ahead]
        while wanted and next(iter(wanted.values())) <= since_s:
            wanted.popitem(last=False)
        most = limits.max_queries_per_client
        if len(wanted) == (client in wanted):
            return most
        num_others = sum(name not in wanted for name in {client, *self._of_client})
        return min(most, max(limits.max_queries // (len(wanted) + num_others), 1))

    def _queued_before(self, client: str, is_ahead: bool) -> int:
        """Count the tokens that wait, of each other client no more than its share, so that none keeps out all others.

        Before what is computed ahead, count the same of this client only.
        """
        waiting = Counter({client: 0})
        for place in self._places:
            if not is_ahead or (place.is_ahead and place.client == client):
                waiting[place.client] += place.num_queued_tokens
        share = self.limits.max_queued_tokens // len(waiting)
        return sum(num if name == client else min(num, share) for name, num in waiting.items())

    def _check_rate(self, client: str, limits: Limits, is_ahead: bool) -> None:
        now = self._clock()
        while self._begun and next(iter(self._begun.values()))[-1] <= now - MINUTE_S:
            self._begun.popitem(last=False)
        times = self._begun.get(client, deque())
        while times and times[0] <= now - MINUTE_S:
            times.popleft()
        most_of_second = max(limits.max_requests_per_minute // 60, 1)
        for most, window_s in ((limits.max_requests_per_minute, MINUTE_S), (most_of_second, 1.0))[: 1 + is_ahead]:
            if len(times) >= most and times[-most] > now - window_s:
                raise RefusedError(
                    f"{most} queries in {window_s:g} s are the most", "client_rate", times[-most] + window_s - now
                )

    def _expected_prompt_tokens(self) -> int:
        return round(sum(self._prompts) / len(self._prompts)) if self._prompts else 0

    def _wait_s(self, num_to_end: int) -> float:
        """Until so many of those that are in have ended, as long as they stay of late."""
        mean_s = sum(self._stays) / len(self._stays) if self._stays else 1.0
        return min(max(mean_s * num_to_end / max(len(self._places), 1), 1.0), MINUTE_S)
