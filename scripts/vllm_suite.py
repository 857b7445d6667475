"""Run vLLM's own tests of its scheduler and of KV connectors with our scheduler, and explain what differs.

    .venv/bin/python -m scripts.vllm_suite [--short] [--page]

The release is the one on the path; `make vllm VERSION=0.33.0` puts another one there. Its tests come from its sdist,
and stay in .venv/vllm/VERSION.tests. They run with vLLM's scheduler, and with ours in its place. A test that
passes with vLLM's only needs a row in vllm_suite.toml, which says why. It is an error if a test has no row, if its
verdict is "fault", or if a row is stale: one of its tests passes now, or is gone.
--page writes the rows into docs/internals/vllm-suite.md instead. pytest loads this module as a plugin, too.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrag.backends.vllm.version import DISTRIBUTIONS, SUPPORTED, series_of
from streamrag.support.versions import installed_versions

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".venv" / "vllm"
TABLE = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "internals" / "vllm-suite.md"
VERDICTS = {
    "refused feature": "Refused features",
    "another legitimate order": "Another legitimate order",
    "ours is better": "Ours is better",
    "fault": "Faults",
}
REFUSAL = "streaming does not work with "
MODEL = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu", "bos_token_id": 2,
    "eos_token_id": 2, "pad_token_id": 1, "do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768,
    "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "torch_dtype": "float16",
    "vocab_size": 50272, "word_embed_proj_dim": 768,
}  # fmt: skip
"""The configuration of facebook/opt-125m, which most tests name. They need no weights."""


SHORT = (
    "core/test_async_scheduler.py",
    "core/test_deferred_block_free.py",
    "core/test_prefix_replay.py",
    "core/test_swa_inflight_window_free.py",
    "core/test_worker_slot_overflow.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_kv_connector_lifecycle.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    "kv_connector/unit/test_scheduler_kv_connector_override.py",
)
LONG = (
    "kv_connector/unit/test_bidirectional_kv_transfer.py",
    "streaming_input/test_scheduler_streaming.py",
    "core/test_priority_scheduler_random.py",
    "core/test_priority_preemption_bug.py",
    "core/test_scheduler.py",
    "core/test_prefix_caching.py",
    "ec_connector/unit/test_ec_transfer_params.py",
    "kv_connector/unit/test_decode_bench_connector.py",
    "kv_connector/unit/test_moriio_connector.py",
    "kv_connector/unit/test_multi_connector.py",
    "kv_connector/unit/test_nixl_connector.py",
    "kv_connector/unit/test_nixl_simple_cpu_offload.py",
    "kv_connector/unit/offloading_connector/test_scheduler.py",
    "spec_decode/test_dflash_lookahead.py",
    "spec_decode/test_dynamic_sd.py",
)


@dataclass(frozen=True)
class Row:
    """Why tests pass with vLLM's scheduler only."""

    tests: tuple[str, ...]
    """Names below tests/v1. Without brackets, a name is that of all its parameters; within them, * is any text."""
    verdict: str
    why: str
    message: str = ""
    """What the failure must say, so that no other one hides behind this row; empty for no check."""
    series: tuple[str, ...] = SUPPORTED


@dataclass(frozen=True)
class Outcome:
    """What one run of a test gave."""

    has_passed: bool
    message: str = ""


class SourcesUnavailableError(Exception):
    """The package index does not have, or cannot be asked for, the sources of a release."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="only files of short tests; none where they cannot be had")
    parser.add_argument("--page", action="store_true", help=f"run nothing; write the table into {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page_with_rows(PAGE.read_text()))
        return 0
    version = next(iter(installed_versions(*DISTRIBUTIONS).values())).split("+")[0]
    try:
        folder = sources_of(version)
    except SourcesUnavailableError as error:
        print(f"{'skipped: ' if arguments.short else ''}the tests of vLLM {version} cannot be had: {error}")
        return 0 if arguments.short else 1
    files = SHORT if arguments.short else SHORT + LONG
    rows = [row for row in read_rows() if series_of(version) in row.series]
    ours = run_tests(folder, files, with_ours=True)
    if arguments.short:  # nearly all of these pass with vLLM's, so only what is unexplained is worth another process
        unexplained = [
            test for test in ours if not ours[test].has_passed and not any(has_row(row, test) for row in rows)
        ]
        theirs = {test: Outcome(True) for test in ours}
        theirs |= run_tests(folder, unexplained, with_ours=False) if unexplained else {}
    else:  # after ours: some of them listen at the same ports
        theirs = run_tests(folder, files, with_ours=False)
    passed = [test for test, outcome in theirs.items() if outcome.has_passed]
    # A test that is unknown with ours is in a file that could not be imported, or is skipped.
    different = [test for test in passed if not ours.get(test, Outcome(False)).has_passed]
    problems = list(problems_of(rows, ours, different, files))
    print(*problems, sep="\n")
    counts = Counter(row.verdict for test in different for row in rows if has_row(row, test))
    num_same = len(passed) - len(different)
    print(f"vLLM {version}: {len(passed)} tests pass with its scheduler, {num_same} of them with ours: {dict(counts)}")
    print(json.dumps({"suite_passed": num_same, "suite_different": len(different)}))
    return 1 if problems or not passed else 0


def sources_of(version: str) -> Path:
    """Return the folder with the tests of a release, which are downloaded unless they are there."""
    folder = BUILD / f"{version}.tests"
    if folder.is_dir():
        return folder
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
        unpacking, sdist = Path(temporary) / "unpacking", Path(temporary) / "sdist"
        download(sdist_of(version), sdist)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacking, tests_in(archive), filter="data")
        (unpacking / "tests" / "conftest.py").unlink()  # for tests with an engine
        (unpacking / "pytest.ini").write_text("[pytest]\n")
        model = unpacking / "facebook" / "opt-125m" / "config.json"
        model.parent.mkdir(parents=True)
        model.write_text(json.dumps(MODEL))
        unpacking.rename(folder)
    return folder


def tests_in(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield what an sdist has below its folder tests, without the name of the sdist's own folder."""
    for member in archive:
        _, _, name = member.name.partition("/")
        if name.startswith("tests/"):
            yield member.replace(name=name)


def sdist_of(version: str) -> dict[str, Any]:
    """Ask the package index for the sdist of a release: its URL and hashes. Nothing is built."""
    uv = shutil.which("uv") or os.fspath(ROOT / ".uv" / "bin" / "uv")  # as in install.sh
    command = [uv, "pip", "compile", "-", "--quiet", "--no-deps", "--no-sources", "--no-header", "--format=pylock.toml"]
    try:
        lock = subprocess.run(command, cwd=ROOT, input=f"vllm=={version}", capture_output=True, text=True, check=True)
    except OSError as error:
        raise SourcesUnavailableError(f"{uv} does not run: {error}") from error
    except subprocess.CalledProcessError as error:
        raise SourcesUnavailableError(error.stderr.strip()) from error
    (package,) = tomllib.loads(lock.stdout)["packages"]
    sdist: dict[str, Any] = package.get("sdist", {})
    if "url" not in sdist:
        raise SourcesUnavailableError("the package index has no sdist")
    return sdist


def download(sdist: Mapping[str, Any], to: Path) -> None:
    digest = hashlib.sha256()
    try:
        with httpx.stream("GET", sdist["url"], follow_redirects=True) as response, to.open("wb") as file:
            response.raise_for_status()
            for piece in response.iter_bytes():
                digest.update(piece)
                file.write(piece)
    except httpx.HTTPError as error:
        raise SourcesUnavailableError(f"the sdist could not be downloaded: {error!r}") from error
    if digest.hexdigest() != sdist["hashes"]["sha256"]:
        raise SourcesUnavailableError("the sdist is not the one that the package index describes")


def run_tests(folder: Path, tests: Sequence[str], with_ours: bool) -> dict[str, Outcome]:
    """Run tests of vLLM, and return what each gave, by its name below tests/v1. Skipped ones are left out."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # First on the path: their `tests` is a package, and hides ours.
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment.get('PYTHONPATH', ROOT)}"
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = Path(temporary) / "outcomes.json"
        command = [sys.executable, "-m", "pytest", "-p", "scripts.vllm_suite", f"--outcomes={outcomes}"]
        command += ["--quiet", "--tb=no", "--timeout=300", "--continue-on-collection-errors"]
        command += ["-W", "ignore", "-p", "no:cacheprovider", *(["--with-ours"] if with_ours else [])]
        command += [f"tests/v1/{test}" for test in tests]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if ran.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # a part may not have run
            raise RuntimeError(f"vLLM's tests ended with exit code {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        return {name: Outcome(**outcome) for name, outcome in json.loads(outcomes.read_text()).items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="the file for the outcomes")
    parser.addoption("--with-ours", action="store_true", help="put our scheduler in place of vLLM's")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if early_config.known_args_namespace.with_ours:
        use_our_scheduler()  # before files of fixtures import vLLM's


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OutcomeWriter(config.option.outcomes))


def use_our_scheduler() -> None:
    """Put our classes where tests that are imported later look for vLLM's, with the costs of steps left unknown.

    Nothing computes in these tests: how long their steps take depends on what else the machine does, and so would the
    lengths of ours.
    """
    assert not any(name.startswith("tests.") for name in sys.modules), "vLLM's scheduler is in use already"
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.core.sched.diffusion_scheduler  # extends vLLM's
    import vllm.v1.core.sched.scheduler

    from streamrag.backends.vllm.scheduler.hooks import AsyncStreamingScheduler, StreamingScheduler
    from streamrag.engine.step_size import StepCostEstimator

    StepCostEstimator.at = lambda self, now_s: None  # type: ignore[method-assign]
    vllm.v1.core.sched.scheduler.Scheduler = StreamingScheduler
    vllm.v1.core.sched.async_scheduler.AsyncScheduler = AsyncStreamingScheduler


class OutcomeWriter:
    """A plugin of pytest that writes what each test gave."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.passed and report.when == "call"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        name = report.nodeid.removeprefix("tests/v1/")
        crash = getattr(report.longrepr, "reprcrash", None)
        self.outcomes[name] = Outcome(report.passed, crash.message if crash else report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps({name: asdict(outcome) for name, outcome in self.outcomes.items()}))


def read_rows() -> list[Row]:
    rows: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["rows"]
    return [Row(**row | {key: tuple(each) for key, each in row.items() if isinstance(each, list)}) for row in rows]


def problems_of(
    rows: Sequence[Row], ours: Mapping[str, Outcome], different: Sequence[str], files: Sequence[str]
) -> Iterator[str]:
    """Yield what is wrong with tests that pass with vLLM's scheduler only, and with the rows that explain them."""
    for test in different:
        message = ours[test].message if test in ours else "it did not run"
        first_line = message.partition("\n")[0]
        found = [row for row in rows if has_row(row, test)]
        if len(found) != 1:
            yield f"{'in several rows' if found else 'unexplained'}: {test}: {first_line}"
        elif found[0].verdict == "fault":
            yield f"a fault: {test}"
        elif found[0].message not in message:
            yield f"fails otherwise than its row says: {test}: {first_line}"
        elif REFUSAL in message and found[0].verdict != "refused feature":
            yield f"a refused feature, but its row has another verdict: {test}"
    for name in (name for row in rows for name in row.tests if name.partition("::")[0] in files):
        same = [test for test in ours if has(name, test) and test not in different]
        if not any(has(name, test) for test in ours):
            yield f"stale, no such test ran: {name}"
        yield from (f"stale, no difference any more: {test}" for test in same)


def has_row(row: Row, test: str) -> bool:
    """Whether the row explains this test."""
    return any(has(name, test) for name in row.tests)


def has(name: str, test: str) -> bool:
    """Whether a name of the table is the one of this test."""
    pattern = name.replace("[", "[[]")
    return fnmatchcase(test, pattern) or fnmatchcase(test, f"{pattern}[[]*]")


def page_with_rows(page: str) -> str:
    """Return the page with the table of each verdict."""
    start, end = page.index("## Refused features"), page.index("## Run it")
    return page[:start] + "\n".join(table_of(verdict) for verdict in VERDICTS) + "\n" + page[end:]


def table_of(verdict: str) -> str:
    lines = ["| tests | why | releases |", "| --- | --- | --- |"]
    for row in read_rows():
        if row.verdict == verdict:
            files: dict[str, list[str]] = {}
            for name in row.tests:
                file, _, test = name.partition("::")
                files.setdefault(Path(file).stem, []).append(f"`{test}`")
            tests = "; ".join(f"{file}: {', '.join(names)}" for file, names in files.items())
            lines.append(f"| {tests} | {row.why} | {', '.join(row.series)} |")
    return "\n".join([f"## {VERDICTS[verdict]}", "", *(lines if len(lines) > 2 else ["None."]), ""])


if __name__ == "__main__":
    sys.exit(main())
