"""Write what a benchmark measured, with what a reader needs to judge it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from streamrag.bench.provenance import versions
from streamrag.support.files import write_atomic


def write_results(path: Path, summary: Any, rows: Sequence[Any], **more: Any) -> None:
    """Write a JSON file: the date, versions, the machine's load, `more`, a summary, and rows, which are dataclasses."""
    about: Mapping[str, Any] = {"date": date.today().isoformat(), "versions": versions(), "load": os.getloadavg()[0]}
    results = {**about, **more, "summary": summary, "rows": [asdict(row) for row in rows]}
    write_atomic(path, json.dumps(results, indent=1) + "\n")
