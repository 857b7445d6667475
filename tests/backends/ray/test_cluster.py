"""Leaving a cluster of this machine's own."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray")

import ray
from ray import serve

from streamrag.backends.ray import cluster


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


async def test_ray_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    """As when it is stopped while it deploys."""
    left = cluster.Cluster(lambda: None)

    def never() -> None:
        process.wait()
        has_ended.set()

    has_ended = threading.Event()
    monkeypatch.setattr(ray, "shutdown", never)
    monkeypatch.setattr(serve, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "LEAVE_S", 0.01)
    left._thread, left._has_connected, left._started = ThreadPoolExecutor(1), True, [process]
    await left.aclose()
    assert has_ended.wait(30)
    assert process.returncode == -9
    await left.aclose()
