"""`GET /v1/live`: which queries are open and what they are doing, as `streamrag top` shows it.

{"model": "...", "is_ready": true, "uptime_s": 3600.0, "open": [{"id": "...", "phase": "prefilling", ...}],
 "ended": [{"id": "...", "outcome": "answered", ...}], "minute": {...}, "total": {...}, "ttft_s": {...}, "kv": ...}
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrag.serve.connections.gate import CALLER
from streamrag.serve.failures import RequestError
from streamrag.serve.observe.metrics import kv_use_of
from streamrag.serve.observe.observer import Interface, Observer, Outcome, Refusal, ServedQuery
from streamrag.serve.service import Service
from streamrag.telemetry import Answer, Event, TokensGenerated

NUM_ENDED = 20
"""Number of ended queries that are kept."""
NUM_TTFTS = 256
"""Number of queries whose times to the first token the percentiles are of."""
NUM_OPEN = 500
"""Number of open queries that are shown, the oldest; `num_open` counts all."""
MAX_TEXT = 200
"""Most characters of a question."""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Live(Observer):
    """An observer that shows what every open query is doing, and how the last ones ended.

    with_text: whether to show the beginnings of questions: to everybody those of their own, to `clients` all.
    clients: names of the clients that may see the queries of all; None for everybody who has a key.
    clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        with_text: bool = False,
        clients: Collection[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._with_text = with_text
        self._clients = clients
        self._ended: deque[dict[str, Any]] = deque(maxlen=NUM_ENDED)
        self._ttfts_s: deque[float] = deque(maxlen=NUM_TTFTS)
        self._ttfts_after_s: deque[float] = deque(maxlen=NUM_TTFTS)
        self._minute = Minute(clock)
        self._total: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def query_started(self, query: ServedQuery) -> None:
        self._count("started", 1)

    def query_event(self, query: ServedQuery, event: Event) -> None:
        if isinstance(event, TokensGenerated):
            self._count("output_tokens", len(event.token_ids))

    def query_ended(
        self, query: ServedQuery, outcome: Outcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        self._ended.appendleft({**self._describe(query), "outcome": outcome})
        for name in ("ended", "answered") if outcome == "answered" else ("ended",):
            self._count(name, 1)
        progress = query.progress
        for times_s, value_s in (
            (self._ttfts_s, progress.ttft_s),
            (self._ttfts_after_s, progress.ttft_after_retrieval_s),
        ):
            if value_s is not None:
                times_s.append(value_s)

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self._refused[why] += 1
        self._count("refused", 1)

    def check(self, client: str) -> None:
        """Check that this client may look.

        :raises RequestError: it may not.
        """
        if self._clients is not None and client not in self._clients:
            raise RequestError("this key is not for looking at what others ask", status=403, code="not_an_operator")

    def snapshot(self, service: Service, client: str) -> dict[str, Any]:
        """Return everything that `client` may see, for JSON."""
        use = kv_use_of(service)
        return {
            "model": service.model_name,
            "is_ready": service.is_ready,
            "is_draining": service.admission.is_draining,
            "uptime_s": round(time.monotonic() - service.started_s, 1),
            "num_restarts": service.num_restarts,
            "max_queries": service.limits.max_queries,
            "num_queued_tokens": service.admission.num_queued_tokens,
            "max_queued_tokens": service.limits.max_queued_tokens,
            "num_open": service.admission.num_queries,
            "open": [self._seen(self._describe(query), client) for query in service.queries[:NUM_OPEN]],
            "ended": [self._seen(each, client) for each in self._ended],
            "minute": {name: self._minute.count(name) for name in _COUNTED},
            "total": {name: self._total[name] for name in _COUNTED},
            "refused": dict(self._refused),
            "ttft_s": percentiles(self._ttfts_s),
            "ttft_after_retrieval_s": percentiles(self._ttfts_after_s),
            "kv": None if use is None else asdict(use),
        }

    def _count(self, name: str, num: int) -> None:
        self._total[name] += num
        self._minute.add(name, num)

    def _seen(self, shown: dict[str, Any], client: str) -> dict[str, Any]:
        if self._clients is not None or shown["client"] == client:
            return shown
        return {name: value for name, value in shown.items() if name != "text"}

    def _describe(self, query: ServedQuery) -> dict[str, Any]:
        progress = query.progress
        return {
            "id": query.id,
            "interface": query.interface,
            "client": query.client,
            "age_s": round(query.age_s, 3),
            **{name: getattr(progress, name) for name in _SHOWN},
            **({"text": query.text[:MAX_TEXT]} if self._with_text else {}),
        }


_SHOWN = ("phase", "ttft_s", "num_chunks", "num_prompt_tokens", "num_prefilled", "num_output_tokens")
_COUNTED = ("started", "ended", "answered", "refused", "output_tokens")


class Minute:
    """Counts of events in the last sixty seconds, by the second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: deque[tuple[int, Counter[str]]] = deque(maxlen=61)

    def add(self, name: str, num: int) -> None:
        """Count `num` events that happened now."""
        second = int(self._clock())
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append((second, Counter()))
        self._slots[-1][1][name] += num

    def count(self, name: str) -> int:
        """Return how many happened in the last minute."""
        first = self._clock() - 60
        return sum(counts[name] for second, counts in self._slots if second > first)


def percentiles(values_s: Iterable[float]) -> dict[str, float]:
    """Return percentiles by name; none if there are no values."""
    ordered = sorted(values_s)
    if not ordered:
        return {}
    return {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in SHARES.items()}


def routes(service: Service) -> list[Route]:
    """Return `GET /v1/live`, if one of the service's observers shows it."""
    found = [observer for observer in service.observers if isinstance(observer, Live)]

    async def live(request: Request) -> Response:
        client = request.scope[CALLER].client
        found[0].check(client)
        return JSONResponse(found[0].snapshot(service, client), headers={"cache-control": "no-store"})

    return [Route("/v1/live", live)] if found else []
