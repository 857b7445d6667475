"""Stands between an MCP server and the program that started it. This file is run as a script.

The server writes to this process, which passes on lines of a bounded length and ends with the program, whatever ends
that one; and the server ends with this.

    program ──stdin──────────────────────────▶ server
    program ◀──stdout── this process ◀──stdout── server
"""

import os
import signal
import subprocess
import sys
from functools import partial


def main(root: str, parent: str, max_line_bytes: str, *command: str) -> int:
    """Run `command` as the server; `root` is where streamrag is found, `parent` the process that started this one."""
    sys.path.insert(0, root)
    from streamrag.orphans import end_with_parent

    end_with_parent(int(parent))
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # for the server, which may have to clean up
    server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=partial(end_with_parent, None))
    os.close(0)  # the server has it
    assert server.stdout
    most = int(max_line_bytes)
    while line := server.stdout.readline(most + 1):
        if len(line) > most:
            print(f"an MCP server sent more than {most:,} bytes in one message, and was ended", file=sys.stderr)
            os.killpg(0, signal.SIGKILL)  # the client has started this process in a group of its own
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the program has gone
            os.killpg(0, signal.SIGKILL)
    return server.wait()


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]) & 0xFF)
