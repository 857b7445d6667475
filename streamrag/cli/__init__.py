"""The `streamrag` command-line program."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from streamrag.display_text import sanitize


def run_and_exit() -> NoReturn:
    """Run `main`, and exit without the teardown of modules and its garbage collections, which take 4 s with vLLM."""
    _exit("", main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit status: 0, or 1 after an error message.

    After Ctrl-C, SIGTERM or SIGHUP, it shuts down and exits the process with status 130, 143 or 129, without
    returning.
    """
    stop = _Stop()
    try:
        with stop.on_signals():
            from streamrag.cli.program import run  # slow; Ctrl-C is handled meanwhile

            return run(argv)
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C kills the process
        _exit(f"streamrag: stopped. {interrupt}".rstrip(". ") + "\n", 128 + stop.number)


def _exit(message: str, status: int) -> NoReturn:
    """Print a message, run the exit handlers, and exit without waiting for threads, such as the 20 s import of vLLM."""
    for stream, text in ((sys.stderr, message), (sys.stdout, "")):
        if stream is not None:  # else it was closed when the program began
            with suppress(OSError):  # the pipe's reader may have exited
                print(sanitize(text), end="", file=stream, flush=True)
    atexit._run_exitfuncs()
    os._exit(status)


class _Stop:
    """A handler of the signals that stop the program like Ctrl-C; `number` is the last one."""

    def __init__(self) -> None:
        self.number = signal.SIGINT
        self._terminals = [file for file in (1, 2) if os.isatty(file)]

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGHUP like SIGINT in the block, except one that is ignored, as under `nohup`, or has a
        handler."""
        handled = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
        for number in handled:
            signal.signal(number, self._like_ctrl_c)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, signal.SIG_DFL)

    def _like_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, and call the handler of SIGINT, or raise KeyboardInterrupt if SIGINT is ignored.

        A handler that only stops an answer is skipped for the one before it. After SIGHUP, terminals are detached.
        """
        self.number = signal.Signals(number)
        if number == signal.SIGHUP:
            self._detach_from_terminals()
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        on_ctrl_c = getattr(on_ctrl_c, "otherwise", on_ctrl_c)  # skip a handler that only stops an answer
        if not callable(on_ctrl_c):  # SIGINT is ignored in a shell's background jobs
            raise KeyboardInterrupt
        on_ctrl_c(signal.SIGINT, frame)

    def _detach_from_terminals(self) -> None:
        """Redirect stdout and stderr to the null device if they were terminals: writing to a closed terminal fails."""
        devnull = os.open(os.devnull, os.O_WRONLY)
        for file in self._terminals:
            os.dup2(devnull, file)
        os.close(devnull)
