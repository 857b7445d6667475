"""What the machine has, whether KV blocks are copied right without an engine, and how fast memory is copied.

python -m studies.gpu.device --device cuda|cpu --json FILE
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from streamrag.backends.vllm.facts import describe_model_runner
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions

from .engines import SIZES, Device, set_environment

NUM_BLOCKS = 1_000
PROBE = "from streamrag.backends.vllm.worker.host_probe import main; main('ready', {device!r}, {num_blocks})"
PROBE_LIMIT_S = 60.0
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


def probe(device: Device) -> dict[str, Any]:
    """Copy `NUM_BLOCKS` each way in a process of its own. Return the numbers and times, or `failed` with the reason."""
    command = [sys.executable, "-c", PROBE.format(device=device, num_blocks=NUM_BLOCKS)]
    try:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PROBE_LIMIT_S, text=True
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {PROBE_LIMIT_S:g} s"}
    last = ended.stdout.strip().rpartition("\n")[2]
    if ended.returncode:
        return {"failed": f"exit status {ended.returncode}: {last}"}
    result: dict[str, Any] = json.loads(last)
    return result


def facts() -> dict[str, Any]:
    """Return what the machine has; of a GPU, what is known without using it."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "model_runner": describe_model_runner(),
        **versions(),
    }


def bandwidths() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return {
        "memory_bytes": properties.total_memory,
        "num_multiprocessors": properties.multi_processor_count,
        "to_host_bytes_per_s": bandwidth(lambda: pinned.copy_(on_device, non_blocking=True)),
        "to_device_bytes_per_s": bandwidth(lambda: on_device.copy_(pinned, non_blocking=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    set_environment()
    device: Device = arguments.device
    found: dict[str, Any] = {}
    for measure in (facts, lambda: {"probe": probe(device)}, *([bandwidths] if device == "cuda" else [])):
        found |= measure()
        write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
