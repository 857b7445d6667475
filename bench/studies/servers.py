"""Servers of models that studies start and stop."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

LIKE_OURS = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""What our engines have by default on two cores. vLLM's own would leave one core free, and have pages of 4 KiB."""


@contextmanager
def start_server(command_of: Callable[[int], Sequence[str]], log: Path) -> Iterator[str]:
    """Start a server on a free port, wait until it is ready, and give its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {**LIKE_OURS, **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as written:
        process = subprocess.Popen(command_of(port), stdout=written, stderr=written, env=environment)
        try:
            while not is_ready(url):
                if process.poll() is not None:
                    raise SystemExit(f"the server has not started:\n{log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def is_ready(url: str) -> bool:
    """Return whether the server answers under vLLM's name for it, which is also ours."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False
