"""Write what a benchmark measured, with what a reader needs to judge it."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions


def write_results(path: Path, rows: Sequence[Any], **more: Any) -> None:
    """Write a JSON file: the date, versions, `more`, such as a summary, and rows, which are dataclasses.

    The load is the machine's now, unless `more` has the `load` of another moment.
    """
    about = {"date": date.today().isoformat(), "versions": versions(), "load": os.getloadavg()[0]}
    results = {**about, **more, "rows": [asdict(row) for row in rows]}
    write_atomic(path, json.dumps(results, indent=1) + "\n")
