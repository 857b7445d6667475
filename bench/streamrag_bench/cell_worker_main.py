"""A preload module of the fork server for simulated cells, so that vLLM is imported once: it takes many seconds.

Importing it discards the server's output, because packages that print at import would break the progress bar. The
server is killed with the process that STREAMRAG_PARENT names; otherwise it would first finish its imports.
"""

import os

from streamrag.support.parent_death import end_with_parent

end_with_parent(int(os.environ["STREAMRAG_PARENT"]))
_devnull = os.open(os.devnull, os.O_WRONLY)
os.dup2(_devnull, 1)
os.dup2(_devnull, 2)

import streamrag_bench.simulate  # noqa: E402, F401
