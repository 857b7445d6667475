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


def deployed(number: int, **options: object) -> dict[str, object]:
    return {"target_num_replicas": number, "deployment_config": {"ray_actor_options": options}}


@pytest.mark.parametrize(
    ("there", "deployments", "why"),
    [
        ({"CPU": 2.0}, {"engines": deployed(2, num_cpus=1.0), "sources": deployed(3, num_cpus=0.0)}, None),
        ({"CPU": 1.0}, {"engines": deployed(10, num_cpus=0.1)}, None),
        ({"CPU": 2.0}, {"engines": deployed(3, num_cpus=1.0)}, "3 engines need 3 CPU, and it has 2 CPU"),
        (
            {"CPU": 2.0},
            {"engines": deployed(2, num_cpus=1.0), "sources": deployed(1)},
            "2 engines, 1 sources need 3 CPU, and it has 2 CPU",
        ),
        ({"CPU": 2.0}, {"engines": deployed(1, num_cpus=1.0, num_gpus=1.0)}, "need 1 GPU, and it has 0 GPU"),
        ({"CPU": 2.0}, {"engines": deployed(1, accelerator_type="H100")}, "0.001 accelerator_type:H100, and"),
        ({"CPU": 2.0, "rack": 1.0}, {"engines": deployed(2, resources={"rack": 1})}, "need 2 rack, and it has 1 rack"),
    ],
)
def test_replicas_that_a_machine_has_no_room_for_are_named(
    there: dict[str, float], deployments: dict[str, object], why: str | None
) -> None:
    told = cluster.lacking(deployments, there)
    if why is None:
        assert told is None
    else:
        assert told is not None
        assert why in told
