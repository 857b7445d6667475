"""Plot a calibration: the probability that a result is final, by stage. Needs matplotlib."""

from pathlib import Path
from typing import Any

from streamrag.bench.report.canvas import make_panels, write_png
from streamrag.sources.emission.calibration import MAX_LENGTH, Calibration, Odds

MAX_LINES = 8
MAX_CELLS = 20


def draw_calibration(path: Path, calibration: Calibration) -> None:
    """Write a PNG with two panels: probabilities by stage, and by the number of stages without a change.

    :raises MissingDependencyError: matplotlib is not installed.
    :raises ConfigurationError: the file cannot be written.
    """
    figure, (by_stage, by_stable) = make_panels(2, height=3.8)
    odds = Odds(calibration)
    stages = sorted({count.left for count in calibration.counts}, reverse=True)[-MAX_CELLS:]
    _draw_stages(by_stage, calibration, odds, stages)
    _draw_stable(by_stable, calibration, odds, stages)
    for panel in (by_stage, by_stable):
        panel.set_ylim(0, 1.02)
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.set_ylabel("probability that it is final")
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    write_png(figure, path, f"{calibration.source}: {calibration.num_queries:,} queries")


def _draw_stages(panel: Any, calibration: Calibration, odds: Odds, stages: list[int]) -> None:
    """Draw the probabilities of prefixes, of the set and of the order by stage, a line for each."""
    from matplotlib import colormaps

    longest = max((count.length for count in calibration.counts), default=0)
    step = max(longest // MAX_LINES, 1)
    lengths = sorted({1, *range(step, min(longest, MAX_LENGTH) + 1, step)}) if longest else []
    colors = colormaps["viridis"]
    places = range(len(stages))
    for length in lengths:
        color = colors(0.85 * (length - 1) / max(longest - 1, 1))
        likely = [odds.final("prefix", length, left) for left in stages]
        panel.plot(
            places, likely, ".-", color=color, linewidth=1, label=f"first {length}" if length > 1 else "the first"
        )
    for what, style, label in (("set", ":", "all, in any order"), ("order", "--", "all, in order")):
        panel.plot(places, [odds.final(what, 0, left) for left in stages], style, color="#333333", label=label)  # type: ignore[arg-type]
    panel.set_title("passages, by stage", loc="left", fontsize=9)
    _name_stages(panel, stages)


def _draw_stable(panel: Any, calibration: Calibration, odds: Odds, stages: list[int]) -> None:
    """Draw the probability that the order of passages is final, a line for each number of unchanged stages."""
    counted = [count for count in calibration.counts if count.what == "order"]
    for stable in sorted({count.stable for count in counted}):
        there = [left for left in stages if any(c.left == left and c.stable == stable and c.num for c in counted)]
        label = "just changed" if stable == 0 else f"the same for {stable} stage{'s' if stable > 1 else ''}"
        likely = [odds.final("order", 0, left, stable) for left in there]
        panel.plot([stages.index(left) for left in there], likely, "o-", linewidth=1, markersize=4, label=label)
    panel.set_title("all passages in order, by how long they have been the same", loc="left", fontsize=9)
    _name_stages(panel, stages)


def _name_stages(panel: Any, stages: list[int]) -> None:
    panel.set_xticks(range(len(stages)), [str(left) for left in stages])
    panel.set_xlabel("stages left")
