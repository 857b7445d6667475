"""Stands between an MCP server and the program that started it. This file is run as a script.

The server writes to this process, which passes on lines of a bounded length with a bounded number of values, and ends
with the program, whatever ends that one. With this end the server and all processes of its group.

    program ──stdin──────────────────────────▶ server
    program ◀──stdout── this process ◀──stdout── server
"""

import os
import signal
import subprocess
import sys
from functools import partial

MAX_VALUES = 1 << 16
"""Values in one message: what is made of each takes memory, and time of the program's event loop."""


def has_too_many_values(message: bytes | bytearray) -> bool:
    """Whether it would be more than `MAX_VALUES` if it is JSON. What stands in its strings does not count."""
    if _num_values(message) <= MAX_VALUES:
        return False
    outside = message.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    return _num_values(b"".join(outside)) > MAX_VALUES


def _num_values(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def main(root: str, parent: str, max_line_bytes: str, *command: str) -> None:
    """Run `command` as the server; `root` is where streamrag is found, `parent` the process that started this one."""
    sys.path.insert(0, root)
    from streamrag.support.parent_death import end_with_parent

    signal.signal(signal.SIGHUP, lambda number, frame: _end_group())  # so that the server's own children end too
    end_with_parent(int(parent), signal.SIGHUP)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # for the server, which may have to clean up
    server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=partial(end_with_parent, None))
    os.close(0)  # the server has it
    assert server.stdout
    most = int(max_line_bytes)
    while line := server.stdout.readline(most + 1):
        if len(line) > most or has_too_many_values(line):
            what = f"{most:,} bytes" if len(line) > most else f"{MAX_VALUES:,} values"
            print(f"an MCP server sent more than {what} in one message, and was ended", file=sys.stderr)
            _end_group()
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the program has gone
            _end_group()
    os.close(1)  # the server says nothing any more, though it may live on
    server.wait()
    _end_group()


def _end_group() -> None:
    """End this process, the server, and what that has started; the client made them a group of their own."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
