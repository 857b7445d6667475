"""Put what `make demo` measured into the picture docs/timeline.svg, README.md, and the tables of two pages.

    make demo && cp .demo/results.json bench/studies/demo/results.json
    python -m studies.demo.publish_figures [--check]  # or `make -C bench demo-figures`

The picture shows one recorded crawl, streaming above and not streaming below: of all pairs, the one with the median
speedup. With `--check`, writes nothing, and exits with 1 if anything would change.
"""

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from streamrag_bench.compare.interval import interval

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).with_name("results.json")
LIVE_SEARCH = Path(__file__).with_name("live_search.json")
"""The demo's search with its reranker, on the model's cores. The demo's pairs replay it, and compute no ranking."""
PICTURE = ROOT / "docs" / "timeline.svg"
README = ROOT / "README.md"
TABLES = (ROOT / "docs" / "benchmarks.md", Path(__file__).with_name("README.md"))
"""Pages whose section "The demo" has a table of these figures."""
LABELS = {
    "from the question": "ttft_s",
    "first token": "ttft_s",
    "after retrieval": "ttft_after_retrieval_s",
    "first token, after retrieval": "ttft_after_retrieval_s",
    "last token": "total_s",
}
"""What rows of the tables are called, and the measured time that they show."""

RETRIEVAL, PREFILL, DECODE, INK, GREY = "#8fb8de", "#f4a259", "#5b8e7d", "#24292f", "#6e7781"
LEFT, WIDTH, BAR = 150, 690, 26
"""Pixels before the time axis, of the axis, and of a bar's height."""

Row: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[Row, Row]
"""One question's run with streaming, and the one without."""


def pairs_of(rows: Sequence[Row]) -> list[Pair]:
    """Return the pairs, which stand in the file one after the other; a question may have several."""
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    for streaming, waiting in pairs:
        assert (streaming["arm"], waiting["arm"]) == ("streaming", "not streaming")
        assert streaming["question"] == waiting["question"]
    return pairs


def median_pair(pairs: Sequence[Pair]) -> Pair:
    """Return the pair whose speedup after retrieval is the median; of an even number, the lower one."""
    by_speedup = sorted(pairs, key=lambda pair: pair[1]["ttft_after_retrieval_s"] / pair[0]["ttft_after_retrieval_s"])
    return by_speedup[(len(pairs) - 1) // 2]


def draw(pair: Pair) -> str:
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
        text(16, top + 6, label, style=' font-weight="600"')
        text(16, top + 28, "retrieval", GREY)
        text(16, top + 60, "model", GREY)
        bar(top + 10, 0, retrieved_s, RETRIEVAL)
        for start_s, end_s in row["prefill_s"]:
            bar(top + 42, start_s, end_s, PREFILL)
        bar(top + 42, first_token_s, row["total_s"], DECODE)
        x_0, x_1, y = LEFT + retrieved_s * scale, LEFT + first_token_s * scale, top + 80
        parts += [f'<path d="M{x:.1f} {top + 8}V{y + 5}" stroke="{INK}" stroke-dasharray="3 3"/>' for x in (x_0, x_1)]
        parts.append(f'<path d="M{x_0:.1f} {y}H{x_1:.1f}" stroke="{INK}" stroke-width="2"/>')
        label = f"{row['ttft_after_retrieval_s']:.2f} s to the first token"
        text(x_0 - 8, y + 5, label, style=' text-anchor="end"')  # behind the line it might leave the picture
    for second in range(int(last_s) + 1):
        x = LEFT + second * scale
        parts.append(f'<path d="M{x:.1f} 262v6" stroke="{GREY}"/>')
        text(x, 282, f"{second} s", GREY, ' text-anchor="middle"')
    for x, fill, words in ((150, RETRIEVAL, "pages arrive"), (290, PREFILL, "prefill"), (390, DECODE, "answer")):
        parts.append(f'<rect x="{x}" y="295" width="14" height="14" rx="2" fill="{fill}"/>')
        text(x + 20, 307, words)
    return "\n".join([*parts, "</svg>\n"])


def cells(pairs: Sequence[Pair], time: str) -> tuple[str, str, str]:
    """Return a table's cells of one time: both medians, and how many times as fast streaming is, with its interval."""
    streaming, waiting = (statistics.median(row[time] for row in rows) for rows in zip(*pairs, strict=True))
    low, middle, high = interval([waiting[time] / streaming[time] for streaming, waiting in pairs])
    return f"{streaming:.2f}", f"{waiting:.2f}", f"{middle:.2f}x ({low:.2f} to {high:.2f})"


def live_search_pairs() -> list[Pair]:
    """Return the pairs of the search that computes its ranking, streaming first."""
    rows = json.loads(LIVE_SEARCH.read_text())["rows"]
    arms: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {})[row["question"], row["turn"]] = row
    return [(arms["every update"][key], waiting) for key, waiting in arms["not streaming"].items()]


def put_into_readme(text: str, groups: dict[str, list[Pair]]) -> str:
    """Return README.md with the figures of the picture and of the search, which is not replayed: see `LIVE_SEARCH`."""
    first, second = (f"{row['ttft_after_retrieval_s']:.2f}" for row in median_pair(groups["crawl"]))
    crawl = cells(groups["crawl"], "ttft_after_retrieval_s")[2].removesuffix(")").replace("(", "(95 % interval ")
    ratio, _, span = crawl.partition(" ")
    for sentence in (
        f"{first} s after retrieval; without, {second} s](",
        f"the first token comes {ratio} as soon {span})",
        "{} s after the question with streaming and {} s without: {}".format(*cells(live_search_pairs(), "ttft_s")),
    ):
        pattern = re.sub(r"\d+\\\.\d+", r"\\d+\\.\\d+", re.escape(sentence))
        found = re.findall(pattern, text)
        assert len(found) == 1, f"README.md has {len(found)} times something like: {sentence}"
        text = text.replace(found[0], sentence)
    return text


def put_into_tables(text: str, groups: dict[str, list[Pair]]) -> str:
    """Return a page with the figures of its section about the demo. Rows without a name belong to the group above."""
    before, section, after = re.split(r"(^## The demo\n.*?)(?=^## )", text, maxsplit=1, flags=re.DOTALL | re.MULTILINE)
    lines, group = section.split("\n"), ""
    for number, line in enumerate(lines):
        columns = [column.strip() for column in line.split("|")[1:-1]]
        if len(columns) != 5 or columns[1] not in LABELS:
            continue
        group = next((name for name in groups if columns[0].startswith(name)), group)
        name = re.sub(r"\d+ pairs", f"{len(groups[group])} pairs", columns[0])
        row = " | ".join([columns[1], *cells(groups[group], LABELS[columns[1]])])
        lines[number] = f"| {name} | {row} |" if name else f"| | {row} |"
    return before + "\n".join(lines) + after


def main() -> int:
    measured = json.loads(RESULTS.read_text())
    groups = {name: pairs_of(measured[name]) for name in ("crawl", "search")}
    texts = {PICTURE: draw(median_pair(groups["crawl"])), README: put_into_readme(README.read_text(), groups)}
    texts |= {page: put_into_tables(page.read_text(), groups) for page in TABLES}
    stale = [path for path, text in texts.items() if path.read_text() != text]
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} has other figures: run `python -m studies.demo.publish_figures`")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path])
        print(f"{path.relative_to(ROOT)}: written")
    print("these stand in words, and are yours to check:")
    for name, pairs in groups.items():
        num_same = sum(streaming["token_ids"] == waiting["token_ids"] for streaming, waiting in pairs)
        num_tokens = statistics.median(row["num_prompt_tokens"] for pair in pairs for row in pair)
        print(f"{name}: the same answers in {num_same} of {len(pairs)} pairs, prompts of {num_tokens:.0f} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
