"""Run the `streamrag` program with `python -m streamrag`."""

import sys

from streamrag.cli import main

if __name__ == "__main__":
    sys.exit(main())
