"""What the machine has, and how fast it copies between device and host.

python -m experiments.gpu.device --json FILE
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from streamrag.bench.provenance import versions
from streamrag.support.files import write_atomic

COPIED_BYTES = 1 << 30
NUM_COPIES = 5


def bandwidth(copy: Callable[[], Any]) -> float:
    """Return bytes per second, the median of some copies."""
    times_s = []
    for _ in range(1 + NUM_COPIES):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return COPIED_BYTES / median(times_s[1:])


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": "CPU",
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **versions(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "num_multiprocessors": properties.multi_processor_count,
            "to_host_bytes_per_s": bandwidth(lambda: pinned.copy_(on_device, non_blocking=True)),
            "to_device_bytes_per_s": bandwidth(lambda: on_device.copy_(pinned, non_blocking=True)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    found = facts()
    write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
