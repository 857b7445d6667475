"""A picture of a hardware profile: the seconds to recompute tokens, and to copy their KV.

    python experiments/profile_picture.py PROFILE PNG

PROFILE is the name of a profile, or a file that `streamrag profile` wrote.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrag.engine.costs.copy_costs import CopyCosts
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import StepProfile, recompute_s
from streamrag.errors import ConfigurationError
from streamrag_bench.profile.crossing import crossing, describe_crossing, most_tokens, step_budget
from streamrag_bench.report.canvas import make_panels, write_png

RECOMPUTE, RESTORE, SAVE = "#d9762b", "#2f6690", "#7ba6c9"
NUM_POINTS = 120


def draw_profile(path: Path, profile: StepProfile) -> None:
    """Write a PNG with the curves of recomputing and copying, their crossing, and dots for measurements.

    :raises MissingDependencyError: matplotlib is not installed.
    :raises ConfigurationError: the profile has no copy times, or the file cannot be written.
    """
    copies = profile.copies
    if copies is None:
        raise ConfigurationError(f"profile {profile.name!r} has no copy times: there is nothing to compare")
    figure, (panel,) = make_panels(1, height=4.6)
    most = most_tokens(profile)
    _draw_recompute(panel, profile, most)
    _draw_copies(panel, profile, copies, most)
    tokens = crossing(profile, copies.in_s, most)
    panel.set_title(describe_crossing(tokens, profile.block_size), loc="left", fontsize=9)
    if tokens not in (None, profile.block_size):
        panel.axvline(tokens, color="#777777", linewidth=0.8, linestyle="--")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(profile.block_size, most)
    panel.set_xlabel("tokens whose KV is lost")
    panel.set_ylabel("seconds")
    panel.grid(color="#e4e4e4", linewidth=0.6)
    panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    panel.yaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    write_png(figure, path, profile.name)


def _draw_recompute(panel: Any, profile: StepProfile, most: int) -> None:
    """Plot the seconds to recompute the first or the last tokens of `most`, with dots for recorded measurements."""
    budget = step_budget(profile)
    tokens = _spread(profile.block_size, most)
    first = [recompute_s(profile, 0, num, budget) for num in tokens]
    last = [recompute_s(profile, most - num, most, budget) for num in tokens]
    panel.plot(tokens, first, color=RECOMPUTE, label="recompute the first tokens of a prompt")
    panel.plot(tokens, last, color=RECOMPUTE, linestyle=":", label=f"recompute the last of {most:,}")
    measured = profile.provenance.get("recompute_s")
    if isinstance(measured, dict):
        _dots(panel, measured["alone"], "o", "measured, alone")
        _dots(panel, measured["beside"], "x", f"measured, beside {measured['num_beside']} answers being decoded")


def _dots(panel: Any, measured: Mapping[str, float], marker: str, label: str) -> None:
    tokens = [int(num) for num in measured]
    panel.plot(tokens, list(measured.values()), marker, color=RECOMPUTE, markersize=5, fillstyle="none", label=label)


def _draw_copies(panel: Any, profile: StepProfile, copies: CopyCosts, most: int) -> None:
    """Plot the seconds to copy KV in and out, in whole blocks, with dots if the profile has measured copies."""
    size = profile.block_size
    blocks = [num for num in sorted({num // size for num in _spread(size, most)}) if num]
    for points, seconds, color, label in (
        (copies.in_points, copies.in_s, RESTORE, "copy KV in from host memory"),
        (copies.out_points, copies.out_s, SAVE, "copy KV out"),
    ):
        panel.plot([num * size for num in blocks], [seconds(num) for num in blocks], color=color, label=label)
        if isinstance(profile.provenance.get("copies"), str):
            panel.plot([num * size for num, _ in points], [copy_s for _, copy_s in points], ".", color=color)


def _spread(low: int, high: int) -> Sequence[int]:
    """Return logarithmically spaced numbers of tokens."""
    factor = (high / low) ** (1 / NUM_POINTS)
    return sorted({round(low * factor**index) for index in range(NUM_POINTS + 1)})


if __name__ == "__main__":
    draw_profile(Path(sys.argv[2]), load_profile(sys.argv[1]))
