"""Policies order unfinished requests. The first is served first, the last is the first victim.

In every policy a request with output comes first, because its reader waits for the next token. Every order is total:
ties go to the earlier arrival, then to the request id.
"""

import ast
import importlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from streamrag.engine.request import RequestView
from streamrag.errors import ConfigurationError

QueuePosition: TypeAlias = tuple[Any, ...]
"""A sort key that ends with its request. The parts before it are unique to that request."""


class Places:
    """A cache of `place(request, now_s)` by the identity of the view, for views of which `is_fixed` holds.

    Most requests do not change from step to step, and hundreds of them wait.
    """

    def __init__(
        self, place: Callable[[RequestView, float], QueuePosition], is_fixed: Callable[[RequestView], bool]
    ) -> None:
        self._place = place
        self._is_fixed = is_fixed
        self._cached: dict[int, QueuePosition] = {}  # by id(view); the place keeps the view alive, so ids stay unique

    def look_up(self, requests: Iterable[RequestView], now_s: float) -> list[QueuePosition]:
        """Return the place of each request, in the given order."""
        cached, compute = self._cached.get, self._compute
        return [place if (place := cached(id(r))) is not None else compute(r, now_s) for r in requests]

    def clear(self) -> None:
        self._cached.clear()

    def trim(self, num_requests: int) -> None:
        """Clear the cache if it holds many more places than the `num_requests` that exist now."""
        if len(self._cached) > 2 * num_requests + 100:
            self._cached.clear()

    def _compute(self, request: RequestView, now_s: float) -> QueuePosition:
        """Return the place of a request, and cache the place if it is fixed."""
        place = self._place(request, now_s)
        if self._is_fixed(request):
            self._cached[id(request)] = place
        return place


FIRST_GUESS = 20_000.0
"""Tokens per second until a step has been observed."""
MOST_DRIFT = 1.5
"""Factor by which the speed may change before all requests are ordered again."""
TYPICAL_S = 5.0
"""Assumed seconds from the arrival of a request to its last chunk, if its retriever gives no hint. It matters only
where some retrievers do and others do not."""

Key: TypeAlias = Callable[[RequestView, float], Any]
"""Returns the sort key of a request, given the time in seconds; the smallest key is served first."""


class Policy(Protocol):
    """An order of requests.

    It must not rank a request lower because it was served: requests could evict each other for ever.
    """

    needs_prefix_hits: bool
    """Whether `order` reads `RequestView.num_cached_tokens`, which costs a lookup per waiting request and step."""

    def order(self, requests: Sequence[RequestView], now_s: float) -> list[RequestView]:
        """Return `requests`, the most urgent first."""

    def on_admitted(self, requests: Sequence[RequestView]) -> None:
        """Learn which requests started in this step, in order. Does nothing by default."""
        return

    def on_speed(self, tokens_per_s: float) -> None:
        """Learn the speed at which the engine computes prompts, after every step. Does nothing by default."""
        return


class KeyPolicy(Policy):
    """A policy that sorts by a key, requests with output first. `is_static`: a key changes only with its view."""

    needs_prefix_hits = False

    def __init__(self, key: Key, name: str, *, is_static: bool = False) -> None:
        self.key = key
        self.name = name
        self._places = Places(self._place, lambda request: is_static)

    def __repr__(self) -> str:
        return f"<policy {self.name}>"

    def order(self, requests: Sequence[RequestView], now_s: float) -> list[RequestView]:
        self._places.trim(len(requests))
        places = self._places.look_up(requests, now_s)
        places.sort()
        return [place[-1] for place in places]

    def _place(self, r: RequestView, now_s: float) -> QueuePosition:
        return (not r.has_output, self.key(r, now_s), r.arrival_s, r.request_id, r)


def arrival() -> Policy:
    """Order requests by arrival, complete or not.

    Source: vLLM's own scheduler, https://docs.vllm.ai, and "DEFAULT_VLLM" of arXiv 2604.16395.
    """
    return KeyPolicy(lambda r, now_s: (), "arrival", is_static=True)


def fcfs() -> Policy:
    """Order complete prompts before partial ones, and each of the two by arrival.

    Source: arXiv 2604.16395, section on scheduling policies, "FCFS".
    """
    return KeyPolicy(lambda r, now_s: not r.is_complete, "fcfs", is_static=True)


def lcas() -> Policy:
    """Order complete prompts before partial ones, and each of the two by the newest chunk first.

    Under overload the last to arrive is served first: a good median, and a tail of minutes.
    Source: arXiv 2604.16395, "last chunk arrival scheduling", as the text describes it.
    """
    return KeyPolicy(lambda r, now_s: (not r.is_complete, -r.last_chunk_s), "lcas", is_static=True)


def lcas_oldest() -> Policy:
    """Order complete prompts before partial ones, and each of the two by the oldest newest chunk first.

    Source: the code published with arXiv 2604.16395, which sorts the other way than its text.
    """
    return KeyPolicy(lambda r, now_s: (not r.is_complete, r.last_chunk_s), "lcas_oldest", is_static=True)


def mcps() -> Policy:
    """Order by computed tokens, most first, so that the first victims are the cheapest to recompute.

    Source: arXiv 2604.16395, "most chunks processed".
    """
    return KeyPolicy(lambda r, now_s: -r.num_computed_tokens, "mcps", is_static=True)


class ShortestRemainingPolicy(KeyPolicy):
    """A policy that serves the shortest remaining prefill first (SRPF): complete prompts, then partial ones.

    The key of a complete prompt is its remaining prefill seconds minus `ageing` times its wait since the newest chunk.
    A request with T seconds left is overtaken only by requests whose newest chunk came less than T / ageing seconds
    after its own; with `ageing=0` it can starve. Partial prompts are ordered by when they are expected to be complete,
    not by what remains: long prompts would always come last, and have everything left to compute when they are
    complete.
    Source: shortest remaining processing time (Schrage 1968) with ageing, earliest deadline first for partial prompts;
    our simulations of arXiv 2604.16395's loads.

    tokens_per_s: prefill speed; None takes the measured speed of the engine.
    """

    def __init__(self, ageing: float = 0.1, tokens_per_s: float | None = None) -> None:
        if ageing < 0 or (tokens_per_s is not None and tokens_per_s <= 0):
            raise ConfigurationError(f"srpf({ageing}, {tokens_per_s}): ageing must be at least 0, tokens_per_s over 0")
        self._ageing = ageing
        self._is_fixed = tokens_per_s is not None
        self._tokens_per_s = tokens_per_s or FIRST_GUESS
        super().__init__(self._key, f"srpf({ageing:g})", is_static=True)

    def on_speed(self, tokens_per_s: float) -> None:
        """Use the speed, and order all requests anew, if none was given and it has changed by `MOST_DRIFT`."""
        current = self._tokens_per_s
        if not self._is_fixed and not current / MOST_DRIFT < tokens_per_s < current * MOST_DRIFT:
            self._tokens_per_s = tokens_per_s
            self._places.clear()

    # The wait is now_s - last_chunk_s. now_s is the same for all requests, so the key leaves it out.
    def _key(self, r: RequestView, now_s: float) -> tuple[bool, float]:
        if not r.is_complete:
            return (True, r.arrival_s if r.expected_complete_s is None else r.expected_complete_s - TYPICAL_S)
        return (False, r.num_likely_tokens / self._tokens_per_s + self._ageing * r.last_chunk_s)

    def _place(self, r: RequestView, now_s: float) -> QueuePosition:
        return (not r.has_output, *self._key(r, now_s), r.arrival_s, r.request_id, r)  # flat tuples compare faster


class LongestPrefixPolicy(Policy):
    """A policy of longest prefix match in rounds (k-LPM).

    In each round of `k` admissions the first goes to the oldest request, the others to the longest prefixes that the
    cache or the request itself holds. `k=1` orders by arrival, infinity is LPM. With m older requests waiting, one is
    admitted within k * (m + 1) admissions. Admitted requests come first, by arrival: if they competed again, two
    requests could evict each other for ever.
    Source: arXiv 2502.04677, "k-LPM".
    """

    needs_prefix_hits = True

    def __init__(self, k: float = 4) -> None:
        if not (k >= 1 and (math.isinf(k) or float(k).is_integer())):
            raise ConfigurationError(f"k_lpm({k}): k must be a whole number, at least 1, or inf")
        self.k = k
        self._num_in_round = 0

    def __repr__(self) -> str:
        return f"<policy k_lpm({self.k:g})>"

    def order(self, requests: Sequence[RequestView], now_s: float) -> list[RequestView]:
        """Return admitted requests by arrival, output first; then the others, in rounds if any prefix is present."""
        first = sorted((r for r in requests if _is_admitted(r)), key=lambda r: (not r.has_output, *_by_age(r)))
        waiting = [r for r in requests if not _is_admitted(r)]
        by_age = sorted(waiting, key=_by_age)
        by_prefix = sorted(by_age, key=_num_present, reverse=True)  # stable: ties stay in order of age
        if not by_prefix or not _num_present(by_prefix[0]):
            return first + by_age  # rounds would give the same order
        return first + (by_prefix if math.isinf(self.k) else self._rounds(by_age, by_prefix))

    def _rounds(self, by_age: list[RequestView], by_prefix: list[RequestView]) -> list[RequestView]:
        """Merge two orders of the same requests in rounds of `k`, of which earlier admissions may have begun the first.
        The first request of each round comes from `by_age`, the others from `by_prefix`."""
        oldest, longest = iter(by_age), iter(by_prefix)
        order: dict[str, RequestView] = {}
        while len(order) < len(by_age):
            is_first = (self._num_in_round + len(order)) % self.k == 0
            request = next(r for r in (oldest if is_first else longest) if r.request_id not in order)
            order[request.request_id] = request
        return list(order.values())

    def on_admitted(self, requests: Sequence[RequestView]) -> None:
        if not math.isinf(self.k):
            self._num_in_round = int((self._num_in_round + len(requests)) % self.k)


def _is_admitted(r: RequestView) -> bool:
    return r.has_output or r.is_running


def _by_age(r: RequestView) -> tuple[float, str]:
    return (r.arrival_s, r.request_id)


def _num_present(r: RequestView) -> int:
    return max(r.num_computed_tokens, r.num_cached_tokens)


DEFAULT_POLICY = "srpf"
"""The policy that serves our simulated loads best, or nearly so: see the report of `make paper`."""
POLICIES: dict[str, Callable[..., Policy]] = {
    "arrival": arrival,
    "fcfs": fcfs,
    "lcas": lcas,
    "lcas_oldest": lcas_oldest,
    "mcps": mcps,
    "k_lpm": LongestPrefixPolicy,
    "srpf": ShortestRemainingPolicy,
}
"""Policies by name."""


def make_policy(spec: str) -> Policy:
    """Return the policy that `spec` names: `"fcfs"`, `"k_lpm(4)"`, `"srpf(ageing=0.25)"`, or a function of your own.

    Your function, named as `"package.module.function"`, is called with a `RequestView` and the time in seconds. It
    returns a sort key, and the smallest key is served first.

    :raises ConfigurationError: there is no such policy, or it does not take these parameters.
    """
    match = re.fullmatch(r"([\w.]+)\s*(\(.*\))?", spec.strip())
    if not match:
        raise ConfigurationError(f"policy {spec!r} is neither a name like 'fcfs' or 'k_lpm(4)' nor a dotted name")
    name, call = match.groups()
    if name not in POLICIES:
        return _import_policy(spec, name, call)
    try:
        arguments, keywords = _parse_call(call or "()")
        return POLICIES[name](*arguments, **keywords)
    except (SyntaxError, ValueError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"policy {spec!r}: {error}") from error


def _parse_call(call: str) -> tuple[list[Any], dict[str, Any]]:
    node = ast.parse(f"f{call}", mode="eval").body
    assert isinstance(node, ast.Call)
    return [_number(a) for a in node.args], {str(k.arg): _number(k.value) for k in node.keywords}


def _number(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("inf", "infinity"):
        return math.inf
    return ast.literal_eval(node)


def _import_policy(spec: str, name: str, call: str | None) -> KeyPolicy:
    """Import the function with the dotted name `name`, and return a policy that sorts by the keys it returns.

    :raises ConfigurationError: it has no dots, parentheses follow it (`call`), or it names no function.
    """
    module_name, _, attribute = name.rpartition(".")
    names = ", ".join(sorted(POLICIES))
    if not module_name or call:
        raise ConfigurationError(f"there is no policy {spec!r}; choose one of {names}, or a dotted name of your own")
    try:
        key = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"policy {spec!r} cannot be imported: {error}") from error
    if not callable(key):
        raise ConfigurationError(f"policy {spec!r} is not a function of (request, now_s)")
    return KeyPolicy(key, spec)
