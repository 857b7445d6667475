"""A Ray cluster, either this machine's own or an existing one, and the application deployed on it."""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants, worker
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from streamrag.core import Progress
from streamrag.core.lifecycle import started_once
from streamrag.errors import BackendError, ConfigurationError
from streamrag.support.clock import monotonic
from streamrag.support.messages import message_of
from streamrag.support.tasks import run_shielded

log = logging.getLogger("streamrag.ray")

OBJECT_STORE_BYTES = 100 << 20
"""Size of the object store on this machine: messages are small. By default, Ray takes a third of the memory."""

LEAVE_TIMEOUT_S = 60.0
"""Most seconds to leave Ray, which may wait forever if it is stopped during a deployment. Then we kill the processes of
Ray that we started, which ends that wait."""

POLL_S = 0.1  # seconds between checks whether replicas have started

LOOPBACK = "127.0.0.1"
CLUSTERS_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable with which Ray allows clusters, and replaces a loopback address by the machine's own."""


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Keep Ray in the block, and processes started there, from replacing a loopback address by the machine's own."""
    was, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    before = os.environ.get(CLUSTERS_VARIABLE)
    os.environ[CLUSTERS_VARIABLE] = "0"  # for the processes started inside, and their children
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was
        if before is None:
            del os.environ[CLUSTERS_VARIABLE]
        else:
            os.environ[CLUSTERS_VARIABLE] = before


def describe_missing_resources(deployments: Mapping[str, Any], available: Mapping[str, float]) -> str | None:
    """Describe the resources that a machine lacks for all first replicas, with advice; None if it has enough."""
    sums: Counter[str] = Counter()
    for deployment in deployments.values():
        for resource, amount in _needed_resources(deployment).items():
            sums[resource] += amount * deployment["target_num_replicas"]
    missing = {name: amount for name, amount in sums.items() if amount > available.get(name, 0) + 1e-6}
    if not missing:
        return None
    which = ", ".join(f"{deployment['target_num_replicas']} {name}" for name, deployment in deployments.items())
    has = {name: available.get(name, 0) for name in missing}
    return (
        f"{which} need {_resources_text(missing)}, and it has {_resources_text(has)}. "
        "Lower replicas.number, or the resources of each: replicas.num_cpus may be a fraction of 1"
    )


def _needed_resources(deployment: Mapping[str, Any]) -> dict[str, float]:
    return {name: amount for name, amount in deployment["required_resources"].items() if amount}


def _resources_text(resources: Mapping[str, float]) -> str:
    counted = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return ", ".join(f"{amount:g} {name}" for name, amount in counted.items()) or "none"


class Cluster:
    """An application on a cluster. `start` deploys it, `aclose` removes it.

    make_app: creates it, such as `deployment.engines`.
    address: of the cluster, such as "auto" or "ray-head:6379"; None starts one on this machine, and stops it.
    app_name: name of the application on the cluster.
    num_cpus: CPUs of a cluster on this machine; None for all.
    place_s: most seconds that replicas wait for a node with room for them, as a cluster may grow. This machine does
        not grow: replicas that do not fit are rejected immediately.
    """

    def __init__(
        self,
        make_app: Callable[[], Any],
        *,
        address: str | None = None,
        app_name: str = "streamrag",
        num_cpus: int | None = None,
        place_s: float = 900.0,
    ) -> None:
        self._make_app = make_app
        self._place_s = place_s
        self._address = address
        self._app_name = app_name
        self._num_cpus = num_cpus
        self._thread: ThreadPoolExecutor | None = None
        """Lives as long as the cluster, because the kernel ends Ray's processes with the thread that started them."""
        self._started: list[Any] = []  # Ray's processes that were started here, as Popen objects
        self._has_connected = False
        self._has_deployed = False
        self._is_leaving = threading.Event()  # ends the wait for replicas in the thread

    @started_once
    async def start(self, progress: Progress) -> DeploymentHandle:
        """Return a handle of the replicas, once all initial ones can answer. After an error, all is closed again.

        If the program has initialized Ray already, uses that Ray, and leaves it running.

        :raises AlreadyStartedError: it is started.
        :raises ConfigurationError: there is no such cluster, or it has no room for the replicas.
        :raises BackendError: Ray, or an application in the replicas, cannot be started.
        """
        self._thread = ThreadPoolExecutor(1, "streamrag-ray")
        self._is_leaving.clear()
        where = "on this machine" if self._address is None else f"at {self._address}"
        try:
            progress(f"starting Ray {where}" if self._address is None else f"connecting to Ray {where}")
            await self._in_thread(self._connect)
            progress(f"starting {self._app_name} on Ray {where}")
            return await self._in_thread(self._deploy)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Remove the application, and Ray if started here, within `LEAVE_TIMEOUT_S`. Does nothing if not started."""
        if self._thread is not None:
            try:
                await run_shielded(self._leave(), "streamrag leaves Ray")
            finally:
                self.is_started = False

    async def _leave(self) -> None:
        """End the wait in the thread, run `_close` there, raise its error, and end the thread. If `_close` takes longer
        than `LEAVE_TIMEOUT_S`, warn, and kill Ray's processes that were started here."""
        thread = self._thread
        assert thread is not None
        self._is_leaving.set()
        closing = asyncio.ensure_future(self._in_thread(self._close))
        try:
            done, _ = await asyncio.wait([closing], timeout=LEAVE_TIMEOUT_S)
            if done:
                closing.result()
                return
            log.warning("Ray was not left within %g s: its processes are killed", LEAVE_TIMEOUT_S)
            closing.add_done_callback(lambda each: each.cancelled() or each.exception())  # retrieve the exception
            for process in self._started:
                process.kill()
        finally:
            self._thread = None
            thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _connect(self) -> None:
        """Connect to Ray at the address, or without one start Ray here. Do nothing if the program has initialized Ray.
        Raises as `start` does."""
        if ray.is_initialized():
            return  # by the program, which also shuts it down
        options: dict[str, Any] = {"address": self._address}
        if self._address is None:
            options = {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "num_cpus": self._num_cpus,
                "_node_ip_address": LOOPBACK,
            }
        try:
            with _on_loopback() if self._address is None else nullcontext():
                ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"cannot reach Ray at {self._address}: {message_of(error)}") from error
        except Exception as error:  # Ray raises a bare one if a node takes longer than half a minute to start
            raise BackendError(f"Ray cannot be started: {message_of(error)}") from error
        self._has_connected = True
        if self._address is None:
            processes = worker._global_node.all_processes.values()
            self._started = [info.process for infos in processes for info in infos]

    def _deploy(self) -> DeploymentHandle:
        """Deploy the application, wait until it runs, and return its handle. Raises as `start` does.

        If it runs already, all replicas are restarted, one or a fifth of them at a time, while the others answer.
        """
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it logs each call to a replica that has died
        serve.start(proxy_location="Disabled")
        app = self._make_app()
        self._has_deployed = True
        try:
            target = serve.RunTarget(app, name=self._app_name, route_prefix=None)
            (handle,) = serve.run_many([target], wait_for_applications_running=False)
            self._wait_until_running()
            return handle
        except RuntimeError as error:
            app_status = serve.status().applications.get(self._app_name)
            whys = [each.message for each in app_status.deployments.values() if each.message] if app_status else []
            raise BackendError(f"{self._app_name} cannot be started: {message_of(error)} {' '.join(whys)}") from error

    def _wait_until_running(self) -> None:
        """Wait until the application runs. Raise ConfigurationError if it does not fit on this machine, or if a replica
        has waited `place_s` for a node, RuntimeError if it failed or was deleted, and BackendError on `aclose`."""
        if self._address is None:
            why = describe_missing_resources(self._deployments(), ray.cluster_resources())
            if why is not None:
                raise ConfigurationError(f"{self._app_name} does not fit on this machine: {why}")
        began_s = monotonic()
        while True:
            status = serve.status().applications.get(self._app_name)
            if status is None:
                raise RuntimeError("it was deleted")
            if status.status == ApplicationStatus.RUNNING:
                return
            if status.status == ApplicationStatus.DEPLOY_FAILED:
                raise RuntimeError(status.message)
            without_node = self._describe_waiting_replicas()
            if not without_node:
                began_s = monotonic()
            if monotonic() > began_s + self._place_s:
                raise ConfigurationError(
                    f"no node of the cluster had room within {self._place_s:g} s for {', '.join(without_node)}; "
                    f"free are {_resources_text(ray.available_resources())}: add nodes, or lower what each reserves"
                )
            if self._is_leaving.wait(POLL_S):
                raise BackendError(f"{self._app_name} was closed during its start")

    def _describe_waiting_replicas(self) -> list[str]:
        """Describe the replicas that wait for a node: number and needs, one text per deployment that has some."""
        texts = []
        for name, deployment in self._deployments().items():
            if num := sum(each.get("node_id") is None for each in deployment["replicas"]):
                texts.append(f"{num} of {name!r}, which need {_resources_text(_needed_resources(deployment))} each")
        return texts

    def _deployments(self) -> dict[str, Any]:
        details = serve.context._get_global_client().get_serve_details()
        return dict(details["applications"][self._app_name]["deployments"])

    def _close(self) -> None:
        """Delete the application and leave Ray, as far as they were begun here; on this machine, also stop Serve."""
        if self._has_deployed:
            self._has_deployed = False
            serve.delete(self._app_name)
        if self._has_connected:
            self._has_connected = False
            if self._address is None:
                serve.shutdown()
            ray.shutdown()
