"""The `streamrag` program."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from streamrag.support.display_text import sanitize


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 1 after an error that was explained, 130 after Ctrl-C.

    SIGTERM and SIGHUP do as Ctrl-C does: everything is closed, and the status is 143 or 129. After these it does not
    return, it exits.
    """
    stop = _Stop()
    try:
        with stop.on_signals():
            from streamrag.cli.program import run  # takes a while, in which Ctrl-C is already a way to stop

            return run(argv)
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever presses it again does not want to wait for anything
        _end(f"streamrag: stopped. {interrupt}".rstrip(". "), 128 + stop.number)


def _end(last_words: str, status: int) -> NoReturn:
    """End the program without waiting for threads that nothing can stop, as while vLLM is imported: 20 s."""
    with suppress(OSError):  # the reader of the pipe may be gone
        print(sanitize(last_words), file=sys.stderr)
        sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(status)


class _Stop:
    """A handler of what stops the program: Ctrl-C, or a signal that does the same."""

    def __init__(self) -> None:
        self.number = signal.SIGINT
        self._terminals = [file for file in (1, 2) if os.isatty(file)]

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGHUP do what SIGINT does, unless they are ignored, as by `nohup`."""
        taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
        for number in taken:
            signal.signal(number, self._like_ctrl_c)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, signal.SIG_DFL)

    def _like_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        self.number = signal.Signals(number)
        if number == signal.SIGHUP:
            self._let_go_of_terminals()
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        on_ctrl_c = getattr(on_ctrl_c, "otherwise", on_ctrl_c)  # of what only stops an answer
        if not callable(on_ctrl_c):  # Ctrl-C is ignored in the background jobs of a shell
            raise KeyboardInterrupt
        on_ctrl_c(signal.SIGINT, frame)

    def _let_go_of_terminals(self) -> None:
        """A terminal that is gone refuses what is written to it, such as the end of a progress bar."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in self._terminals:
            os.dup2(nowhere, file)
        os.close(nowhere)
