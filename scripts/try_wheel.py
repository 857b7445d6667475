"""Builds wheels and sdists of both distributions into dist/, and tries the wheels as a user would: away from the
checkout, with each Python.

    scripts/try_wheel.py [--all] [VERSION ...]

With each Python, in environments of their own: the command, every public name without any extra, what a type checker
sees, an index built with a toy embedder, searched and verified, a workload generated and shown, and the packages of
each extra.
A version of Python that is neither here nor to be had, and an extra that does not resolve with it, are told and are no
failure; with `--all` they are one. At the end: the files' SHA-256, and what still keeps them from being released.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")

UV = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
ENVIRONMENT = dict(os.environ)
for ours, of_pip in {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL"}.items():
    if of_pip in os.environ:  # settings for pip hold for uv too
        ENVIRONMENT.setdefault(ours, os.environ[of_pip])

CPU_TORCH = "torch==2.13.0+cpu\n"
"""The plain one brings gigabytes for CUDA."""

NAMES = "import streamrag; print(sum(getattr(streamrag, name) is not None for name in streamrag.__all__), 'names')"

IMPORTS = """
import importlib, re, sys
from importlib.metadata import packages_distributions, requires
lines = [line.replace("'", '"') for line in requires("streamrag")]
of_extra = [line for line in lines if f'extra == "{sys.argv[1]}"' in line]
wanted = {re.split(r"[^\\w.-]", line)[0].lower().replace("_", "-") for line in of_extra} - {"streamrag"}
of = {name: {p.lower().replace("_", "-") for p in packages} for name, packages in packages_distributions().items()}
modules = sorted(name for name in of if wanted & of[name] and name.isidentifier() and name[0] != "_")
for module in modules:
    importlib.import_module(module)
print("imports", *(modules or ["nothing"]))
"""

USER = """\
from streamrag import Pipeline, RetrieverSource
from streamrag.testing import ScriptedBackend

Pipeline(RetrieverSource(str.split), ScriptedBackend(), max_concurent_queries=2)
"""


EMBEDDER = """\
import zlib
import numpy as np

def embed(texts):
    rows = [np.bincount([zlib.crc32(word.encode()) % 64 for word in text.split()], minlength=64) for text in texts]
    return np.array(rows, dtype="float32")
"""

IVF = """
import asyncio
from pathlib import Path
from streamrag import IvfSource, build_index
Path("documents").mkdir()
for number in range(40):
    Path("documents", f"{number}.txt").write_text(f"word{number} of page{number}")

async def search():
    source = IvfSource("index", k=3, exact=True, embedder="toy:embed")
    await source.start(lambda line: None)
    try:
        return [event async for event in source.stream("word7 page7")][-1].chunks[0].uri
    finally:
        await source.aclose()

if __name__ == "__main__":
    built = build_index("documents", "index", embedder="toy:embed", kind="ivf")
    found = asyncio.run(search())
    assert (built.num_passages, found) == (40, "7.txt"), (built, found)
    print(f"built an IVF index of {built.num_passages} passages, and found {found}")
"""
"""Runs with `OF_EMBED` only."""

OF_EMBED = (
    "faiss-cpu>=1.10,<2",
    "markdown-it-py",
    "numpy",
    "snowballstemmer",
    "webencodings",
)
"""What the extra `embed` brings but sentence-transformers, whose place the toy embedder takes."""


class Failed(Exception):
    """What a person is told."""


def run(*command: str | Path, cwd: Path, can_fail: bool = False) -> str:
    """What it prints.

    :raises Failed: it fails, and nobody said that it may.
    """
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode and not can_fail:
        raise Failed(f"{' '.join(map(str, command[:4]))} ...:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def find_python(version: str) -> str | None:
    """An interpreter of this machine, or one that uv can fetch."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    of_pyenv = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))  # also those that are not on the path now
    found = run(UV, "python", "find", "--no-python-downloads", version, cwd=ROOT, can_fail=True).strip()
    if not found and not of_pyenv:
        run(UV, "python", "install", version, cwd=ROOT, can_fail=True)
        found = run(UV, "python", "find", "--no-python-downloads", version, cwd=ROOT, can_fail=True).strip()
    return found or (str(of_pyenv[-1]) if of_pyenv else None)


def environment(python: str, folder: Path, *wanted: str) -> Path:
    """A new one with these packages; its interpreter."""
    run(UV, "venv", "--quiet", "--python", python, folder, cwd=folder.parent)
    inside = folder / "bin" / "python"
    if wanted:
        run(UV, "pip", "install", "--quiet", "--python", inside, *wanted, cwd=folder.parent)
    return inside


def try_core(python: str, wheel: Path, folder: Path) -> str:
    """The command, the names, and the types."""
    inside = environment(python, folder / "core", str(wheel))
    version = run(inside.with_name("streamrag"), "--version", cwd=folder).strip()
    if version.split()[-1] != wheel.name.split("-")[1]:
        raise Failed(f"streamrag --version printed {version!r}, and the wheel is {wheel.name}")
    names = run(inside, "-c", NAMES, cwd=folder).strip()
    missing = run("sh", "-c", f"{inside.with_name('streamrag')} bench 2>&1", cwd=folder, can_fail=True)
    if "streamrag-bench is not installed" not in missing:
        raise Failed(f"streamrag bench should name what is not installed, and printed {missing!r}")
    (folder / "user.py").write_text(USER)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(inside), "--cache-dir", str(folder / "mypy")]
    told = run(*mypy, "user.py", cwd=folder, can_fail=True)
    misspelt = 'user.py:4: error: Unexpected keyword argument "max_concurent_queries"'
    if misspelt not in told or "Found 1 error" not in told:
        raise Failed(f"mypy should find the misspelt option and nothing else, and told:\n{told}")
    return f"{version}; {names} without any extra; mypy sees the types and the misspelt option"


def try_extra(python: str, wheel: Path, bench: Path, folder: Path, extra: str) -> str | None:
    """What could be imported; None where the extra does not resolve, or only with a torch for CUDA."""
    constraint = folder / "cpu.txt"
    constraint.write_text(CPU_TORCH)
    wanted = [f"streamrag[{extra}] @ {wheel.as_uri()}", "--constraint", str(constraint)]
    if extra == "bench":
        wanted.append(f"streamrag-bench @ {bench.as_uri()}")
    inside = environment(python, folder / extra)
    try:
        run(UV, "pip", "install", "--dry-run", "--python", inside, *wanted, cwd=folder)
    except Failed as error:
        reason = " ".join(str(error).partition("Because ")[2].split()) or str(error)
        if "torch==2.13.0+cpu" in reason:
            reason = "it needs torch, and a CPU build for this Python is not to be had"
        print(f"  {extra}: not tried, it does not resolve here: {reason[:300]}", flush=True)
        return None
    run(UV, "pip", "install", "--quiet", "--python", inside, *wanted, cwd=folder)
    if extra == "bench":
        command = inside.with_name("streamrag")
        run(command, "trace", "generate", "crawler", "--queries", "5", "--output", "made.jsonl", cwd=folder)
        run(command, "trace", "show", "made.jsonl", "--plot", "made.png", cwd=folder)
    return run(inside, "-c", IMPORTS, extra, cwd=folder).strip()


def try_ivf(python: str, wheel: Path, folder: Path) -> str:
    """An index built and searched with this Python, and verified by the command."""
    inside = environment(python, folder / "with-faiss", str(wheel), *OF_EMBED)
    place = folder / "ivf"
    place.mkdir()
    (place / "toy.py").write_text(EMBEDDER)
    (place / "search.py").write_text(IVF)
    found = run(inside, "search.py", cwd=place).strip()
    return f"{found}; {run(inside.with_name('streamrag'), 'index', 'verify', 'index', cwd=place).strip()}"


def extras_of(wheel: Path) -> Sequence[str]:
    told = run("unzip", "-p", wheel, "*/METADATA", cwd=ROOT)
    return re.findall(r"^Provides-Extra: (.+)$", told, re.MULTILINE)


def left_to_do(root: Path) -> Iterator[str]:
    """Yield what keeps a checkout from being released, by the first points of the checklist."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if f'__version__ = "{version}"' not in (root / "streamrag" / "support" / "versions.py").read_text():
        yield f"streamrag/support/versions.py has not the version {version} of pyproject.toml"
    changes = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)}\b.*\d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        yield f"CHANGELOG.md has no section {version} with its date"
    if re.search(r"^## Unreleased\n\s*[^#\s]|^## Unreleased\n\s*###", changes, re.MULTILINE):
        yield "CHANGELOG.md has changes under Unreleased"
    if run("git", "status", "--porcelain", cwd=root).strip():
        yield "files are not committed"
    if run("git", "tag", "--list", f"v{version}", cwd=root).strip():
        yield f"v{version} has been released already"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=PYTHONS, metavar="VERSION")
    parser.add_argument("--all", action="store_true", help="fail if a Python or an extra could not be tried")
    arguments = parser.parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(UV, "build", "--quiet", "--all-packages", "--out-dir", dist, cwd=ROOT)  # the wheels from the sdists
    (wheel,), (bench,) = dist.glob("streamrag-*.whl"), dist.glob("streamrag_bench-*.whl")
    built = [wheel, bench, *sorted(dist.glob("*.tar.gz"))]
    for file in built:
        print(f"built {file.name} ({file.stat().st_size:,} bytes)")
    num_tried = num_left = 0
    try:
        for version in arguments.versions:
            python = find_python(version)
            if python is None:
                print(f"Python {version}: not tried, it is neither on this machine nor to be had")
                num_left += 1
                continue
            with tempfile.TemporaryDirectory(prefix="streamrag-wheel-") as folder:
                print(f"Python {version}: {try_core(python, wheel, Path(folder))}", flush=True)
                print(f"  {try_ivf(python, wheel, Path(folder))}", flush=True)
                num_tried += 1
                for extra in extras_of(wheel):
                    told = try_extra(python, wheel, bench, Path(folder), extra)
                    num_left += told is None
                    if told:
                        print(f"  {extra}: {told}", flush=True)
    except Failed as error:
        print(f"failed: {error}")
        return 1
    for file in built:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
    for line in left_to_do(ROOT):
        print(f"before a release: {line}")
    print("the checklist of a release is in CONTRIBUTING.md")
    print(f"tried {num_tried} of {len(arguments.versions)} versions of Python; {num_left} things were not to be had")
    return 1 if not num_tried or (arguments.all and num_left) else 0


if __name__ == "__main__":
    sys.exit(main())
