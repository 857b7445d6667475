"""Lets test files import the modules beside them, and Ray's own routers of the experiments."""

import sys
from pathlib import Path

for folder in ("lanes", "openai", "ray", "vllm", "vllm/client", "vllm/worker"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
sys.path.append(str(Path(__file__).parents[2] / "experiments"))
