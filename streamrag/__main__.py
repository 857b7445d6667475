"""`python -m streamrag` is the `streamrag` program."""

import sys

from streamrag.cli import main

if __name__ == "__main__":
    sys.exit(main())
