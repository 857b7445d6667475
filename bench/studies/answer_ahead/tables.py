"""Write the table about drafts into its page, from the results file, without running anything.

    python -m studies.answer_ahead.tables

`make -C bench answer-ahead` does this at its end. A test compares the page with the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from streamrag.support.files import write_atomic
from studies.folders import DOCS
from studies.markdown_tables import table, with_tables

RESULTS = Path(__file__).parent
PAGE = DOCS / "answer-ahead.md"

MOST_WORSE = 0.02
"""The target: no percentile is later than without drafts by a larger share."""
Summary: TypeAlias = Mapping[str, Any]
Loads: TypeAlias = Mapping[str, Summary]


def measured_table(found: Loads) -> str:
    """Return seconds from the end of retrieval, without and with drafts; in bold what misses the target."""
    columns = [(token, percent) for token in ("first", "last") for percent in (50, 95)]
    head = ["retrieval", *(f"{token} token, P{percent}" for token, percent in columns)]
    head += ["bound, last P50", "whole draft right", "same tokens"]

    def cell(row: Summary, token: str, percent: int) -> str:
        before, after = (row[f"{token}_s_p{percent}_{way}"] for way in ("without", "ahead"))
        change = after / before - 1
        return f"{before:.3f}, {after:.3f}" + (f" **{change:+.1%}**" if change > MOST_WORSE else "")

    return table(
        head,
        (
            [name, *(cell(row, *column) for column in columns), f"{row['bound_s']:.2f}"]
            + [f"{row[f'num_{what}']} of {row['num_pairs']}" for what in ("complete", "equal")]
            for name, row in found.items()
        ),
    )


def page_tables() -> dict[str, str]:
    """Return the tables of the page by name, from the results file."""
    return {"measured": measured_table(json.loads((RESULTS / "results.json").read_text())["loads"])}


def main() -> None:
    write_atomic(PAGE, with_tables(PAGE.read_text(), page_tables()))


if __name__ == "__main__":
    main()
