"""An event of a query in a log."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from streamrag.trace.events import MAX_COUNT

QueryId = Annotated[str, Field(min_length=1, max_length=1_000)]
ClockTime = Annotated[float, Field(ge=0, lt=1e11)]  # on any clock that the whole log shares
Size = Annotated[int, Field(ge=1, lt=MAX_COUNT)] | None
Sizes = Annotated[tuple[Size, ...], Field(max_length=10_000)] | None
"""Tokens of each chunk, None for a usual length; None for one chunk of usual length."""


class LogLine(BaseModel):
    """An event of a query: its question, chunks that were retrieved, or the end of its retrieval."""

    query: QueryId
    event: Literal["question", "chunks", "end"]
    seconds: ClockTime
    tokens: Sizes = None
