"""Jobs for the worker processes that embed, search and rerank, and what their errors mean."""

import asyncio
import os
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field

from streamrag.errors import ConfigurationError, IndexCorruptError, IndexMismatchError, SourceError, StreamRagError
from streamrag.sources.workers.pool import Share, WorkerJobError, WorkerPool
from streamrag.support.validation import Count

NumWorkers = Annotated[Count, Field(le=32)]

JOB_TIMEOUT_S = 300.0
"""A query takes milliseconds; in a worker that replaced another, loading a model comes before it."""


class JobHandler:
    """A base of handlers for `WorkerPool`: a job names a method, `do`, and gives it the other values as arguments.

    A worker that replaces another starts with any job. So a handler loads what it needs when a job needs it, and errors
    of loading are errors of a job.
    """

    def __call__(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        arguments = dict(header)
        answer: dict[str, Any] = getattr(self, arguments.pop("do"))(**arguments)
        return answer


def silence_stdout() -> None:
    """Discard what is printed. DiskANN's hundreds of lines would push out what a process says before it dies."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)


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
