"""Write the tables of this folder's page from its results, without running anything.

python -m studies.public_benchmark.tables
"""

from collections.abc import Iterator
from pathlib import Path

from streamrag.support.files import write_atomic
from streamrag_bench.public.results import PublicResult, read_result
from streamrag_bench.report.html import figure_text
from studies.markdown_tables import table, with_tables

PAGE = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).with_name("results")
METRICS = {
    "first_token_after_retrieval_s": "first token after retrieval",
    "last_token_after_retrieval_s": "last token after retrieval",
    "first_token_s": "first token from the question",
}
RANKS = ("p50", "p95")
ORDER = ("streamrag", "vllm", "vllm-sessions", "server")


def page_tables() -> dict[str, str]:
    """Return the tables of the page by name: an engine a row, in seconds."""
    found = [read_result(path) for path in sorted(RESULTS.glob("*.json"))]
    found.sort(key=lambda result: ORDER.index(result.engine))
    head = ["engine", *(f"{words}, {rank.upper()}" for words in METRICS.values() for rank in RANKS), "failed"]
    kinds = ("measured", "simulated")
    return {kind: table(head, (row(result) for result in found if result.kind == kind)) for kind in kinds}


def row(result: PublicResult) -> list[str]:
    return [result.engine, *figures(result), f"{result.num_failed} of {len(result.queries)}"]


def figures(result: PublicResult) -> Iterator[str]:
    for metric in METRICS:
        found = result.percentiles(metric)
        yield from (figure_text(found.get(rank)) for rank in RANKS)


def main() -> None:
    write_atomic(PAGE, with_tables(PAGE.read_text(), page_tables()))


if __name__ == "__main__":
    main()
