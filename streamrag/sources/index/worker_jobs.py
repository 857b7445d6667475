"""Jobs for the worker processes that embed, search and rerank, and what their errors mean."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field

from streamrag.errors import ConfigurationError, IndexCorruptError, IndexMismatchError, SourceError, StreamRagError
from streamrag.sources.workers.pool import Share, WorkerJobError, WorkerPool
from streamrag.support.validation import Count

NumWorkers = Annotated[Count, Field(le=32)]

JOB_TIMEOUT_S = 300.0
"""A query takes milliseconds; in a worker that replaced another, loading a model comes before it."""


async def run_job(
    workers: WorkerPool,
    job: Mapping[str, Any],
    share: Share | None = None,
    *,
    timeout_s: float | None = JOB_TIMEOUT_S,
    purpose: str = "",
) -> dict[str, Any]:
    """Return a worker's answer. For a query, which has a `share`, whatever is wrong is a failed retrieval.

    purpose: what the job is for, as an error names it; the workers' name unless given.
    """
    try:
        return await workers.run(job, timeout_s=timeout_s, share=share)
    except WorkerJobError as error:
        explained = explain(error, f"{purpose or workers.name} failed")
        raise SourceError(str(explained)) if share else explained from error


async def run_in_each(workers: WorkerPool, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job once in each worker, and return one of the answers. No job is done before all have begun."""
    jobs = [run_job(workers, job) for _ in range(workers.size)]
    answers = await asyncio.gather(*jobs, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(dict[str, Any], answers[0])


def explain(error: WorkerJobError, otherwise: str) -> StreamRagError:
    """Return the error that a worker meant; with `otherwise` before it, if it is none of ours."""
    ours = {kind.__name__: kind for kind in (ConfigurationError, IndexCorruptError, IndexMismatchError)}
    if kind := ours.get(error.kind):
        return kind(error.message)
    return SourceError(f"{otherwise}: {error.kind}: {error.message}")
