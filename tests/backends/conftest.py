"""Lets test files import the modules beside them."""

import sys
from pathlib import Path

for folder in ("lanes", "openai", "ray", "vllm", "vllm/client", "vllm/worker"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
