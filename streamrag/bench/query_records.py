"""One result per query, with one record out of those of its requests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamrag.bench.arms import Timing
from streamrag.bench.cell import CellSettings, RequestResult
from streamrag.bench.floor import floor_s
from streamrag.bench.workload import token_budget
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.records import RequestRecord
from streamrag.trace.values import TracedQuery


def request_results(
    settings: CellSettings,
    queries: Sequence[TracedQuery],
    timings: Mapping[str, Timing],
    profile: StepProfile,
    records: Mapping[str, Sequence[RequestRecord]],
    start_s: float = 0.0,
) -> tuple[RequestResult, ...]:
    """The results of the queries that were answered. `start_s` is when the cell began, on the clock of timings and
    records."""
    results = []
    for query in queries:
        timing, record = timings.get(query.query_id), merged(records.get(query.query_id, ()))
        if timing is not None:
            result = RequestResult(
                query_id=query.query_id,
                arrival_s=query.arrival_s,
                retrieval_end_s=timing.retrieval_end_s - start_s,
                first_token_s=timing.first_token_s - start_s,
                finished_s=timing.finished_s - start_s,
                num_chunks=len(query.events),
                floor_s=floor_s(query, profile, token_budget(settings)),
                record=record and shifted(record, -start_s),
            )
            results.append(result)
    return tuple(results)


def merged(records: Sequence[RequestRecord]) -> RequestRecord | None:
    """The last one, with the counts and preemptions of all. Warming sends several requests for one query."""
    if len(records) <= 1:
        return records[0] if records else None
    return replace(
        records[-1],
        num_computed=sum(r.num_computed for r in records),
        num_recomputed=sum(r.num_recomputed for r in records),
        num_invalidated=sum(r.num_invalidated for r in records),
        num_from_cache=sum(r.num_from_cache for r in records),
        num_loaded=sum(r.num_loaded for r in records),
        num_written_through=sum(r.num_written_through for r in records),
        preemptions=tuple(p for r in records for p in r.preemptions),
        restores=tuple(restore for r in records for restore in r.restores),
    )


def shifted(record: RequestRecord, by_s: float) -> RequestRecord:
    """The same on a clock that shows `by_s` more."""

    def moved(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + by_s

    return replace(
        record,
        arrival_s=record.arrival_s + by_s,
        queued_s=record.queued_s + by_s,
        scheduled_s=moved(record.scheduled_s),
        first_kv_s=moved(record.first_kv_s),
        last_kv_s=moved(record.last_kv_s),
        finished_s=record.finished_s + by_s,
        chunks=tuple(replace(c, arrival_s=c.arrival_s + by_s) for c in record.chunks),
        preemptions=tuple(replace(p, at_s=p.at_s + by_s) for p in record.preemptions),
        restores=tuple(replace(r, at_s=r.at_s + by_s) for r in record.restores),
    )
