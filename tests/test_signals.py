"""What tests of signals rely on, however the run was started."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

SAY = "import signal; print([signal.getsignal(getattr(signal, name)).name for name in ('SIGHUP', 'SIGTERM')])"


@pytest.fixture
def ignored_signals() -> Iterator[None]:
    """As `nohup`, and supervisors, have it."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGHUP, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def printed() -> str:
    return subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True).stdout


def test_programs_inherit_what_is_ignored(ignored_signals: None) -> None:
    assert printed() == "['SIG_IGN', 'SIG_IGN']\n"


def test_programs_of_a_test_of_signals_do_not(ignored_signals: None, default_signals: None) -> None:
    assert printed() == "['SIG_DFL', 'SIG_DFL']\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
