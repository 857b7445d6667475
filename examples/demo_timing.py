"""The timing of real retrieval, for what `demo.py` retrieves on one machine, where all is near.

Pages come at the times of crawls that Stream2LLM recorded on the web: they are drawn from the statistics that it
published (arXiv 2604.16395). A search takes as long as a hybrid search with a hosted reranker: 0.76 s, of which 0.40 s
are before the reranker (Hindsight's leaderboard of rerankers, Cohere Rerank English v3; read 2026-11-29).
"""

from dataclasses import replace

from streamrag.trace import Trace, TracedAppend, TracedQuery, stretched
from streamrag_bench.trace.generate import crawler, with_hints

CRAWL = (
    "Pages append to the context while they fit. A quarter of it is reserved for the most relevant of the others, once "
    "all have come. They were fetched before, and arrive as in real crawls: at times drawn from the published "
    "statistics of 4,322 crawls (Stream2LLM, arXiv 2604.16395), which took 8.7 s in the median."
)
SEARCH_S = 0.76
LEAD_S = 0.3
"""Before the end of a search. Its prompt needs no more time."""
SEARCH = (
    "Keywords, then vectors, then a reranker update the context, each when it knows better. What comes before the last "
    f"{LEAD_S} s is held back, as a pipeline does where that is best. The ranking was computed before. It takes "
    f"{SEARCH_S} s here, as with a hosted reranker (benchmarks.hindsight.vectorize.io), and no cores of the model."
)
NUM_DRAWN = 1000


def as_on_the_web(trace: Trace) -> Trace:
    """The trace with the times of real crawls, from short ones to long ones, half of which take 8.7 s or more."""
    drawn = sorted(crawler(NUM_DRAWN).queries, key=lambda query: query.end_s)
    num = len(trace.queries)
    queries = [_timed(query, drawn[(2 * i + 1) * NUM_DRAWN // (2 * num)]) for i, query in enumerate(trace.queries)]
    return with_hints(replace(trace, queries=tuple(queries)), "estimated")


def _timed(query: TracedQuery, crawl: TracedQuery) -> TracedQuery:
    """The query with the times of a crawl, over which the pages that were of no use are spread as well."""
    appends = [event for event in query.events if isinstance(event, TracedAppend)]
    arrivals = {event.chunk.uri: event.at_s for event in reversed(appends)}
    places = sorted([*arrivals.values(), *(skip.at_s for skip in query.skipped)])
    times = [event.at_s for event in crawl.events]
    at_s = {uri: times[places.index(s) * len(times) // len(places)] for uri, s in arrivals.items()}
    events = sorted((replace(e, at_s=at_s[e.chunk.uri]) for e in appends), key=lambda e: e.at_s)
    return replace(query, events=tuple(events), end_s=crawl.end_s, skipped=())


def as_with_a_hosted_reranker(trace: Trace) -> Trace:
    """The trace with searches that take `SEARCH_S` each, whose stages keep their proportions; of the updates before the
    last `LEAD_S`, only the newest is left, at their beginning."""
    each = (replace(trace, queries=(query,)) for query in trace.queries)
    queries = [stretched(one, SEARCH_S / one.queries[0].end_s).queries[0] for one in each]
    return replace(trace, queries=tuple(map(_near_the_end, queries)))


def _near_the_end(query: TracedQuery) -> TracedQuery:
    from_s = query.end_s - LEAD_S
    early = [
        replace(event, at_s=from_s, hint=event.hint and replace(event.hint, end_s=LEAD_S))
        for event in query.events
        if event.at_s < from_s
    ]
    return replace(query, events=(*early[-1:], *(event for event in query.events if event.at_s >= from_s)))
