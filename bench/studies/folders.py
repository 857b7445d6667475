"""Where studies find the documentation and keep what takes long to make."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TRACES = ROOT / "traces"
DEMO = ROOT / ".demo"
"""The model and the index of `make demo`."""
KEPT = ROOT / "bench-results"
"""Finished cells and other work, with which the same command goes on."""
