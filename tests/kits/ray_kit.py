"""A real Ray cluster of three nodes in this machine, cLLM on it, and ways to break it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import ray
from ray import serve
from ray._raylet import Config as RayConfig
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

from breakable_replica import FAULTS, FOLDER_VARIABLE, JOURNAL, STATES, BreakableReplica
from cllm.cluster import application
from cllm.config import Config

LIMIT_S = 180.0
"""A guard against hanging, not a demand on speed: on a busy machine a replica takes a minute to start."""

NODES = 3
APPLICATION = "cllm"
_OBJECT_STORE_BYTES = 80 << 20

FAKE: dict[str, Any] = {
    "backend": {"type": "fake", "fake": {"latency_ms": 50.0}},
    "kv": {"disk": {"enabled": False}},
    "server": {"shutdown_grace_s": 5.0},
    "cluster": {"replicas": 4, "cpus": 0.1, "silence_s": 2.0, "wait_s": 170.0, "max_sends": 20, "drain_s": 20.0},
}


NATIVE: dict[str, Any] = {
    "backend": {"type": "native", "threads": 1},
    "kv": {"disk": {"enabled": False}},
    "resources": {"max_context_length": 1024, "kv_cache_max_memory_mb": 100},
    "cluster": {"replicas": 2, "cpus": 0.1, "silence_s": 10.0, "wait_s": 170.0},
}


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections within sections."""
    result = dict(settings)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


class Actor(NamedTuple):
    """A process of a deployment."""

    id: str
    pid: int
    state: str
    node: str


class Entry(NamedTuple):
    """A job that a replica was given."""

    replica: str
    request: str
    tokens: int
    priority: int
    generated: list[int | None] | None


def until(condition: Callable[[], Any], what: str = "the condition", limit_s: float = LIMIT_S) -> Any:
    """What the condition returns once that is true. It may raise until then."""
    deadline, failure = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
            failure = None
        except Exception as error:
            failure = error
        time.sleep(0.05)
    raise AssertionError(f"{what} never held") from failure


class RayCluster:
    """Ray with three nodes, and Ray Serve. `deploy` puts cLLM on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shared"
        for name in (STATES, FAULTS):
            (self.folder / name).mkdir(parents=True)
        os.environ[FOLDER_VARIABLE] = str(self.folder)
        self._settings: dict[str, Any] | None = None
        self._port, proxy_port = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.proxy_url = f"http://127.0.0.1:{proxy_port}"
        """The same through Ray Serve's proxy."""
        # Ray would tell every `ray.init()` on this machine to join this cluster.
        with mock.patch("ray._private.utils.write_ray_address"):
            self.nodes = Cluster()
            for number in range(NODES):
                head = {"include_dashboard": False, "temp_dir": str(folder / "ray")} if number == 0 else {}
                self.nodes.add_node(num_cpus=1, object_store_memory=_OBJECT_STORE_BYTES, **head)
        ray.init(address=self.nodes.address, log_to_driver=False, logging_level="ERROR", namespace="cllm-tests")
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": proxy_port},
            logging_config={"log_level": "WARNING"},
        )

    def stop(self) -> None:
        """The nodes end with this process, too."""
        with suppress(Exception):
            serve.shutdown()
        with suppress(Exception):
            ray.shutdown()
        self.nodes.shutdown()

    # -- cLLM ----------------------------------------------------------------------------------------------------

    def deploy(self, settings: Mapping[str, Any] = FAKE, **changes: Any) -> None:
        """Serve with these settings, unless that is so already. Everything is whole again after that."""
        wanted = merged(settings, changes)
        self.mend()
        if wanted != self._settings:
            self.remove()
            self.update(wanted)
        self.whole()

    def update(self, settings: Mapping[str, Any], *, blocking: bool = True) -> None:
        """A rolling update, if something is being served."""
        self._settings = dict(settings)
        with mock.patch.object(application, "Replica", BreakableReplica):
            built = application.build_application(self.config, listens=True)
        run = serve.run if blocking else serve.api._run
        run(built, name=APPLICATION, route_prefix="/")

    @property
    def config(self) -> Config:
        assert self._settings is not None
        listens = {"server": {"host": "127.0.0.1", "port": self._port}}
        return Config.model_validate(merged(self._settings, listens))

    def remove(self) -> None:
        self._settings = None
        serve.delete(APPLICATION)

    def whole(self, replicas: int | None = None) -> list[Actor]:
        """Wait until so many replicas run, and every ingress has a link to each of them."""
        count = self.config.cluster.first_replicas if replicas is None else replicas

        def linked() -> list[Actor] | None:
            running = self.replicas()
            links = [len(self.state(each).get("ingresses", ())) for each in running]
            return running if links == [self.config.cluster.ingresses] * count else None

        found: list[Actor] = until(linked, f"{count} replicas")
        return found

    def state(self, replica: Actor) -> dict[str, Any]:
        """What it last said of itself."""
        try:
            state: dict[str, Any] = json.loads((self.folder / STATES / replica.id).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return state

    def requests_of(self, replica: Actor) -> set[str]:
        """Their ids, as the ingress knows them."""
        return {request.rpartition("~")[0] for request in self.state(replica).get("requests", ())}

    def wait_until_idle(self) -> None:
        """Until no replica works on anything. What they said of themselves before does not count."""
        now = time.time()

        def idle() -> bool:
            states = [self.state(each) for each in self.replicas()]
            return bool(states) and all(
                state and state["at"] > now and not state["requests"] and not state["referenced"] for state in states
            )

        until(idle, "replicas that do nothing")

    # -- processes -----------------------------------------------------------------------------------------------

    def replicas(self, *states: str) -> list[Actor]:
        return [each for each in self._actors("replica") if each.state in (states or ("RUNNING",))]

    def ingresses(self) -> list[Actor]:
        return [each for each in self._actors("ingress") if each.state == "RUNNING"]

    def all_actors(self) -> list[Actor]:
        """In any state: also those that finish what they have."""
        return [*self._actors("replica"), *self._actors("ingress")]

    def _actors(self, deployment: str) -> list[Actor]:
        applications = _get_global_client().get_serve_details()["applications"]
        found = applications.get(APPLICATION, {}).get("deployments", {}).get(deployment, {}).get("replicas", [])
        return [
            Actor(each["replica_id"], each["pid"], str(getattr(each["state"], "value", each["state"])), each["node_id"])
            for each in found
            if each["pid"] is not None and _lives(each["pid"])  # Serve may not have noticed
        ]

    def process_named(self, name: str) -> int:
        """The id of this cluster's process with `name` in its title: Serve's own actors."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if name in "".join(process.cmdline()[:1]):
                    return process.pid
        raise LookupError(name)

    # -- faults --------------------------------------------------------------------------------------------------

    @contextmanager
    def fault(self, name: str, replica: str | None = None) -> Iterator[None]:
        path = self.folder / FAULTS / (name if replica is None else f"{name}.{replica}")
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def mend(self) -> None:
        for path in (self.folder / FAULTS).iterdir():
            path.unlink()

    def journal(self, since: int = 0) -> list[Entry]:
        path = self.folder / JOURNAL
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [Entry(**json.loads(line)) for line in lines[since:]]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """It does nothing meanwhile, and its connections stay open."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def running_cluster() -> Iterator[RayCluster]:
    # Paths of sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="cllm-ray-", dir="/tmp"))
    kits = str(Path(__file__).parent)
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_worker_niceness": "0",  # or the cluster hardly runs while the machine does something else
        "PYTHONPATH": os.pathsep.join([kits, *filter(None, [os.environ.get("PYTHONPATH")])]),
        FOLDER_VARIABLE: "",
    }
    with mock.patch.dict(os.environ, environment):
        RayConfig.initialize("")  # Ray may have been imported, and has read the environment then
        cluster = RayCluster(folder)
        try:
            yield cluster
        finally:
            cluster.stop()
            shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
