"""Serve requests by urgency class, with ageing so that no class starves.

    session  ──────┬──────────── since_s                 each class has a head start of `ageing_s` over the next
    pool     ──────┼──ageing_s── since_s + ageing_s      the pool's places: `pool_policy` says who takes which
    stream         └──────────── since_s + 2 ageing_s

Source: arXiv 2605.13784, section 3.6, which has no ageing and puts watched questions before all other classes.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, get_args

from streamrag.core import RequestClass
from streamrag.engine.policies import Places, QueuePosition
from streamrag.engine.request import RequestView
from streamrag.errors import ConfigurationError
from streamrag.support.messages import is_number, short_repr

if TYPE_CHECKING:
    from streamrag.engine.policies import Policy

RANKS: dict[str, int] = {name: rank for rank, name in enumerate(get_args(RequestClass))}


class ClassPolicy:
    """A policy that serves each class before the next, and orders the requests of the pool as `pool_policy` does.

    A request of rank r (session 0, pool 1, stream 2) is overtaken only by requests that arrive less than r times
    `ageing_s` seconds after it. A stream ages from its first token that is not computed, any other request from its
    newest chunk. Partial prompts of the pool do not age, because no reader waits for them yet.
    """

    def __init__(self, pool_policy: "Policy", ageing_s: float) -> None:
        if not is_number(ageing_s) or not 0 < ageing_s < inf:
            raise ConfigurationError(
                f"class_ageing_s={short_repr(ageing_s)} must be a number of seconds over 0, or None"
            )
        self.pool_policy = pool_policy
        self.needs_prefix_hits = pool_policy.needs_prefix_hits
        self._ageing_s = ageing_s
        self._places = Places(self._place, _has_fixed_place)

    def __repr__(self) -> str:
        return f"<{self.pool_policy!r} in classes, {self._ageing_s:g} s apart>"

    def order(self, requests: Sequence[RequestView], now_s: float) -> list[RequestView]:
        """Return all by class and age, but give the pool's places to its requests in the order of `pool_policy`."""
        pool = [r for r in requests if r.request_class == "pool"]
        if len(pool) == len(requests):
            return self.pool_policy.order(requests, now_s)
        self._places.trim(len(requests))
        merged = self._places.look_up([r for r in requests if r.request_class != "pool"], now_s)
        if pool:
            places = sorted(self._places.look_up(pool, now_s))
            pairs = zip(places, self.pool_policy.order(pool, now_s), strict=True)
            merged += [(*place[:-1], request) for place, request in pairs]
        merged.sort()
        return [place[-1] for place in merged]

    def _place(self, r: RequestView, now_s: float) -> QueuePosition:
        rank = RANKS[r.request_class]
        since_s = r.since_s if r.request_class == "stream" else r.last_chunk_s if r.is_complete else now_s
        return (not r.has_output, since_s + rank * self._ageing_s, rank, r.arrival_s, r.request_id, r)

    def on_admitted(self, requests: Sequence[RequestView]) -> None:
        self.pool_policy.on_admitted([r for r in requests if r.request_class == "pool"])

    def on_speed(self, tokens_per_s: float) -> None:
        self.pool_policy.on_speed(tokens_per_s)


def _has_fixed_place(r: RequestView) -> bool:
    return r.is_complete or r.request_class == "stream"
