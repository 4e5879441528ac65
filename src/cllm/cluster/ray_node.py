"""Ray on this machine: starting a node, finding it again, stopping it, and connecting to its cluster.

`ray start --block` runs the node in a process of its own. What is stopped later is that process, and so only what was
started here: `ray stop` would end everything of Ray on the machine.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cllm.config.cluster import ClusterConfig
from cllm.errors import CLLMError
from cllm.machine import install_extra
from cllm.models.registry import cache_dir

START_S = 120.0
STOP_S = 10.0
LEFT_S = 2.0
"""For processes of Ray that are left when its main one has ended. Nothing of cLLM runs in them any more."""
CONNECT_S = 5.0
_OBJECT_STORE_BYTES = 100 << 20
"""cLLM does not use Ray's object store."""
_RAY = ("-m", "ray.scripts.scripts")
_ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"  # PR_SET_PDEATHSIG
)
"""Runs its arguments as a command that gets SIGTERM if the process that started it is killed."""
_STARTED = "Ray runtime started."
_TOO_SLOW = "timed out during startup"
"""Ray gives up after half a minute, which a busy machine may need."""
_TRIES = 3
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
"""Unless the user has set it."""
_NAMESPACE = "cllm"


class ClusterError(CLLMError):
    """A cluster cannot be started, reached or updated."""


@dataclass(frozen=True)
class RayNode:
    """A node that `cllm cluster up` has started on this machine."""

    address: str
    """The cluster's address: HOST:PORT of its head."""
    is_head: bool
    pid: int
    created: float
    """When the process was, since ids of processes are used again."""

    @property
    def runs(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def found_node() -> RayNode | None:
    """The one that runs on this machine, if any."""
    try:
        node = RayNode(**json.loads(_record().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return node if node.runs else None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """While a cluster is started, joined or updated from here. Raises `ClusterError` if another process does that."""
    path = _record().with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ClusterError(
                "another `cllm cluster up` is starting or updating a cluster on this machine: wait until it is done"
            ) from None
        yield


def start_head(settings: ClusterConfig, *, outlives: bool) -> RayNode:
    """`outlives`: whether it runs on when this process has ended. Raises `ClusterError`."""
    host = settings.node_ip or _own_address()
    port = settings.ray_port or _free_port()
    if _answers(host, port):
        raise ClusterError(
            f"cluster.ray_port is {port}, which is already in use: choose another, or use the Ray cluster that runs "
            f"there with --address {_joined(host, port)}"
        )
    _use_token(may_create=True)
    arguments = ["--head", f"--port={port}", "--include-dashboard=false", f"--node-ip-address={host}"]
    return _start(arguments, _joined(host, port), is_head=True, outlives=outlives)


def join(address: str, settings: ClusterConfig, *, outlives: bool) -> RayNode:
    """Make this machine a part of a cluster. Otherwise as `start_head`."""
    check_answers(address)
    _use_token(may_create=False)
    own = [] if settings.node_ip is None else [f"--node-ip-address={settings.node_ip}"]
    return _start([f"--address={address}", *own], address, is_head=False, outlives=outlives)


def stop(node: RayNode) -> None:
    """Signals do not interrupt it: nothing of Ray is to be left."""
    with _uninterrupted():
        _stop(node)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(node: RayNode) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(node.pid)
        parts = [process, *process.children(recursive=True)]
        if node.runs:
            process.send_signal(signal.SIGTERM)
        psutil.wait_procs([process], timeout=STOP_S)
        _, left = psutil.wait_procs(parts, timeout=LEFT_S)
        for part in left:
            with suppress(psutil.Error):
                part.kill()
    with suppress(OSError):
        _record().unlink()


def connect(address: str, *, verbose: bool = False) -> None:
    """Connect this process to a cluster. `verbose`: print what its processes print. Raises `ClusterError`."""
    if address != "auto":
        check_answers(address)
    _use_token(may_create=False)
    import ray
    import ray.serve  # which sets the level of its lines when it is imported

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.ERROR)
    try:
        ray.init(
            address=address,
            namespace=_NAMESPACE,
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
        )
    except Exception as error:  # of many classes
        raise ClusterError(_why_not_connected(address, error)) from error


def _why_not_connected(address: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "uthentication" in type(error).__name__ or "oken" in lines[0]:
        return f"the Ray cluster at {address} refuses this machine's token: {_HOW_TO_SHARE_TOKEN}"
    if address == "auto" and isinstance(error, ConnectionError):
        return f"no Ray cluster runs on this machine: {_HOW_TO_START}"
    return f"cannot use the Ray cluster at {address}: {lines[0]} (is this machine part of it? `cllm cluster up --join`)"


_HOW_TO_START = "`cllm cluster up` starts one, and --address HOST:PORT finds one elsewhere"
_HOW_TO_SHARE_TOKEN = (
    "copy ~/.ray/auth_token from the machine that started it, or set RAY_AUTH_TOKEN to what is in that file"
)


def check_answers(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not _answers(host.strip("[]"), int(port)):
        raise ClusterError(f"no Ray cluster answers at {address}: check the address, and that the port is open")


def no_cluster() -> ClusterError:
    return ClusterError(f"no cluster was started on this machine: {_HOW_TO_START}")


# -- the process -----------------------------------------------------------------------------------------------------


def _start(arguments: list[str], address: str, *, is_head: bool, outlives: bool, tries: int = _TRIES) -> RayNode:
    try:
        return _try_start(arguments, address, is_head=is_head, outlives=outlives)
    except ClusterError as error:
        if tries == 1 or _TOO_SLOW not in str(error):
            raise
        return _start(arguments, address, is_head=is_head, outlives=outlives, tries=tries - 1)


def _try_start(arguments: list[str], address: str, *, is_head: bool, outlives: bool) -> RayNode:
    _record().parent.mkdir(parents=True, exist_ok=True)
    output = _record().with_suffix(".log")
    command = [sys.executable, *(() if outlives else ("-c", _ENDS_WITH_PARENT, sys.executable)), *_RAY, "start"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--block", "--disable-usage-stats", f"--object-store-memory={_OBJECT_STORE_BYTES}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for `cllm`
        )
    node = RayNode(address, is_head, process.pid, psutil.Process(process.pid).create_time())
    try:
        _wait_started(process, output)
        _record().write_text(json.dumps(asdict(node)), encoding="utf-8")
    except BaseException:
        stop(node)
        raise
    return node


def _wait_started(process: subprocess.Popen[bytes], output: Path) -> None:
    until = time.monotonic() + START_S
    while _STARTED not in (text := output.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > until:
            raise ClusterError(f"Ray did not start: {_reason(text)} (see {output})")
        time.sleep(0.1)


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line]
    return (told or lines or ["it said nothing"])[-1]


def _record() -> Path:
    return cache_dir() / "cluster.json"


# -- what Ray needs --------------------------------------------------------------------------------------------------


def prepare_environment() -> None:
    """Before Ray is imported: it reads these variables then."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if importing_fails():
        raise ClusterError(f"clusters need Ray; install it with: {install_extra('cluster')}")


def importing_fails() -> bool:
    from importlib.util import find_spec

    return find_spec("ray") is None


def _use_token(*, may_create: bool) -> None:
    """Ray runs whatever it is sent. So a cluster that is started here takes only members that know its token."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    if not _has_token():
        if not may_create:
            return
        command = [sys.executable, *_RAY, "get-auth-token", "--generate"]
        subprocess.run(command, capture_output=True, check=False)
    os.environ["RAY_AUTH_MODE"] = "token"


def _has_token() -> bool:
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().is_file()


def _own_address() -> str:
    """As other machines see it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that no machine has
            host: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return host


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def nodes() -> list[dict[str, Any]]:
    """Machines of the cluster that this process is connected to."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]
