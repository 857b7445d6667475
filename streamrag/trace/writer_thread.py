"""A thread that writes the lines of a trace, so that the event loop does not wait for the disk."""

import fcntl
import queue
import threading
from collections.abc import Iterable
from pathlib import Path

from streamrag.errors import TraceError
from streamrag.trace.file_schema import TraceHeader, TraceLine, encode
from streamrag.trace.files import LineReader, LineWriter, replace_file
from streamrag.trace.read import numbered_lines


class WriterThread:
    """A trace file that a thread appends to. The constructor and `close` block; `put` does not.

    A torn end of the file, as after a killed program, is removed first. `num_sessions` and `tokenizer` describe the
    file's previous content.

    :raises TraceError: the file is not a trace, is damaged, is open in another recorder, or cannot be written.
    :raises MissingDependencyError: it is a .zst file, but zstandard is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_sessions = 0
        self.tokenizer: str | None = None
        self._jobs: queue.Queue[tuple[Iterable[TraceLine], bool] | None] = queue.Queue()
        self._failure: Exception | None = None
        try:
            self._writer = self._open()
        except OSError as error:
            raise self._unwritable(error) from error
        self._thread = threading.Thread(target=self._write_all, name="streamrag trace writer", daemon=True)
        self._thread.start()

    @property
    def num_behind(self) -> int:
        """Number of calls of `put` that the thread has not processed."""
        return self._jobs.qsize()

    def put(self, lines: Iterable[TraceLine], *, flush: bool = False) -> None:
        """Queue lines for the thread, which iterates over them. `flush` makes them survive a crash of the program."""
        self._jobs.put((lines, flush))

    def catch_up(self) -> None:
        """Wait until the thread has processed every call of `put`."""
        self._jobs.join()

    def close(self) -> None:
        """Write the queued lines, and close the file. Raises TraceError if a line could not be written."""
        self._jobs.put(None)
        self._thread.join()
        if self._failure:
            raise self._unwritable(self._failure) from self._failure

    def _open(self) -> LineWriter:
        """Open and lock the file, and remove a torn end, which writes the file anew; make its folder if necessary.

        Sets `num_sessions`, and `tokenizer` to that of the last session.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        writer = LineWriter(self._path)
        try:
            self._lock(writer)
            reader = LineReader(self._path)
            if self._path.stat().st_size:
                for _, line in numbered_lines(self._path, reader):
                    if isinstance(line, TraceHeader):
                        self.num_sessions += 1
                        self.tokenizer = line.tokenizer
            if reader.is_torn:
                writer.abandon()
                replace_file(self._path, (line + b"\n" for line in LineReader(self._path)))
                writer = LineWriter(self._path)
                self._lock(writer)
        except BaseException:
            writer.abandon()
            raise
        return writer

    def _lock(self, writer: LineWriter) -> None:
        """Lock the file, or raise TraceError: two recorders would corrupt a compressed stream."""
        try:
            fcntl.flock(writer.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TraceError(f"{self._path} is open in another recorder: record to another file") from None

    def _write_all(self) -> None:
        """Write jobs until None comes, and close the file. After a failure, jobs are only counted as done."""
        while job := self._jobs.get():
            if not self._failure:  # lines after a gap would make the file unreadable
                try:
                    self._write(*job)
                except Exception as error:  # `close` raises it; the thread continues, so that `catch_up` returns
                    self._failure = error
            self._jobs.task_done()
        try:
            self._writer.close()
        except Exception as error:
            self._failure = self._failure or error
        self._jobs.task_done()

    def _write(self, lines: Iterable[TraceLine], flush: bool) -> None:
        """Write the lines to the file, encoded; with `flush`, hand all so far to the operating system."""
        for line in lines:
            self._writer.write(encode(line))
        if flush:
            self._writer.flush()

    def _unwritable(self, error: Exception) -> TraceError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return TraceError(f"{self._path} cannot be written: {reason}")
