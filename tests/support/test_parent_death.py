import os
import subprocess
import sys

ENDING = """
import os, sys, threading
from streamrag.support.parent_death import end_with_parent
end_with_parent({parent})
print("lives", flush=True)
sys.stdin.read()
"""
STARTING = """
import subprocess, sys, threading, time
def start():
    child = subprocess.Popen([sys.executable, "-c", {code!r}], stdout=subprocess.PIPE)
    child.stdout.readline()
    started.append(child)
started = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(started[0].wait(30))
"""


def test_a_process_lives_as_long_as_its_parent() -> None:
    code = ENDING.format(parent=os.getpid())
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.communicate("", timeout=60) == ("lives\n", None)
    assert child.returncode == 0


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    child = subprocess.run([sys.executable, "-c", ENDING.format(parent=1 << 30)], timeout=60)
    assert child.returncode == 1


def test_the_program_that_a_process_becomes_dies_with_the_parent_too() -> None:
    become = "os.execv(sys.executable, [sys.executable, '-c', 'import time; print(flush=True); time.sleep(1000)'])"
    code = ENDING.format(parent="os.getppid()") + become
    code = code.replace("sys.stdin.read()\n", "")
    ran = subprocess.run([sys.executable, "-c", STARTING.format(code=code)], capture_output=True, timeout=60)
    assert ran.stdout == b"-9\n", ran.stderr


def test_the_thread_is_the_parent() -> None:
    """Why an engine is started in a thread that stays."""
    code = ENDING.format(parent="os.getppid()").replace("sys.stdin.read()", "threading.Event().wait()")
    ran = subprocess.run([sys.executable, "-c", STARTING.format(code=code)], capture_output=True, timeout=60)
    assert ran.stdout == b"-9\n", ran.stderr


def test_a_process_that_watches_outlives_the_thread_that_started_it_but_not_the_process() -> None:
    code = "import os, threading; from streamrag.support.parent_death import watch_parent; "
    code += "watch_parent(os.getppid()); print(flush=True); threading.Event().wait()"
    starting = STARTING.format(code=code).replace("started[0].wait(30)", "time.sleep(1), started[0].poll()")
    ran = subprocess.run([sys.executable, "-c", starting], capture_output=True, timeout=60)  # until both have ended
    assert ran.stdout == b"None None\n", ran.stderr
