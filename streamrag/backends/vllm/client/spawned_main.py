"""Become the process that multiprocessing spawns for an engine, after tying its lifetime to its parent's.

`spawned_python.sh` runs this as `spawned_main.py SCRIPT ARGUMENT...`, before vLLM is imported, so the parent's death is
noticed during the start too. vLLM's workers, and all other processes that the engine spawns, start the same way. Each
imports vLLM a quarter faster with the garbage collector off, and skips the teardown at its end, which takes seconds.

The kernel signals when the *thread* ends that started a process. Our own thread stays as long as the engine, but vLLM
may start workers from threads that do not stay; so these watch their parent process.

On a CPU, vLLM preloads libgomp, and names the cores of workers in GOMP_CPU_AFFINITY. So libgomp binds a process to one
core as soon as it loads, which is here already, and would take this core for all that there are in the process to come.
Its threads would then sleep wherever they should spin, and a token would take 10 to 30 % longer. So this process gets
back the cores that its parent has.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4]))

from streamrag.support.parent_death import end_with_parent

PACKAGE_PARENT = sys.path[-1]
CODE = """\
import atexit, gc, os, sys
sys.path.append({package_parent!r})
from streamrag.support.parent_death import watch_parent
sys.path.pop()
watch_parent({parent})
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
"""Code of the new process around `code`, multiprocessing's own, which ends with SystemExit.

Imports the target before it runs it. The exit handler runs after all other exit handlers, and skips garbage collection
and module teardown, as in a process that multiprocessing forks.
"""


def main() -> None:
    """Replace this process by the requested one."""
    script, *arguments = sys.argv[1:]
    if "--multiprocessing-fork" in arguments:  # not the resource tracker, which cleans up after all other processes
        parent = int(os.environ["STREAMRAG_SPAWN_PARENT"])
        if os.environ.pop("STREAMRAG_SPAWN_IS_FIRST", ""):
            end_with_parent(parent)
        os.environ["STREAMRAG_SPAWN_PARENT"] = str(os.getpid())
        code = arguments.index("-c") + 1
        arguments[code] = CODE.format(package_parent=PACKAGE_PARENT, parent=parent, script=script, code=arguments[code])
    if "libgomp" in os.environ.get("LD_PRELOAD", "") and "GOMP_CPU_AFFINITY" in os.environ:
        with suppress(OSError):  # not allowed here: the process works, but more slowly
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    python = os.environ["STREAMRAG_SPAWN_PYTHON"]
    os.execv(python, [python, *arguments])


if __name__ == "__main__":
    main()
