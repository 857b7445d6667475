"""Make the statistics of the public benchmark: quantile tables of public traces and of retrieval.

    python -m studies.public_benchmark.load_statistics --ragpulse FOLDER --mooncake FILE --azure FILE

The traces are the user's copies of RAGPulse (flashserve/RAGPulse), Mooncake (kvcache-ai/Mooncake) and Azure
(Azure/AzurePublicDataset). Only their quantiles are written, to bench/streamrag_bench/public/statistics.json.
"""

import argparse
import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from streamrag.support.files import write_atomic
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace
from streamrag_bench import public
from streamrag_bench.summary import percentile
from streamrag_bench.trace.generate import generate
from streamrag_bench.trace.statistics import describe
from studies.folders import TRACES

OUTPUT = Path(public.__file__).with_name("statistics.json")
RANKS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
WINDOW_S = 600.0
"""Gaps are compared with the mean gap of their ten minutes: nights and weekends are no part of a load's shape."""


def table(values: Iterable[float], digits: int) -> list[float]:
    """Return the quantiles of the values at `RANKS`."""
    ordered = sorted(values)
    return [round(percentile(ordered, rank), digits or None) or 0 for rank in RANKS]


def arrival_gaps(arrivals: Sequence[float]) -> list[float]:
    """Return gaps in units of the mean gap of their window, of windows that are at least as busy as the mean."""
    windows: dict[int, list[float]] = {}
    for at_s in sorted(arrivals):
        windows.setdefault(int(at_s // WINDOW_S), []).append(at_s)
    mean_num = len(arrivals) / len(windows)
    relative: list[float] = []
    for times in windows.values():
        gaps = [after - before for before, after in pairwise(times)]
        if len(times) >= mean_num and sum(gaps) > 0:
            relative += [gap * len(gaps) / sum(gaps) for gap in gaps]
    return relative


def of_ragpulse(folder: Path) -> dict[str, Any]:
    """Return the tables of RAGPulse: system prompt and history are known before retrieval, passages come from it."""
    requests = list(read_lines(folder / "0_trace.jsonl"))
    lengths = {
        name: {line[f"{key}_id"]: line["token_length"] for line in read_lines(folder / file)}
        for name, key, file in (
            ("sys_prompt", "sys_prompt", "1_sys_prompt.jsonl"),
            ("passages_ids", "passage", "2_passages.jsonl"),
            ("history", "history", "3_history.jsonl"),
            ("web_search", "web_search", "5_web_search.jsonl"),
        )
    }

    def tokens(request: Mapping[str, Any], *names: str) -> int:
        return sum(lengths[name][each] for name in names for each in request["hash_ids"][name])

    return {
        "num_requests": len(requests),
        "system_tokens": table((tokens(r, "sys_prompt") for r in requests), 0),
        "history_tokens": table((tokens(r, "history") for r in requests), 0),
        "retrieved_tokens": table((n for r in requests if (n := tokens(r, "passages_ids", "web_search"))), 0),
        "answer_tokens": table((int(r["output_length"]) for r in requests), 0),
        "arrival_gaps": table(arrival_gaps([float(r["timestamp"]) for r in requests]), 4),
    }


def read_lines(path: Path) -> Iterable[Any]:
    return map(json.loads, filter(str.strip, path.read_text().splitlines()))


class Request(NamedTuple):
    """A request to a model in production: when it came, and how long its prompt and its answer were."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def mooncake_requests(path: Path) -> list[Request]:
    """Read the JSON Lines of Mooncake, FAST'25 release."""
    return [Request(line["timestamp"] / 1e3, line["input_length"], line["output_length"]) for line in read_lines(path)]


def azure_requests(path: Path) -> list[Request]:
    """Read a CSV file of AzureLLMInferenceDataset2023 or 2024."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, strict=True))
    times = [
        datetime.fromisoformat(row["TIMESTAMP"].strip()) for row in rows
    ]  # of 2023 without a zone, of 2024 with one
    seconds = [(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() for at in times]
    return [
        Request(at_s - min(seconds), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for at_s, row in zip(seconds, rows, strict=True)
    ]


def of_production(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the tables of prompts without parts: all of a prompt counts as retrieved."""
    return {
        "num_requests": len(requests),
        "system_tokens": [0] * len(RANKS),
        "history_tokens": [0] * len(RANKS),
        "retrieved_tokens": table((r.num_prompt_tokens for r in requests if r.num_prompt_tokens), 0),
        "answer_tokens": table((r.num_output_tokens for r in requests), 0),
        "arrival_gaps": table(arrival_gaps([r.at_s for r in requests]), 4),
    }


def of_retrieval(trace: Trace) -> dict[str, Any]:
    """Return the tables of when chunk events come, and of the share of a context that an update changes."""
    queries = [query for query in trace.queries if query.events]
    statistics = describe(trace)
    return {
        "num_queries": len(queries),
        "mode": statistics.mode,
        "num_events": table((len(query.events) for query in queries), 2),
        "first_s": table((query.events[0].at_s for query in queries), 4),
        "gaps_s": table((b.at_s - a.at_s for query in queries for a, b in pairwise(query.events)), 4),
        "end_s": table((query.end_s - query.events[-1].at_s for query in queries), 4),
        "changed_share": table(statistics.changed_share.values or (0.0,), 3),
    }


def written(made: Mapping[str, Any]) -> str:
    """Return the JSON with a line for each part."""
    return "{\n" + ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in made.items()) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("ragpulse", "mooncake", "azure"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="PATH")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE")
    arguments = parser.parse_args()
    recorded: Callable[[str], Trace] = lambda name: read_trace(TRACES / f"{name}.jsonl.gz")  # noqa: E731
    made = {
        "format": 1,
        "ranks": RANKS,
        "lengths": {
            "ragpulse": of_ragpulse(arguments.ragpulse),
            "mooncake": of_production(mooncake_requests(arguments.mooncake)),
            "azure": of_production(azure_requests(arguments.azure)),
        },
        "retrieval": {
            "crawl": of_retrieval(generate("crawler")),
            "search": of_retrieval(generate("anns")),
            "recorded-crawl": of_retrieval(recorded("crawl-python-docs")),
            "recorded-search": of_retrieval(recorded("search-python-docs")),
        },
    }
    write_atomic(arguments.output, written(made))


if __name__ == "__main__":
    main()
