"""Becomes the process that multiprocessing spawns for an engine, and makes sure first that it ends with its parent.

Run by `spawned_python.sh` as `spawned_main.py SCRIPT ARGUMENT...`, before vLLM is imported or knows of it, so that it
also holds while an engine starts. The processes that this one spawns come here too: vLLM's workers, and whatever they
start by multiprocessing. Each imports vLLM, which takes a quarter less where nobody looks for garbage meanwhile, and is
not taken apart again when it ends, which takes seconds.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4]))

from streamrag.support.parent_death import end_with_parent

CODE = """\
import atexit, gc, os, sys
code = 1
atexit.register(lambda: sys.stdout.flush() or os._exit(code))
import multiprocessing.process as p, multiprocessing.spawn as s
s.set_executable({script!r})
gc.disable()
p.BaseProcess.run = lambda self, run=p.BaseProcess.run: gc.enable() or run(self)
try:
    {code}
except SystemExit as end:
    code = end.code
    raise
"""
"""What the new process does instead of `code`, multiprocessing's own, which ends with SystemExit.

It imports what it is to run before it runs it. It ends after all others that are registered to be called at its end,
as a process that multiprocessing forks does: before Python looks for garbage, and lets go of every module.
"""


def main() -> None:
    """Never returns."""
    script, *arguments = sys.argv[1:]
    if "--multiprocessing-fork" in arguments:  # not the resource tracker, which cleans up after all others have ended
        end_with_parent(int(os.environ["STREAMRAG_SPAWN_PARENT"]))
        os.environ["STREAMRAG_SPAWN_PARENT"] = str(os.getpid())
        code = arguments.index("-c") + 1
        arguments[code] = CODE.format(script=script, code=arguments[code])
    python = os.environ["STREAMRAG_SPAWN_PYTHON"]
    os.execv(python, [python, *arguments])


if __name__ == "__main__":
    main()
