"""A relay between an MCP server process and the program that started it. This file runs as a script.

The relay forwards the server's lines, up to a maximum length and number of values. It ends when the program ends, for
whatever reason, and kills the server and all processes of its group.

    program ──stdin──────────────────────────▶ server
    program ◀──stdout── this process ◀──stdout── server
"""

import os
import signal
import subprocess
import sys
from functools import partial

MAX_VALUES = 1 << 16
"""Maximum number of values in one message; parsing each takes memory, and time on the program's event loop."""


def has_too_many_values(message: bytes | bytearray) -> bool:
    """Whether a JSON message has more than `MAX_VALUES` commas and opening brackets outside of its strings."""
    if _num_values(message) <= MAX_VALUES:
        return False
    outside = message.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    return _num_values(b"".join(outside)) > MAX_VALUES


def _num_values(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def main(root: str, parent: str, max_line_bytes: str, *command: str) -> None:
    """Run `command` as the server; `root` is the folder to import streamrag from, `parent` the program's process id."""
    sys.path.insert(0, root)
    from streamrag.support.parent_death import end_with_parent

    signal.signal(signal.SIGHUP, lambda number, frame: _end_group())  # also ends the server's children
    end_with_parent(int(parent), signal.SIGHUP)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # left to the server, which may clean up
    server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=partial(end_with_parent, None))
    os.close(0)  # the server reads it
    assert server.stdout
    most = int(max_line_bytes)
    while line := server.stdout.readline(most + 1):
        if len(line) > most or has_too_many_values(line):
            what = f"{most:,} bytes" if len(line) > most else f"{MAX_VALUES:,} values"
            print(f"an MCP server sent more than {what} in one message, and was killed", file=sys.stderr)
            _end_group()
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the program has ended
            _end_group()
    os.close(1)  # the server has closed its output, but may still run
    server.wait()
    _end_group()


def _end_group() -> None:
    """Kill this process, the server and its children, which are a process group of their own."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
