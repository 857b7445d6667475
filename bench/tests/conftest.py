"""Lets the test files of this folder import the results that they make."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
