"""Traces of requests to language models in production: when they came and how long they were, without retrieval.

A request is one update with its whole prompt at its arrival, so its retrieval takes no time.
"""

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import parse_json
from streamrag.trace.events import MAX_COUNT, MAX_SECONDS, LineError, TraceCount
from streamrag.trace.values import Trace, TracedChunk, TracedQuery, TracedUpdate

from .csv_rows import Row, numbered_lines, read_csv

MOONCAKE_BLOCK_TOKENS = 512


class _MooncakeRequest(BaseModel):
    timestamp: Annotated[float, Field(ge=0, le=1e3 * MAX_SECONDS)]
    """Milliseconds."""
    input_length: TraceCount
    output_length: TraceCount
    hash_ids: Annotated[tuple[int, ...], Field(default=())]


def read_mooncake(path: str | os.PathLike[str], *, max_queries: int | None = None) -> Trace:
    """Mooncake's JSON Lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    Each hash id is a chunk of 512 tokens, the last one of what is left: its length is part of its key, since the same
    key must mean the same tokens. Requests with the same leading ids have the same leading tokens.
    Source: kvcache-ai/Mooncake, FAST'25 release.

    :raises TraceError: the file cannot be read, or a line is broken.
    """
    path = Path(path)
    queries: list[TracedQuery] = []
    for number, line in numbered_lines(path):
        if max_queries is not None and len(queries) >= max_queries:
            break
        if line.strip():
            queries.append(_mooncake_query(f"{path}, line {number}", number, line))
    return _by_arrival(queries, "Mooncake")


def _mooncake_query(where: str, number: int, line: bytes) -> TracedQuery:
    try:
        request = _MooncakeRequest.model_validate(parse_json(line))
    except ValidationError as error:
        raise TraceError(f"{where}: {LineError(error, is_tagged=False)}") from error
    except ValueError as error:
        raise TraceError(f"{where}: it is not JSON ({error})") from error
    ids, length = request.hash_ids, request.input_length
    if not (len(ids) - 1) * MOONCAKE_BLOCK_TOKENS < length <= len(ids) * MOONCAKE_BLOCK_TOKENS:
        raise TraceError(f"{where}: {len(ids)} hash_ids of {MOONCAKE_BLOCK_TOKENS} tokens do not make {length} tokens")
    chunks = []
    for hash_id in ids:
        num_tokens = min(length, MOONCAKE_BLOCK_TOKENS)
        length -= num_tokens
        is_whole = num_tokens == MOONCAKE_BLOCK_TOKENS
        chunks.append(TracedChunk(str(hash_id) if is_whole else f"{hash_id}:{num_tokens}", num_tokens))
    return _query(str(number), request.timestamp / 1e3, chunks, request.output_length)


def read_azure_llm(path: str | os.PathLike[str], *, max_queries: int | None = None) -> Trace:
    """Azure's CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. No two requests share anything.

    Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023 and 2024.

    :raises TraceError: the file cannot be read, or a line is broken.
    """
    rows = read_csv(Path(path), ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), max_rows=max_queries)
    times = [row.get("TIMESTAMP", _parse_time, "a time, as in 2023-11-16 18:15:46.6805900") for row in rows]
    first_s = min(times, default=0.0)
    queries = []
    for number, (row, at_s) in enumerate(zip(rows, times, strict=True), start=1):
        if at_s - first_s > MAX_SECONDS:
            raise row.error(f"TIMESTAMP is {at_s - first_s:g} s after the first, which is more than {MAX_SECONDS:g}")
        chunk = TracedChunk(f"request-{number}", _num_tokens(row, "ContextTokens"))
        queries.append(_query(str(number), at_s - first_s, [chunk], _num_tokens(row, "GeneratedTokens")))
    return _by_arrival(queries, "Azure LLM inference")


def _num_tokens(row: Row, column: str) -> int:
    num_tokens = row.get(column, int, "a number of tokens")
    if not 0 <= num_tokens < MAX_COUNT:
        raise row.error(f"{column}={num_tokens} must be a number of tokens")
    return num_tokens


def _parse_time(text: str) -> float:
    at = datetime.fromisoformat(text.strip())  # of 2023 without a zone, of 2024 with one
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _query(query_id: str, arrival_s: float, chunks: Iterable[TracedChunk], num_output_tokens: int) -> TracedQuery:
    events = (TracedUpdate(0.0, tuple(chunks)),)
    return TracedQuery(query_id, arrival_s, "", events, end_s=0.0, num_output_tokens=num_output_tokens)


def _by_arrival(queries: list[TracedQuery], made_from: str) -> Trace:
    return Trace(tuple(sorted(queries, key=lambda query: query.arrival_s)), {"made_from": made_from})
