"""Requests in classes by who waits for them: session, pool, stream, each first in, first out.

    session  ──────┬──────────── since_s                 a class has so long a start before the next
    pool     ──────┼──ageing_s── since_s + ageing_s      the places only: who takes one is for another policy to say
    stream         └──────────── since_s + 2 ageing_s

Source: arXiv 2605.13784, section 3.6, which has no ageing, and watched questions before all others.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, get_args

from streamrag.core import RequestClass
from streamrag.engine.places import Place, Places
from streamrag.engine.request import RequestView
from streamrag.errors import ConfigurationError
from streamrag.support.messages import is_number, short

if TYPE_CHECKING:
    from streamrag.engine.policies import Policy

RANKS: dict[str, int] = {name: rank for rank, name in enumerate(get_args(RequestClass))}


class ClassPolicy:
    """Serves each class before the next, and orders the pool as `within` does. Without other classes it is `within`.

    A request is overtaken only by those that came less than its rank times `ageing_s` after it, where session has rank
    0 and stream 2. The wait of a stream counts from the first of its tokens that are not computed,
    that of others from their newest chunk. Partial prompts of the pool take places as if they came now: nobody waits
    for them yet, and when they are complete they age.
    """

    def __init__(self, within: "Policy", ageing_s: float) -> None:
        if not is_number(ageing_s) or not 0 < ageing_s < inf:
            raise ConfigurationError(f"class_ageing_s={short(ageing_s)} must be a number of seconds over 0, or None")
        self.within = within
        self.needs_prefix_hits = within.needs_prefix_hits
        self._ageing_s = ageing_s
        self._places = Places(self._place, _does_not_follow_the_clock)

    def __repr__(self) -> str:
        return f"<{self.within!r} in classes, {self._ageing_s:g} s apart>"

    def order(self, requests: Sequence[RequestView], now_s: float) -> list[RequestView]:
        pool = [r for r in requests if r.request_class == "pool"]
        if len(pool) == len(requests):
            return self.within.order(requests, now_s)
        self._places.forget_unless(len(requests))
        served = self._places.of([r for r in requests if r.request_class != "pool"], now_s)
        if pool:
            places = sorted(self._places.of(pool, now_s))
            taken = zip(places, self.within.order(pool, now_s), strict=True)
            served += [(*place[:-1], request) for place, request in taken]
        served.sort()
        return [place[-1] for place in served]

    def _place(self, r: RequestView, now_s: float) -> Place:
        rank = RANKS[r.request_class]
        since_s = r.since_s if r.request_class == "stream" else r.last_chunk_s if r.is_complete else now_s
        return (not r.has_output, since_s + rank * self._ageing_s, rank, r.arrival_s, r.request_id, r)

    def on_admitted(self, requests: Sequence[RequestView]) -> None:
        self.within.on_admitted([r for r in requests if r.request_class == "pool"])

    def on_speed(self, tokens_per_s: float) -> None:
        self.within.on_speed(tokens_per_s)


def _does_not_follow_the_clock(r: RequestView) -> bool:
    return r.is_complete or r.request_class == "stream"
