"""What decisions about evicted KV were expected to cost, against what they did cost: figures, a picture, an example."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from rich.console import Console
from rich.table import Table

from streamrag.engine.costs.step_profiles import TableProfile, recompute_s
from streamrag.records import RequestRecord
from streamrag.support.files import write_atomic
from streamrag_bench.report.canvas import make_panels, plain_log_ticks
from streamrag_bench.summary import percentile

Kind: TypeAlias = Literal["recompute", "load", "save"]
KINDS: tuple[Kind, ...] = get_args(Kind)

GOAL = 0.2
"""The median relative error that is aimed at."""
LOOKS = {"recompute": ("o", "#d9762b"), "load": ("s", "#2f6690"), "save": ("^", "#5f9e6e")}
LABELS = {"recompute": "computed again", "load": "copied in", "save": "copied out"}


class Decision(NamedTuple):
    """KV that was computed again, copied in or copied out, by what it was expected to take."""

    kind: Kind
    num_tokens: int
    expected_s: float
    observed_s: float

    @property
    def error(self) -> float:
        """Relative to what was observed."""
        return abs(self.observed_s - self.expected_s) / self.observed_s


def decisions_of(records: Sequence[RequestRecord]) -> list[Decision]:
    """All of which both costs are known."""
    found = []
    for record in records:
        for restore in record.restores:
            if restore.observed_s:
                kind: Kind = "load" if restore.choice == "swap" else "recompute"
                found.append(Decision(kind, restore.num_tokens, restore.expected_s, restore.observed_s))
        found += [
            Decision("save", lost.num_tokens_saved, lost.expected_save_s, lost.save_s)
            for lost in record.preemptions
            if lost.save_s
        ]
    return found


def told(decisions: Sequence[Decision]) -> dict[str, Any]:
    """For each kind how many there were, and how far off; times in seconds, of all together."""
    made: dict[str, Any] = {}
    for kind in KINDS:
        of = [decision for decision in decisions if decision.kind == kind]
        if of:
            made[kind] = {
                "num": len(of),
                "median_error": median(d.error for d in of),
                "p90_error": percentile([d.error for d in of], 0.9),
                "median_ratio": median(d.observed_s / d.expected_s for d in of),
                "expected_s": sum(d.expected_s for d in of),
                "observed_s": sum(d.observed_s for d in of),
            }
    return made


def show_decisions(decisions: Sequence[Decision], console: Console) -> None:
    table = Table(title="what was expected, and what it took", title_justify="left")
    table.add_column("")
    for name in ("times", "median error", "P90", "observed/expected", "expected s", "observed s"):
        table.add_column(name, justify="right")
    for kind, of in told(decisions).items():
        table.add_row(
            LABELS[kind],
            str(of["num"]),
            f"{of['median_error']:.0%}" + (f", over {GOAL:.0%}" if of["median_error"] > GOAL else ""),
            f"{of['p90_error']:.0%}",
            f"{of['median_ratio']:.2f}",
            f"{of['expected_s']:.3f}",
            f"{of['observed_s']:.3f}",
        )
    console.print(table)


def example(records: Sequence[RequestRecord], profile: TableProfile, budget: int) -> dict[str, Any] | None:
    """What its record and the profile say of a request that was evicted once, saved, and loaded again.

    None if none was.
    """
    for record in sorted(records, key=lambda r: -r.num_loaded):
        if len(record.preemptions) == len(record.restores) == 1:
            (lost,), (restore,) = record.preemptions, record.restores
            if lost.save_s and restore.choice == "swap" and restore.observed_s:
                whole = record.as_dict()
                names = ("request_id", "num_prompt_tokens", "num_recomputed", "num_loaded", "preemptions", "restores")
                by_profile = _by_profile(profile, lost.num_tokens_lost // profile.block_size, budget)
                return {**{name: whole[name] for name in names}, "by_profile": by_profile}
    return None


def _by_profile(profile: TableProfile, num_blocks: int, budget: int) -> dict[str, float]:
    """Before anything was corrected by what was observed."""
    assert profile.copies is not None
    return {
        "num_blocks": num_blocks,
        "recompute_s": recompute_s(profile, 0, num_blocks * profile.block_size, budget),
        "out_s": profile.copies.out_s(num_blocks),
        "in_s": profile.copies.in_s(num_blocks),
    }


def show_example(one: dict[str, Any] | None, console: Console) -> None:
    text = "No request was evicted once, saved and loaded again." if one is None else json.dumps(one, indent=2)
    console.print(text, markup=False, soft_wrap=True)


def draw(path: Path, decisions: Sequence[Decision]) -> None:
    """Write a PNG: each decision a dot. Needs matplotlib."""
    figure, (panel,) = make_panels(1, height=5.2)
    seconds = [s for d in decisions for s in (d.expected_s, d.observed_s) if s > 0]
    low, high = min(seconds) / 1.5, max(seconds) * 1.5
    panel.fill_between(
        [low, high],
        [low / (1 + GOAL), high / (1 + GOAL)],
        [low / (1 - GOAL), high / (1 - GOAL)],
        color="#ececec",
        linewidth=0,
        label="20 % off",
    )
    panel.plot([low, high], [low, high], color="#555555", linewidth=1, label="as expected")
    for kind, of in told(decisions).items():
        marker, color = LOOKS[kind]
        dots = [d for d in decisions if d.kind == kind]
        label = f"{LABELS[kind]}: {of['num']}, median error {of['median_error']:.0%}"
        panel.plot(
            [d.expected_s for d in dots],
            [d.observed_s for d in dots],
            marker,
            color=color,
            markersize=4,
            alpha=0.6,
            markeredgewidth=0,
            label=label,
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(low, high)
    panel.set_ylim(low, high)
    panel.set_aspect("equal")
    panel.set_xlabel("expected, when it was decided: seconds")
    panel.set_ylabel("observed: seconds")
    panel.grid(color="#e4e4e4", linewidth=0.6)
    plain_log_ticks(panel.xaxis)
    plain_log_ticks(panel.yaxis)
    panel.set_title(
        f"What {len(decisions)} decisions about evicted KV were to cost, and did cost", loc="left", fontsize=10
    )
    panel.legend(loc="upper left", frameon=False, fontsize=8)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    write_atomic(path, drawn.getvalue())
