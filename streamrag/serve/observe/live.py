"""`GET /v1/live`: the open queries and their progress, as `streamrag top` shows them.

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
from streamrag.serve.observe.observer import Interface, Observer, QueryOutcome, Refusal, ServedQuery
from streamrag.serve.service import Service
from streamrag.telemetry import Answer, QueryEvent, TokensGenerated

NUM_ENDED = 20  # number of ended queries that are kept
NUM_TTFTS = 256  # number of recent queries in the percentiles of the time to first token
NUM_OPEN = 500  # number of open queries that are listed, oldest first; `num_open` counts all
MAX_TEXT = 200  # maximum characters of a question
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

QUERY_FIELDS = ("phase", "ttft_s", "num_chunks", "num_prompt_tokens", "num_prefilled", "num_output_tokens")
"""Fields of `QueryProgress` that are listed for each query."""

COUNTED = ("started", "ended", "answered", "refused", "output_tokens", "uncounted")
"""Counts of queries, tokens of answers, and answers whose number of tokens is unknown."""


class Live(Observer):
    """An observer that lists the open queries and the last ended ones.

    with_text: whether to include the beginnings of questions: each client's own, and all of them for `clients`.
    clients: names of the clients that may see all queries; None for every client with a key.
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

    def query_event(self, query: ServedQuery, event: QueryEvent) -> None:
        if isinstance(event, TokensGenerated):
            self._count("output_tokens", len(event.token_ids))

    def query_ended(
        self, query: ServedQuery, outcome: QueryOutcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        """Keep the query's description and its times to first token; count it, its answer and the answer's tokens."""
        self._ended.appendleft({**self._describe(query), "outcome": outcome})
        self._count("ended", 1)
        if outcome == "answered":
            self._count("answered", 1)
        if answer is not None:
            num_tokens, num_ids = answer.usage.num_output_tokens, len(answer.token_ids)
            self._count("output_tokens", max((num_tokens or 0) - num_ids, 0))  # ids were counted as they came
            self._count("uncounted", int(num_tokens is None))
        if query.progress.ttft_s is not None:
            self._ttfts_s.append(query.progress.ttft_s)
        if query.progress.ttft_after_retrieval_s is not None:
            self._ttfts_after_s.append(query.progress.ttft_after_retrieval_s)

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self._refused[why] += 1
        self._count("refused", 1)

    def check(self, client: str) -> None:
        """Check that this client may see all queries. Raises RequestError if it may not."""
        if self._clients is not None and client not in self._clients:
            raise RequestError("this key may not see the queries of others", status=403, code="not_an_operator")

    def snapshot(self, service: Service, client: str) -> dict[str, Any]:
        """Return the state, counts, open and ended queries, percentiles and KV use, for JSON.

        Queries of other clients are listed without their question, unless `clients` limits who may look.
        """
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
            "open": [self._visible(self._describe(query), client) for query in service.queries[:NUM_OPEN]],
            "ended": [self._visible(each, client) for each in self._ended],
            "minute": {name: self._minute.count(name) for name in COUNTED},
            "total": {name: self._total[name] for name in COUNTED},
            "refused": dict(self._refused),
            "ttft_s": percentiles(self._ttfts_s),
            "ttft_after_retrieval_s": percentiles(self._ttfts_after_s),
            "kv": None if use is None else asdict(use),
        }

    def _count(self, name: str, num: int) -> None:
        self._total[name] += num
        self._minute.add(name, num)

    def _visible(self, description: dict[str, Any], client: str) -> dict[str, Any]:
        """Return a query's description, without its text if it is another client's and every key may look."""
        if self._clients is not None or description["client"] == client:
            return description
        return {name: value for name, value in description.items() if name != "text"}

    def _describe(self, query: ServedQuery) -> dict[str, Any]:
        """Return what is listed of a query, with the beginning of its question if `with_text` allows it."""
        overlap = query.progress.overlap
        return {
            "id": query.id,
            "interface": query.interface,
            "client": query.client,
            "age_s": round(query.age_s, 3),
            **{name: getattr(query.progress, name) for name in QUERY_FIELDS},
            "overlap": None if overlap is None else overlap.way,
            "overlap_reason": None if overlap is None else overlap.reason,
            **({"text": query.text[:MAX_TEXT]} if self._with_text else {}),
        }


class Minute:
    """Counts of events in the last sixty seconds, in slots of one second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: deque[tuple[int, Counter[str]]] = deque(maxlen=61)

    def add(self, name: str, num: int) -> None:
        """Add `num` to the count of `name` in the present second."""
        second = int(self._clock())
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append((second, Counter()))
        self._slots[-1][1][name] += num

    def count(self, name: str) -> int:
        """Return the number of events in the last 60 seconds, by slots of a second."""
        first = self._clock() - 60
        return sum(counts[name] for second, counts in self._slots if second > first)


def percentiles(values_s: Iterable[float]) -> dict[str, float]:
    """Return P50, P90 and P99 by name, without interpolation; empty if there are no values."""
    ordered = sorted(values_s)
    if not ordered:
        return {}
    return {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in SHARES.items()}


def routes(service: Service) -> list[Route]:
    """Return `GET /v1/live` of the service's first `Live` observer; no route if it has none."""
    observer = next((each for each in service.observers if isinstance(each, Live)), None)
    if observer is None:
        return []

    async def live(request: Request) -> Response:
        client = request.scope[CALLER].client
        observer.check(client)
        return JSONResponse(observer.snapshot(service, client), headers={"cache-control": "no-store"})

    return [Route("/v1/live", live)]
