"""The figures of the paper's evaluation in the README and docs/performance.md equal those of the report."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "experiments" / "results"
ROWS = {
    "crawls, 4 a second": "crawler 4 QPS",
    "searches, 2 a second": "anns-last 2 QPS",
    "crawls with ten times the gaps, KV memory twice full": "crawler 4 QPS, gaps 10x, KV 0.69 M",
}
BASELINES = ("not streaming", "FCFS")


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def results(point: str) -> dict[str, dict[str, Any]]:
    """Return the results of a load with all seeds, by way of scheduling."""
    rows = json.loads((RESULTS / "paper.json").read_text())["results"]
    return {row["way"]: row for row in rows if row["point"] == point and row["kind"] == "all seeds"}


def text(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 0.995 else f"{seconds:.1f}"


def best(found: dict[str, dict[str, Any]], baseline: str) -> float:
    """Return the best P95 of a baseline over its token budgets and evictions."""
    rows = [row for way, row in found.items() if way.split(", ")[0] == baseline]
    assert all(row["seeds"] == found["ours"]["seeds"] for row in rows)
    return min(row["ttft_after_retrieval_s"]["P95"] for row in rows)


def test_the_first_table_is_that_of_the_report() -> None:
    for name, point in ROWS.items():
        found = results(point)
        cells = [best(found, baseline) for baseline in BASELINES] + [found["ours"]["ttft_after_retrieval_s"]["P95"]]
        assert f"| {name} | {' | '.join(map(text, cells))} |" in page("README.md")


def test_the_last_token_with_drafts_is_that_of_the_benchmark() -> None:
    found = json.loads((RESULTS / "answer_ahead.json").read_text())["loads"]["five passages, appended within 9 s"]
    for name, figure in (("first, median", "first_s_p50"), ("last, median", "last_s_p50"), ("last, P95", "last_s_p95")):
        row = f"| {name} | {found[f'{figure}_without']:.2f} | {found[f'{figure}_ahead']:.2f} |"
        assert row in page("README.md"), row


def test_the_performance_page_has_the_reports_figures_of_queries_served_later() -> None:
    section = (RESULTS / "paper.md").read_text().partition("## Request by request")[2].partition("\n## ")[0]
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    rows = {(row[0], row[1]): dict(zip(lines[0], row, strict=True)) for row in lines[2:]}
    crawls, searches = (rows[point, "not streaming"] for point in ("crawler 4 QPS", "anns-last 2 QPS"))
    p50, p95, most = searches["by P50/P95/most, s"].split("/")
    assert f"| searches, 2 a second | {searches['served later']} | {p50} | {p95} | {most} |" in page(
        "docs/performance.md"
    )
    p50, p95, most = crawls["by P50/P95/most, s"].split("/")
    assert f"| crawls, 4 a second | {crawls['served later']} | {p50} | {p95} | {most} |" in page("docs/performance.md")
