"""Runs the notebook of `examples/` and writes what it shows into it, without the times of this machine's clock."""

from copy import deepcopy
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "a_query_live.ipynb"


def executed(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run of its own; those of a cell that go to one stream are one output."""
    ran = deepcopy(notebook)
    NotebookClient(ran, timeout=120, record_timing=False, coalesce_streams=True).execute()
    return ran


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.write(executed(notebook), NOTEBOOK)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
