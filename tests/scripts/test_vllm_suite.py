"""vLLM's own tests with our scheduler: a short part of them, and how differences are held against the table."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import vllm_suite
from scripts.vllm_suite import PAGE, VERDICTS, Outcome, Row, SourcesUnavailableError, page_with_rows, problems_of
from streamrag.backends.vllm.version import SUPPORTED

ROOT = Path(__file__).parents[2]
FILE = "core/test_scheduler.py"
ORDER = "another legitimate order"
FAILED = Outcome(False, "assert 1 == 2")


def test_vllms_own_tests_differ_only_where_the_table_says_why() -> None:
    command = [sys.executable, "-m", "scripts.vllm_suite", "--short"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if ran.stdout.startswith("skipped: "):
        pytest.skip(ran.stdout.strip())
    assert " of them with ours" in ran.stdout


def test_each_row_has_a_known_verdict_a_reason_and_series_that_we_support() -> None:
    for row in vllm_suite.read_rows():
        assert row.verdict in VERDICTS
        assert row.why.endswith(".")
        assert row.tests
        assert set(row.series) <= set(SUPPORTED)
        assert {name.partition("::")[0] for name in row.tests} <= {*vllm_suite.SHORT, *vllm_suite.LONG}


def test_the_page_has_the_table() -> None:
    assert page_with_rows(PAGE.read_text()) == PAGE.read_text()


def test_a_test_that_passes_with_vllms_scheduler_only_needs_a_row() -> None:
    ours = {f"{FILE}::test_a": FAILED, f"{FILE}::test_ab": FAILED}
    row = Row((f"{FILE}::test_a",), ORDER, "")
    assert list(problems_of([row], ours, list(ours), [FILE])) == [
        f"unexplained: {FILE}::test_ab: assert 1 == 2",
    ]


def test_a_test_has_one_row_at_most() -> None:
    ours = {f"{FILE}::test_a[1-x]": FAILED}
    rows = [Row((f"{FILE}::test_a",), ORDER, ""), Row((f"{FILE}::test_a[1-*]",), ORDER, "")]
    (problem,) = problems_of(rows, ours, list(ours), [FILE])
    assert problem.startswith(f"in several rows: {FILE}::test_a[1-x]")


def test_a_fault_is_a_problem_although_it_has_a_row() -> None:
    ours = {f"{FILE}::test_a": FAILED}
    row = Row((f"{FILE}::test_a",), "fault", "")
    assert list(problems_of([row], ours, list(ours), [FILE])) == [f"a fault: {FILE}::test_a"]


def test_a_feature_that_our_scheduler_refuses_is_reported_as_refused() -> None:
    ours = {f"{FILE}::test_a": Outcome(False, "ConfigurationError: streaming does not work with a pooling model; ...")}
    row = Row((f"{FILE}::test_a",), ORDER, "")
    (problem,) = problems_of([row], ours, list(ours), [FILE])
    assert problem.startswith("a refused feature")
    assert not list(problems_of([Row(row.tests, "refused feature", "")], ours, list(ours), [FILE]))


def test_a_failure_other_than_its_row_says_is_a_problem() -> None:
    ours = {f"{FILE}::test_a": FAILED}
    row = Row((f"{FILE}::test_a",), ORDER, "", message="pop from an empty deque")
    (problem,) = problems_of([row], ours, list(ours), [FILE])
    assert problem == f"fails otherwise than its row says: {FILE}::test_a: assert 1 == 2"


def test_a_row_is_stale_if_one_of_its_tests_passes_fails_with_both_or_is_gone() -> None:
    ours = {f"{FILE}::test_a[1]": FAILED, f"{FILE}::test_a[2]": Outcome(True), f"{FILE}::test_b": FAILED}
    row = Row((f"{FILE}::test_a", f"{FILE}::test_b", f"{FILE}::test_c", "core/test_other.py::test_d"), ORDER, "")
    assert list(problems_of([row], ours, [f"{FILE}::test_a[1]"], [FILE])) == [
        f"stale, no difference any more: {FILE}::test_a[2]",
        f"stale, no difference any more: {FILE}::test_b",
        f"stale, no such test ran: {FILE}::test_c",
    ]


@pytest.mark.parametrize("arguments", [["--short"], []])
@pytest.mark.parametrize("passes_with_theirs", [False, True])
def test_a_failure_without_a_row_runs_with_vllms_scheduler(
    arguments: list[str], passes_with_theirs: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_tests(folder: Path, tests: Sequence[str], with_ours: bool) -> dict[str, Outcome]:
        return {f"{FILE}::test_a": Outcome(passes_with_theirs and not with_ours), f"{FILE}::test_b": Outcome(True)}

    monkeypatch.setattr(vllm_suite, "sources_of", lambda version: Path())
    monkeypatch.setattr(vllm_suite, "read_rows", list)
    monkeypatch.setattr(vllm_suite, "run_tests", run_tests)
    monkeypatch.setattr(sys, "argv", ["vllm_suite.py", *arguments])
    assert vllm_suite.main() == int(passes_with_theirs)
    assert (f"unexplained: {FILE}::test_a" in capsys.readouterr().out) is passes_with_theirs


def test_a_release_whose_tests_cannot_be_had_is_skipped_in_the_short_run_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_sources(version: str) -> Path:
        raise SourcesUnavailableError("the package index does not answer")

    monkeypatch.setattr(vllm_suite, "sources_of", no_sources)
    for arguments, code in ((["--short"], 0), ([], 1)):
        monkeypatch.setattr(sys, "argv", ["vllm_suite.py", *arguments])
        assert vllm_suite.main() == code
        assert capsys.readouterr().out.endswith("the package index does not answer\n")


def test_a_package_index_that_does_not_answer_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_suite, "BUILD", tmp_path)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with pytest.raises(SourcesUnavailableError):
        vllm_suite.sources_of("0.32.0")
    assert not list(tmp_path.iterdir())
