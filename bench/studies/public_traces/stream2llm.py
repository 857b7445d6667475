"""The public traces of Stream2LLM, read as they are.

Neither trace has arrivals: every query arrives at 0, and a benchmark's `--qps` gives them a rate. Source: arXiv
2604.16395 and its artifact, rajveerb/stream2llm.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import MAX_FILE_BYTES, parse_json, read_bytes
from streamrag.trace.events import MAX_SECONDS
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedSkip, TracedUpdate

from .csv_rows import read_csv

CountTokens: TypeAlias = Callable[[str], int]

SEARCH, PAGE = "tavily_search", "page_scrape"

_POOL = re.compile(r"\(?([\d,\s]*)\)?")


def read_stream2llm_crawler(
    folder: str | os.PathLike[str],
    *,
    count_tokens: CountTokens,
    max_queries: int | None = None,
    tokenizer: str | None = None,
) -> Trace:
    """The crawler workload: `query_*.csv` with `type`, `query`, `content`, `startTime` and `endTime` in seconds.

    A page is an append at its `endTime`, counted from the first `startTime`. The search only gives the query and its
    own time. Pages without content are skipped; queries without any page are left out, and counted in the provenance.

    :raises TraceError: no such files, or a broken one; the message names the file and the line.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("query_*.csv"), key=lambda path: (_number(path), path.name))
    if not paths:
        raise TraceError(f"{folder} has no query_*.csv: name the folder of the crawler's traces")
    queries: list[TracedQuery] = []
    num_left_out = 0
    for path in paths[:max_queries]:
        query = _read_crawl(path, count_tokens)
        if query.events:
            queries.append(query)
        else:
            num_left_out += 1
    made_from = {"made_from": "Stream2LLM crawler", "num_left_out": num_left_out, "tokenizer": tokenizer}
    return Trace(tuple(queries), made_from)


def _read_crawl(path: Path, count_tokens: CountTokens) -> TracedQuery:
    rows = read_csv(path, ("type", "query", "startTime", "endTime"), optional=("content",))
    if not rows:
        raise TraceError(f"{path} has no rows")
    timed = []
    for row in rows:
        if row["type"] not in (SEARCH, PAGE):
            raise row.error(f"type={row['type']!r} must be {SEARCH} or {PAGE}")
        start_s, end_s = row.get("startTime", _finite, "seconds"), row.get("endTime", _finite, "seconds")
        if end_s < start_s:
            raise row.error(f"endTime={end_s} is before startTime={start_s}")
        timed.append((end_s, start_s, row))
    timed.sort(key=lambda times: times[0])
    began_s = min(start_s for _, start_s, _ in timed)
    if timed[-1][0] - began_s > MAX_SECONDS:
        raise timed[-1][2].error(f"endTime is more than {MAX_SECONDS:g} s after the first startTime")
    events: list[TracedAppend] = []
    skipped: list[TracedSkip] = []
    for end_s, _, row in timed:
        if row["type"] == PAGE:
            text = row.optional("content")  # a crawl that found no page has no such column
            if text:
                events.append(TracedAppend(end_s - began_s, _chunk(text, count_tokens)))
            else:
                skipped.append(TracedSkip(end_s - began_s, "", "no content"))
    search = next((row for row in rows if row["type"] == SEARCH), rows[0])
    return TracedQuery(
        query_id=path.stem,
        arrival_s=0.0,
        text=search["query"],
        events=tuple(events),
        end_s=timed[-1][0] - began_s,
        skipped=tuple(skipped),
    )


def _chunk(text: str, count_tokens: CountTokens, uri: str = "") -> TracedChunk:
    key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return TracedChunk(key, count_tokens(text), text, uri)


def _number(path: Path) -> int:
    digits = re.search(r"(\d+)$", path.stem)
    return int(digits[1]) if digits else 0


# ---------------------------------------------------------------------------------------------------------------- ANNS


@dataclass(frozen=True, slots=True)
class _Window:
    """A pool of documents, delivered when its window ends."""

    at_s: float
    document_ids: tuple[str, ...]


def read_stream2llm_anns(
    query_map: str | os.PathLike[str],
    *,
    count_tokens: CountTokens,
    trace_dir: str | os.PathLike[str] | None = None,
    corpus_dir: str | os.PathLike[str] | None = None,
    max_queries: int | None = None,
    tokenizer: str | None = None,
) -> Trace:
    """The ANNS workload: `query_trace_map_5k.json`, the CSVs it names, and `retrieved_corpus_content.part.*.json`.

    `trace_dir` is by default the folder `res` beside the map if there is one, else the map's folder; `corpus_dir` is
    the map's folder. Each row of a trace is an update at the end of its window, windows taking their place one after
    the other. Documents that the corpus lacks are left out, and counted in the provenance.

    :raises TraceError: a missing or broken file; the message names it, and the line.
    """
    query_map = Path(query_map)
    beside = query_map.parent
    trace_dir = Path(trace_dir) if trace_dir else beside / "res" if (beside / "res").is_dir() else beside
    entries = sorted(_load_object(query_map).items(), key=lambda item: (len(item[0]), item[0]))[:max_queries]
    windows = {query_id: _read_windows(trace_dir, query_map, query_id, entry) for query_id, entry in entries}
    wanted = {each for found in windows.values() for window in found for each in window.document_ids}
    documents = {
        document_id: _chunk(text, count_tokens, uri=document_id)
        for document_id, text in _read_corpus(Path(corpus_dir) if corpus_dir else beside, wanted)
    }
    queries = tuple(
        TracedQuery(
            query_id=query_id,
            arrival_s=0.0,
            text=entry["query"],
            events=tuple(
                TracedUpdate(window.at_s, tuple(documents[each] for each in window.document_ids if each in documents))
                for window in windows[query_id]
            ),
            end_s=windows[query_id][-1].at_s,
        )
        for query_id, entry in entries
    )
    num_missing = len(wanted - documents.keys())
    made_from = {"made_from": "Stream2LLM ANNS", "num_documents_missing": num_missing, "tokenizer": tokenizer}
    return Trace(queries, made_from)


def _read_windows(trace_dir: Path, query_map: Path, query_id: str, entry: Any) -> list[_Window]:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("query", "trace_file")):
        raise TraceError(f'{query_map}: query {query_id!r} must have the texts "query" and "trace_file"')
    path = trace_dir / entry["trace_file"]
    if "\0" in entry["trace_file"] or not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(trace_dir)):
        raise TraceError(f"{query_map}: the trace_file of query {query_id!r}, {str(path)!r}, is not in {trace_dir}")
    windows = []
    at_us = 0.0
    for row in read_csv(path, ("StartTime_us", "EndTime_us", "PipelinePool")):
        duration_us = row.get("EndTime_us", _finite, "microseconds") - row.get("StartTime_us", _finite, "microseconds")
        if duration_us < 0:
            raise row.error("EndTime_us is before StartTime_us")
        at_us += duration_us
        if at_us > 1e6 * MAX_SECONDS:
            raise row.error(f"its windows last more than {MAX_SECONDS:g} s")
        windows.append(_Window(at_us / 1e6, row.get("PipelinePool", _parse_pool, "ids, as in (12,34)")))
    if not windows:
        raise TraceError(f"{path} has no rows")
    return windows


def _parse_pool(pool: str) -> tuple[str, ...]:
    match = _POOL.fullmatch(pool.strip().strip('"'))
    if not match:
        raise ValueError(pool)
    return tuple(str(int(part)) for part in match[1].split(",") if part.strip())


def _read_corpus(folder: Path, wanted: Iterable[str]) -> Iterator[tuple[str, str]]:
    paths = sorted(folder.glob("retrieved_corpus_content.part.*.json"))
    if not paths:
        raise TraceError(f"{folder} has no retrieved_corpus_content.part.*.json: name their folder with corpus_dir")
    wanted = set(wanted)
    for path in paths:
        for document_id, text in _load_object(path).items():
            if not isinstance(text, str):
                raise TraceError(f"{path}: document {document_id!r} must be a text")
            if document_id in wanted:
                yield document_id, text


def _load_object(path: Path) -> Mapping[str, Any]:
    try:
        fields = parse_json(read_bytes(path, MAX_FILE_BYTES))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not JSON, which names the line
        raise TraceError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{path} must be a JSON object")
    return fields


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) < float("inf"):
        raise ValueError(text)
    return value
