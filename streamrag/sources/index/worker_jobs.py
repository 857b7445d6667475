"""Jobs of the worker processes that embed, search and rerank, and the translation of their errors."""

import asyncio
import os
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field

from streamrag.errors import ConfigurationError, IndexCorruptError, IndexMismatchError, SourceError, StreamRagError
from streamrag.sources.workers.pool import Share, WorkerJobError, WorkerPool
from streamrag.support.validation import Count

NumWorkers = Annotated[Count, Field(le=32)]
JOB_TIMEOUT_S = 300.0  # a query takes milliseconds, but a worker that replaced another loads its model first


class JobHandler:
    """A base of handlers for `WorkerPool`. The value `do` of a job names the method that gets the other values.

    A replacement worker may begin with any job. So handlers load lazily, and an error of loading fails the job.
    """

    def __call__(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        arguments = dict(header)
        answer: dict[str, Any] = getattr(self, arguments.pop("do"))(**arguments)
        return answer


def new_pool(handler: JobHandler, *, size: int, name: str, env: Mapping[str, str] | None = None) -> WorkerPool:
    """Return an unstarted pool of workers, each with its own copy of `handler`, a dataclass of plain values."""
    kind = type(handler)
    return WorkerPool(f"{kind.__module__}:{kind.__qualname__}", vars(handler), size=size, name=name, env=env)


async def start_and_load(workers: WorkerPool) -> dict[str, Any]:
    """Start the workers and run the job `load` in each. Return one of the answers. On failure, close the pool."""
    await workers.start()
    try:
        return await run_in_each(workers, {"do": "load"})
    except BaseException:
        await workers.aclose()
        raise


def silence_stdout() -> None:
    """Redirect stdout to /dev/null. DiskANN's hundreds of lines would hide the last words of a dying process."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)


async def run_job(
    workers: WorkerPool, job: Mapping[str, Any], share: Share | None = None, *, timeout_s: float | None = JOB_TIMEOUT_S
) -> dict[str, Any]:
    """Run a job in a worker, and return the answer.

    :raises StreamRagError: the job failed; always a SourceError for a job of a query, which has a `share`.
    """
    try:
        return await workers.run(job, timeout_s=timeout_s, share=share)
    except WorkerJobError as error:
        explained = explain(error, f"{workers.name} failed")
        raise SourceError(str(explained)) if share else explained from error


async def run_in_each(workers: WorkerPool, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job once in each worker; when all have ended, return one of the answers, or raise the first error."""
    jobs = [run_job(workers, job) for _ in range(workers.size)]
    answers = await asyncio.gather(*jobs, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(dict[str, Any], answers[0])


def explain(error: WorkerJobError, context: str) -> StreamRagError:
    """Return our own ConfigurationError, IndexCorruptError or IndexMismatchError for a worker's, else a SourceError.

    context: the beginning of the SourceError's message.
    """
    ours = {kind.__name__: kind for kind in (ConfigurationError, IndexCorruptError, IndexMismatchError)}
    if kind := ours.get(error.kind):
        return kind(error.message)
    return SourceError(f"{context}: {error.kind}: {error.message}")
