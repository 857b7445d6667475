"""Imported by the server that the processes of simulated cells are forked from: importing vLLM takes many seconds.

Its output goes nowhere: packages that greet whoever imports them would break the progress bar to pieces.
"""

import os

_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)

import streamrag.backends.simulated.client  # noqa: E402
import streamrag.bench.simulate  # noqa: E402, F401
