"""Imported by the server that the processes of simulated cells are forked from: importing vLLM takes many seconds.

Its output goes nowhere: packages that greet whoever imports them would break the progress bar to pieces. It ends with
the program, at once: by itself it would do so when the imports are over, and then take a second to tear them down.
Which process that is stands in the environment.
"""

import os

from streamrag.support.parent_death import end_with_parent

end_with_parent(int(os.environ["STREAMRAG_PARENT"]))
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)

import streamrag.backends.simulated.client  # noqa: E402
import streamrag.bench.simulate  # noqa: E402, F401
