"""Draw docs/timeline.svg: one recorded query of `make demo`, streaming above and not streaming below.

Reads `experiments/results/demo.json`. Of its crawls, it takes the question whose speedup is the median one.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results" / "demo.json"
PICTURE = ROOT / "docs" / "timeline.svg"

RETRIEVAL, PREFILL, DECODE, INK, GREY = "#8fb8de", "#f4a259", "#5b8e7d", "#24292f", "#6e7781"
LEFT, WIDTH, BAR = 150, 690, 26
"""Pixels before the time axis, of the axis, and of a bar's height."""


def median_pair(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the streaming and the other run of the question whose ratio of waits is the median."""
    by_question: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_question.setdefault(row["question"], {})[row["arm"]] = row
    pairs = [(arms["streaming"], arms["not streaming"]) for arms in by_question.values()]
    pairs.sort(key=lambda pair: pair[1]["ttft_after_retrieval_s"] / pair[0]["ttft_after_retrieval_s"])
    return pairs[len(pairs) // 2]


def draw(pair: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Return the picture as SVG."""
    last_s = max(row["total_s"] for row in pair)
    scale = WIDTH / last_s
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 320" role="img" '
        'font-family="system-ui, sans-serif" font-size="14">',
        "<title>One query, streaming and not streaming</title>",
        '<rect width="860" height="320" rx="8" fill="#ffffff"/>',
    ]

    def text(x: float, y: float, words: str, fill: str = INK, style: str = "") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{style}>{words}</text>')

    def bar(y: float, start_s: float, end_s: float, fill: str) -> None:
        x, width = LEFT + start_s * scale, (end_s - start_s) * scale
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="{fill}"/>')

    for top, label, row in ((36, "Streaming", pair[0]), (166, "Not streaming", pair[1])):
        retrieved_s, first_token_s = row["retrieval_s"], row["ttft_s"]
        prefill_s = row["first_chunk_s"] if label == "Streaming" else retrieved_s
        text(16, top + 6, label, style=' font-weight="600"')
        text(16, top + 28, "retrieval", GREY)
        text(16, top + 60, "model", GREY)
        bar(top + 10, 0, retrieved_s, RETRIEVAL)
        bar(top + 42, prefill_s, first_token_s, PREFILL)
        bar(top + 42, first_token_s, row["total_s"], DECODE)
        x_0, x_1, y = LEFT + retrieved_s * scale, LEFT + first_token_s * scale, top + 80
        parts += [f'<path d="M{x:.1f} {top + 8}V{y + 5}" stroke="{INK}" stroke-dasharray="3 3"/>' for x in (x_0, x_1)]
        parts.append(f'<path d="M{x_0:.1f} {y}H{x_1:.1f}" stroke="{INK}" stroke-width="2"/>')
        text(x_1 + 8, y + 5, f"{row['ttft_after_retrieval_s']:.2f} s to the first token")
    for second in range(int(last_s) + 1):
        x = LEFT + second * scale
        parts.append(f'<path d="M{x:.1f} 262v6" stroke="{GREY}"/>')
        text(x, 282, f"{second} s", GREY, ' text-anchor="middle"')
    for x, fill, words in ((150, RETRIEVAL, "pages arrive"), (290, PREFILL, "prefill"), (390, DECODE, "answer")):
        parts.append(f'<rect x="{x}" y="295" width="14" height="14" rx="2" fill="{fill}"/>')
        text(x + 20, 307, words)
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    picture = draw(median_pair(json.loads(RESULTS.read_text())["crawl"]))
    if sys.argv[1:] == ["--check"]:
        is_current = PICTURE.exists() and PICTURE.read_text() == picture
        if not is_current:
            print(f"{PICTURE.relative_to(ROOT)} differs from the results: run `python scripts/timeline.py`")
        return 0 if is_current else 1
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
