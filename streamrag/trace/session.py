"""Retrieval for many queries, without a model, for the sake of its trace."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias

import anyio

from streamrag.core import Append, Progress, Source, Update
from streamrag.errors import SourceError
from streamrag.retrieving import Retrieval
from streamrag.starting import start_all
from streamrag.support.tasks import wait_regardless
from streamrag.trace.recorder import CountTokens, TraceRecorder

OnRecorded: TypeAlias = Callable[[int, int], None]
"""Called with how many queries have ended, and how many chunk events have come in all."""


async def record_queries(
    queries: Sequence[str],
    source: Source,
    recorder: TraceRecorder,
    count_tokens: CountTokens,
    *,
    tokenizer: str,
    num_at_once: int = 1,
    progress: Progress = lambda line: None,
    on_recorded: OnRecorded = lambda num_queries, num_events: None,
) -> dict[str, SourceError]:
    """Start the source and the recorder, retrieve for each query, and close both; returns the retrievals that failed.

    :raises ConfigurationError: the source or the recorder cannot be started.
    :raises TraceError: the trace cannot be written.
    """
    failed: dict[str, SourceError] = {}
    num_ended = num_events = 0
    admission = anyio.CapacityLimiter(num_at_once)

    async def record(query: str) -> None:
        nonlocal num_ended, num_events
        async with admission:
            events = recorder.record(query, Retrieval(source, query).events(), count_tokens, tokenizer=tokenizer)
            try:
                async with aclosing(events):
                    async for event in events:
                        num_events += isinstance(event, Append | Update)
                        on_recorded(num_ended, num_events)
            except SourceError as error:
                failed[query] = error
            num_ended += 1
            on_recorded(num_ended, num_events)

    async with await start_all((source, recorder), progress):
        tasks = [asyncio.create_task(record(query), name="streamrag record") for query in queries]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await wait_regardless(tasks)
    return failed
