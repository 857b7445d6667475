"""A picture of a hardware profile: what recomputing tokens takes, and what copying their KV does. Needs matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from streamrag.bench.report_canvas import make_panels
from streamrag.engine.copies import CopyCosts
from streamrag.engine.costs import DEFAULT_BUDGET, StepProfile, recompute_s
from streamrag.errors import ConfigurationError
from streamrag.support.display_text import for_picture
from streamrag.support.files import write_whole

RECOMPUTE, RESTORE, SAVE = "#d9762b", "#2f6690", "#7ba6c9"
DEFAULT_MOST_TOKENS = 32_768
NUM_POINTS = 120


def step_budget(profile: StepProfile) -> int:
    """Tokens in a step, when it was measured."""
    return int(profile.provenance.get("max_num_batched_tokens", DEFAULT_BUDGET))


def most_tokens(profile: StepProfile) -> int:
    """Tokens of the longest prompt that there can be."""
    return int(profile.provenance.get("max_model_len", DEFAULT_MOST_TOKENS))


def crossing(profile: StepProfile, copies_s: Callable[[int], float], most: int) -> int | None:
    """From how many tokens on their KV is copied sooner than computed; None if it never is, up to `most` tokens.

    `copies_s` tells of the copies of so many blocks. Whole blocks, which is what is copied.
    """
    size, budget = profile.block_size, step_budget(profile)

    def is_sooner(num_blocks: int) -> bool:
        return copies_s(num_blocks) < recompute_s(profile, 0, num_blocks * size, budget)

    low, high = 0, 1
    while not is_sooner(high):
        if high * size >= most:
            return None
        low, high = high, min(2 * high, max(most // size, high + 1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_sooner(middle) else (middle, high)
    return high * size


def draw_profile(path: Path, profile: StepProfile) -> None:
    """Write a PNG with both curves and where they cross; dots are measurements.

    :raises MissingDependencyError: without matplotlib.
    :raises ConfigurationError: the profile does not know copies, or the file cannot be written.
    """
    copies = profile.copies
    if copies is None:
        raise ConfigurationError(f"profile {profile.name!r} says nothing of copies: there is nothing to compare")
    figure, (panel,) = make_panels(1, height=4.6)
    most = most_tokens(profile)
    _draw_recompute(panel, profile, most)
    _draw_copies(panel, profile, copies, most)
    _mark(panel, profile, crossing(profile, copies.in_s, most))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(profile.block_size, most)
    panel.set_xlabel("tokens whose KV is lost")
    panel.set_ylabel("seconds")
    panel.grid(color="#e4e4e4", linewidth=0.6)
    panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    panel.yaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    figure.suptitle(for_picture(profile.name), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    write_whole(path, drawn.getvalue())


def _draw_recompute(panel: Any, profile: StepProfile, most: int) -> None:
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
    size = profile.block_size
    blocks = [num for num in sorted({num // size for num in _spread(size, most)}) if num]
    for points, seconds, color, label in (
        (copies.in_points, copies.in_s, RESTORE, "copy KV in from host memory"),
        (copies.out_points, copies.out_s, SAVE, "copy KV out"),
    ):
        panel.plot([num * size for num in blocks], [seconds(num) for num in blocks], color=color, label=label)
        if isinstance(profile.provenance.get("copies"), str):
            panel.plot([num * size for num, _ in points], [taken for _, taken in points], ".", color=color)


def _mark(panel: Any, profile: StepProfile, tokens: int | None) -> None:
    """Where copying in becomes the quicker way."""
    if tokens is None:
        text = "recomputing is always quicker than copying in"
    elif tokens == profile.block_size:
        text = "copying in is always quicker than recomputing"
    else:
        text = f"copying in is quicker than recomputing from {tokens:,} tokens on"
        panel.axvline(tokens, color="#777777", linewidth=0.8, linestyle="--")
    panel.set_title(text, loc="left", fontsize=9)


def _spread(low: int, high: int) -> Sequence[int]:
    """Numbers of tokens, as far apart as they are large."""
    factor = (high / low) ** (1 / NUM_POINTS)
    return sorted({round(low * factor**index) for index in range(NUM_POINTS + 1)})
