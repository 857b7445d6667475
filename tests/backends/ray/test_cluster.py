"""Leaving a cluster of this machine's own."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray import serve

from streamrag.backends.ray import cluster
from streamrag.errors import BackendError, ConfigurationError


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
    monkeypatch.setattr(cluster, "LEAVE_TIMEOUT_S", 0.01)
    left._thread, left._has_connected, left._started = ThreadPoolExecutor(1), True, [process]
    await left.aclose()
    assert has_ended.wait(30)
    assert process.returncode == -9
    await left.aclose()


def deployed(number: int, *nodes: str | None, **needed: float) -> dict[str, object]:
    """What Serve's controller says of a deployment. It leaves out what it does not know yet."""
    replicas = [{"node_id": node} if node else {} for node in nodes]
    return {"target_num_replicas": number, "required_resources": needed, "replicas": replicas}


@pytest.mark.parametrize(
    ("there", "deployments", "why"),
    [
        ({"CPU": 2.0}, {"engines": deployed(2, CPU=1.0), "sources": deployed(3, CPU=0.0)}, None),
        ({"CPU": 1.0}, {"engines": deployed(10, CPU=0.1)}, None),
        ({"CPU": 2.0}, {"engines": deployed(3, CPU=1.0)}, "3 engines need 3 CPU, and it has 2 CPU"),
        (
            {"CPU": 2.0},
            {"engines": deployed(2, CPU=1.0), "sources": deployed(1, CPU=1.0)},
            "2 engines, 1 sources need 3 CPU, and it has 2 CPU",
        ),
        ({"CPU": 2.0}, {"engines": deployed(1, CPU=1.0, GPU=1.0)}, "need 1 GPU, and it has 0 GPU"),
        (
            {"CPU": 2.0},
            {"engines": deployed(1, **{"accelerator_type:H100": 0.001})},
            "0.001 accelerator_type:H100, and",
        ),
        ({"CPU": 2.0, "rack": 1.0}, {"engines": deployed(2, rack=1.0)}, "need 2 rack, and it has 1 rack"),
    ],
)
def test_replicas_that_a_machine_has_no_room_for_are_named(
    there: dict[str, float], deployments: dict[str, object], why: str | None
) -> None:
    told = cluster.describe_missing_resources(deployments, there)
    if why is None:
        assert told is None
    else:
        assert told is not None
        assert why in told


@pytest.fixture
def deploying(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a cluster says of an application; to be changed."""
    told: dict[str, object] = {"status": "DEPLOYING", "deployments": {"engines": deployed(2, "one", None, CPU=1.0)}}
    of_app = SimpleNamespace(message="no such model", deployments={})
    overview = SimpleNamespace(applications={"app": of_app})

    def status() -> SimpleNamespace:
        of_app.status = told["status"]
        return overview

    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(serve, "run_many", lambda targets, **_: [f"handle of {targets[0].name}"])
    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(serve, "delete", lambda name: told.update(deleted=name))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0, "node:10.0.0.1": 1.0})
    monkeypatch.setattr(cluster.Cluster, "_deployments", lambda self: told["deployments"])
    return told


def application(**options: Any) -> cluster.Cluster:
    return cluster.Cluster(lambda: None, app_name="app", **options)


async def test_replicas_that_run_are_there(deploying: dict[str, object]) -> None:
    deploying["status"] = "RUNNING"
    started = application()
    assert await started.start(lambda line: None) == "handle of app"
    await started.aclose()
    assert deploying["deleted"] == "app"


async def test_an_application_without_room_on_this_machine_is_refused_at_once(deploying: dict[str, object]) -> None:
    deploying["deployments"] = {"engines": deployed(3, None, None, None, CPU=1.0)}
    with pytest.raises(
        ConfigurationError, match="app does not fit on this machine: 3 engines need 3 CPU, and it has 2"
    ):
        await application().start(lambda line: None)
    assert deploying["deleted"] == "app"


async def test_a_cluster_that_does_not_grow_ends_the_start(deploying: dict[str, object]) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"no node .* within 0.01 s for 1 of 'engines', which need 1 CPU each; free are 1 CPU: add",
    ):
        await application(address="auto", place_s=0.01).start(lambda line: None)
    assert deploying["deleted"] == "app"


async def test_the_reason_why_an_engine_cannot_start_is_reported(deploying: dict[str, object]) -> None:
    deploying["status"] = "DEPLOY_FAILED"
    with pytest.raises(BackendError, match="no such model"):
        await application(address="auto").start(lambda line: None)


async def test_cancelling_a_start_that_waits_for_a_node_deletes_the_application(deploying: dict[str, object]) -> None:
    is_waiting, loop = asyncio.Event(), asyncio.get_running_loop()
    started = application(address="auto", place_s=600.0)
    deployments = started._deployments

    def told() -> Any:
        loop.call_soon_threadsafe(is_waiting.set)
        return deployments()

    started._deployments = told  # type: ignore[method-assign]
    starting = asyncio.create_task(started.start(lambda line: None))
    await is_waiting.wait()
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert deploying["deleted"] == "app"
