"""Becomes the process that multiprocessing spawns for an engine, and makes sure first that it ends with its parent.

Run by `spawned_python.sh` as `spawned_main.py SCRIPT ARGUMENT...`, before vLLM is imported or knows of it, so that it
also holds while an engine starts. The processes that this one spawns come here too: vLLM's workers, and whatever they
start by multiprocessing. Each imports vLLM, which takes a quarter less where nobody looks for garbage meanwhile.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4]))

from streamrag.orphans import end_with_parent

BEFORE = """\
import gc, multiprocessing.process as p, multiprocessing.spawn as s
s.set_executable({!r})
gc.disable()
p.BaseProcess.run = lambda self, run=p.BaseProcess.run: gc.enable() or run(self)
"""
"""What the new process does first. It imports what it is to run before it runs it."""


def main() -> None:
    """Never returns."""
    script, *arguments = sys.argv[1:]
    if "--multiprocessing-fork" in arguments:  # not the resource tracker, which cleans up after all others have ended
        end_with_parent(int(os.environ["STREAMRAG_SPAWN_PARENT"]))
        os.environ["STREAMRAG_SPAWN_PARENT"] = str(os.getpid())
        code = arguments.index("-c") + 1
        arguments[code] = BEFORE.format(script) + arguments[code]
    python = os.environ["STREAMRAG_SPAWN_PYTHON"]
    os.execv(python, [python, *arguments])


if __name__ == "__main__":
    main()
