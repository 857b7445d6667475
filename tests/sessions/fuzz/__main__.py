"""Plays many seeds, on as many processes as the machine has cores, two at most."""

import sys

from tests.engine.fuzz.__main__ import main
from tests.sessions import fuzz

if __name__ == "__main__":
    sys.exit(main(fuzz))
