"""`cllm cluster`: what is refused in one line, and a real cluster from its start to its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from cllm.cli import app
from cllm.cluster import ray_node, rollout
from cllm.cluster.application import load_arguments, serve_logging
from cllm.cluster.models import cluster_models, version_of, with_absolute_paths
from cllm.cluster.ray_node import ClusterError, RayNode, found_node
from cllm.config import Config, load_config
from cllm.errors import CLLMError, ConfigError
from cllm.observe.log import stop_logging

LIMIT_S = 240.0
"""A guard against hanging, not a demand on speed: Ray may take a minute to start."""


def config(**settings: Any) -> Config:
    return load_config(None, {"backend.type": "fake", **settings}, {}).config


# -- models ------------------------------------------------------------------------------------------------------------


def test_each_model_has_a_deployment_of_its_own() -> None:
    (one,) = cluster_models(config())
    assert one.deployment == "replica"
    several = cluster_models(config(models=[{"name": "a/b", "aliases": ["x y"]}, "x-y", "c"]))
    assert [model.deployment for model in several] == ["replica-x-y", "replica-x-y-1", "replica-c"]
    assert [model.name for model in several] == ["x y", "x-y", "c"]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"load": "first_use"}, "load: first_use: the models of a cluster stay loaded; remove it"),
        ({"unload_after_s": 5}, "unload_after_s: the models of a cluster stay loaded; remove it"),
    ],
)
def test_what_makes_no_sense_in_a_cluster(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        cluster_models(config(models=[{"name": "a", **entry}]))


def test_a_directory_of_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").touch()
    with pytest.raises(ConfigError, match="is a directory of models"):
        cluster_models(load_config(None, {"models": [str(tmp_path)]}, {}).config)


def test_paths_are_absolute_and_what_was_not_set_stays_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    found = with_absolute_paths(load_config(None, {"model.name": "model.gguf", "kv.disk.directory": "kv"}, {}).config)
    assert found.model.name == str(tmp_path / "model.gguf")
    assert found.kv.disk.directory == tmp_path / "kv"
    assert "max_memory_mb" not in found.resources.model_fields_set
    assert with_absolute_paths(load_config(None, {"model.name": "smollm2"}, {}).config).model.name == "smollm2"


def test_only_settings_that_replicas_use_make_another_version() -> None:
    (base,) = cluster_models(config())
    for key, value in (("server.port", 1), ("cluster.replicas", 7), ("cluster.autoscaling.max_replicas", 9)):
        assert cluster_models(config(**{key: value}))[0].version == base.version, key
    assert cluster_models(config(**{"backend.fake.latency_ms": 7.0}))[0].version != base.version
    assert version_of(config(), without=("server.port",)) == version_of(
        config(**{"server.port": 1}), without=("server.port",)
    )


# -- arguments of `serve run` ------------------------------------------------------------------------------------------


def test_arguments_are_a_file_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "cllm.yaml"
    file.write_text("backend: {type: fake}\ncluster: {replicas: 2}\n")
    assert load_arguments({"config": str(file)}).cluster.replicas == 2
    assert load_arguments({"config": str(file), "cluster.replicas": "3"}).cluster.replicas == 3
    assert load_arguments({"config": str(file), "cluster": {"replicas": 4, "cpus": 0.5}}).cluster.replicas == 4


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"config": 3}, "config is 3: it must be the path of a configuration file"),
        ({"config": "/nonexistent.yaml"}, "/nonexistent.yaml"),
        ({"cluster.replcas": "3"}, "did you mean cluster.replicas"),
        ({"cluster": {"replicas": 0}}, "cluster.replicas is 0"),
    ],
)
def test_bad_arguments_are_one_line(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_arguments(arguments)
    assert "\n" not in str(caught.value)


def test_build_refuses_in_one_line() -> None:
    import click

    from cllm.cluster import build

    with pytest.raises(click.ClickException, match=r"did you mean cluster\.replicas"):
        build({"cluster.replcas": 3})


def test_the_applications_deployments() -> None:
    from ray.serve._private.build_app import build_app  # what `serve run` does with it

    from cllm.cluster.application import build_application

    settings = config(models=["a", {"name": "b", "cluster": {"autoscaling": {"max_replicas": 4}}}])
    built = build_app(build_application(settings, listens=False), name="cllm")
    options = {each.name: each for each in built.deployments}
    assert set(options) == {"ingress", "replica-a", "replica-b"}
    assert built.ingress_deployment_name == "ingress"
    scaled = options["replica-b"]._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas) == (1, 4)
    assert scaled.policy.policy_kwargs == {"target_requests": 16.0, "target_kv_use": 0.8}
    assert options["replica-a"]._deployment_config.autoscaling_config is None


def test_rays_own_lines_are_quiet_unless_debugging() -> None:
    levels = {level: serve_logging(config(**{"log.level": level}).log)["log_level"] for level in ("debug", "info")}
    assert levels == {"debug": "DEBUG", "info": "WARNING"}


# -- failures ----------------------------------------------------------------------------------------------------------

TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:cllm:replica.initialize_and_get_metadata() (pid=1, ip=10.0.0.1)
  File "replica.py", line 1, in initialize_and_get_metadata
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/x/cllm/cluster/replica.py", line 39, in __init__
    await self._llm.start()
{error}
"""


def overview(status: str, *messages: str) -> Any:
    deployments = {str(number): SimpleNamespace(message=message) for number, message in enumerate(messages)}
    return SimpleNamespace(status=status, message="", deployments=deployments)


def test_why_a_replica_failed_is_one_line() -> None:
    own = TRACEBACK.format(error="cllm.errors.ModelError: no such file: /x.gguf; use smollm2")
    assert rollout.why_failed(overview("DEPLOYING", "", own)) == "no such file: /x.gguf; use smollm2"
    assert rollout.why_failed(overview("DEPLOYING", own), frozenset([own])) is None, "of what was deployed before"
    other = TRACEBACK.format(error="MemoryError: no room")
    assert rollout.why_failed(overview("DEPLOYING", other)) is None, "it may succeed the next time"
    assert rollout.why_failed(overview("DEPLOY_FAILED", other)) == "no room"
    assert rollout.why_failed(overview("DEPLOY_FAILED", "a reason\nmore")) == "a reason"
    assert rollout.why_failed(overview("DEPLOYING", "")) is None


def machines(monkeypatch: pytest.MonkeyPatch, *resources: dict[str, float]) -> None:
    monkeypatch.setattr(rollout, "nodes", lambda: [{"Resources": each} for each in resources])


def test_what_fits_on_no_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machines(monkeypatch, {"CPU": 4.0, "memory": 1 << 30}, {"CPU": 8.0, "GPU": 1.0, "memory": 2 << 30})
    rollout.check_room(cluster_models(config(**{"cluster.cpus": 8.0, "cluster.memory_mb": 2048.0})))
    with pytest.raises(ConfigError, match=r"cluster.cpus is 9, but no machine of the cluster has more than 8"):
        rollout.check_room(cluster_models(config(**{"cluster.cpus": 9.0})))
    with pytest.raises(
        ConfigError, match=r"cluster.memory_mb is 4096, but no machine of the cluster has more than 2048"
    ):
        rollout.check_room(cluster_models(config(**{"cluster.memory_mb": 4096.0})))
    two_gpus = load_config(None, {"cluster.gpus": 2.0}, {}).config
    with pytest.raises(ConfigError, match=r"cluster.gpus is 2, but no machine of the cluster has more than 1"):
        rollout.check_room(cluster_models(two_gpus))


def test_whether_all_replicas_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    machines(monkeypatch, {"CPU": 2.0}, {"CPU": 2.0})
    assert rollout.has_room(cluster_models(config(**{"cluster.replicas": 4})))
    assert not rollout.has_room(cluster_models(config(**{"cluster.replicas": 5})))
    assert not rollout.has_room(cluster_models(config(models=["a", "b"], **{"cluster.replicas": 3})))
    assert rollout.has_room(cluster_models(config(models=["a", "b"], **{"cluster.replicas": 2})))
    one_each = {"cluster.max_replicas_per_node": 1}
    assert rollout.has_room(cluster_models(config(**one_each, **{"cluster.replicas": 2})))
    assert not rollout.has_room(cluster_models(config(**one_each, **{"cluster.replicas": 3})))
    machines(monkeypatch, {"CPU": 4.0}, {"CPU": 2.0})
    assert not rollout.has_room(cluster_models(config(**{"cluster.cpus": 3.0, "cluster.replicas": 2})))


# -- this machine's node -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No other cluster of this machine is found, or forgotten; and commands in this process leave it as it was."""
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with mock.patch.dict(os.environ):
        yield tmp_path / "cache"
    stop_logging()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_node_is_found_while_its_process_runs(own_cache: Path) -> None:
    assert found_node() is None
    own_cache.mkdir()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node = RayNode("10.0.0.1:6379", True, child.pid, psutil.Process(child.pid).create_time())
    (own_cache / "cluster.json").write_text(json.dumps(node.__dict__))
    assert found_node() == node
    (own_cache / "cluster.json").write_text(json.dumps(node.__dict__ | {"created": node.created - 5}))
    assert found_node() is None, "another process has the same id"
    (own_cache / "cluster.json").write_text(json.dumps(node.__dict__))
    child.communicate(b"\n")
    assert found_node() is None
    (own_cache / "cluster.json").write_text("{")
    assert found_node() is None


def refusal(*arguments: str) -> str:
    """The message with which a command refuses."""
    result = CliRunner().invoke(app, ["cluster", *arguments])
    assert isinstance(result.exception, CLLMError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


NONE_HERE = "no cluster was started on this machine: `cllm cluster up` starts one, and --address HOST:PORT finds one"


def test_commands_without_a_cluster() -> None:
    assert refusal("status").startswith(NONE_HERE)
    assert refusal("down").startswith(NONE_HERE)


@pytest.mark.parametrize("command", ["status", "down", "up"])
def test_an_address_without_a_cluster(command: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        assert refusal(command, "--address", address).startswith(f"no Ray cluster answers at {address}")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "cluster.replcas=2"], "unknown key cluster.replcas: did you mean cluster.replicas?"),
        (["--model", "/nonexistent.gguf"], "no such file: /nonexistent.gguf"),
        (["--join", "nowhere"], "--join is 'nowhere': it must be HOST:PORT such as 10.0.0.1:6379"),
        (["--join", "h:1", "--address", "h:2"], "--join adds this machine to a cluster, so it goes without --address"),
        (["--address", "nowhere"], "cluster.address is 'nowhere' (flag): it must be auto, or HOST:PORT"),
        (["--set", "resources.max_context_length=999999"], "resources.max_context_length is 999999"),
        (["-b", "fake", "--set", "resources.kv_cache_max_memory_mb=0.0001"], "there must be two; raise it"),
        (["-b", "fake", "--set", "model.chat_template=/nonexistent.jinja"], "/nonexistent.jinja"),
        (["--set", "cluster.ray_port=12000"], "cluster.ray_port is 12000 (flag): it must be outside of 10001 to 19999"),
        (["/nonexistent.yaml"], "/nonexistent.yaml"),
        (["--replicas", "0"], "cluster.replicas is 0"),
    ],
)
def test_bad_settings_are_one_line_before_anything_starts(arguments: list[str], problem: str) -> None:
    assert problem in refusal("up", *arguments)


def test_ports_in_use_are_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is already in use" in refusal("up", "-b", "fake", "--port", port)
        settings = ["--set", f"cluster.ray_port={port}", "--set", "cluster.node_ip=127.0.0.1"]
        assert f"cluster.ray_port is {port}, which is already in use" in refusal(
            "up", "-b", "fake", "-p", "0", *settings
        )


def test_the_second_of_two_at_once_is_told(own_cache: Path) -> None:
    with ray_node.one_at_a_time():
        for arguments in (["-p", "0"], ["--join", "127.0.0.1:1"]):
            said = refusal("up", "-b", "fake", *arguments)
            assert said.startswith("another `cllm cluster up` is starting or updating a cluster on this machine")
    with ray_node.one_at_a_time():
        pass


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "importing_fails", lambda: True)
    for command in ("up", "status", "down"):
        assert refusal(command).endswith("scripts/install.py cluster")


def test_a_ray_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "_use_token", lambda may_create: None)
    settings = config(**{"cluster.node_ip": "203.0.113.1", "cluster.ray_port": 0}).cluster  # no machine's address
    monkeypatch.setattr(ray_node, "START_S", 20.0)
    with pytest.raises(ClusterError, match="Ray did not start: "):
        ray_node.start_head(settings, outlives=False)
    assert found_node() is None


# -- a real cluster ----------------------------------------------------------------------------------------------------


class Commands:
    """`cllm cluster` with a Ray of its own."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLLM_", "RAY_"))}
        self.environment = kept | {
            "CLLM_CACHE_DIR": str(folder / "cache"),
            "CLLM_KV__DISK__ENABLED": "false",
            "RAY_TMPDIR": str(temporary),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "cllm-tests-" + "0" * 40,
        }
        self.folder = folder
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def settings(self, *more: str) -> list[str]:
        return [str(self._file()), "--port", str(self.port), *more]

    def _file(self) -> Path:
        file = self.folder / "cllm.yaml"
        file.write_text(
            "backend: {type: fake, fake: {latency_ms: 50}}\n"
            "models: [{name: a, cluster: {replicas: 2}}, b]\n"
            "cluster: {cpus: 0.25, ray_port: 0, node_ip: 127.0.0.1, drain_s: 60}\n"
        )
        return file

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cllm", "cluster", *arguments],
            stdout=subprocess.PIPE,
            stderr=(self.folder / "log").open("a"),
            text=True,
            env=self.environment,
        )

    def run(self, *arguments: str) -> str:
        with self.start(*arguments) as process:
            out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, (arguments, out, self.log)
        return out

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> None:
        """Whatever a failed test has left."""
        with suppress(OSError, ValueError):
            record = json.loads((self.folder / "cache" / "cluster.json").read_text())
            processes = [psutil.Process(record["pid"])]
            processes += processes[0].children(recursive=True)
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    import shutil
    import tempfile

    temporary = Path(tempfile.mkdtemp(prefix="cllm-", dir="/tmp"))  # paths of sockets must be short
    commands = Commands(tmp_path, temporary)
    try:
        yield commands
    finally:
        commands.end()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.timeout(900)
def test_a_cluster_from_its_start_to_its_end(commands: Commands) -> None:
    up = commands.start("up", *commands.settings())
    try:
        assert up.stdout is not None
        line = up.stdout.readline()
        assert line == f"cLLM is ready: {commands.url} (a, 2 replicas; b, 1 replica)\n", commands.log

        several_models_are_served(commands.url)
        before = the_status_tells_all(commands)
        an_update_changes_replicas(commands, before)

        # Running requests end before it does.
        body = {"model": "b", "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{commands.url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            up.send_signal(signal.SIGTERM)
            received = [line for line in lines if line]
        assert received[-1] == "data: [DONE]", commands.log
        assert up.wait(LIMIT_S) == 0, commands.log
    finally:
        if up.poll() is None:
            up.kill()
        up.communicate()
    assert "Traceback" not in commands.log
    assert not (commands.folder / "cache" / "cluster.json").exists(), "Ray was stopped"


def several_models_are_served(url: str) -> None:
    cards = httpx.get(f"{url}/v1/models").json()["data"]
    assert [(card["id"], card["state"]) for card in cards] == [("a", "ready"), ("b", "ready")]
    for model in ("a", "b"):
        body = {"model": model, "prompt": "hello", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
        assert (answer.status_code, answer.json()["model"]) == (200, model)
    assert httpx.post(f"{url}/v1/completions", json={"model": "c", "prompt": "hello"}).status_code == 404
    refused = httpx.post(f"{url}/models/unload", json={"model": "a"})
    assert refused.status_code == 409
    assert "the models of a cluster stay loaded" in refused.json()["error"]["message"]
    assert httpx.post(f"{url}/models/load", json={"model": "a"}).json()["state"] == "ready"


def status_of(commands: Commands) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(commands.run("status", "--json", "-"))
    return status


def the_status_tells_all(commands: Commands) -> dict[str, Any]:
    until = time.monotonic() + LIMIT_S
    while True:
        status = status_of(commands)
        replicas = [each for row in status["deployments"] if row["model"] for each in row["replicas"]]
        if all("kv_use" in each for each in replicas):  # all have reported
            break
        assert time.monotonic() < until, status
    assert (status["state"], status["url"]) == ("running", commands.url)
    assert [node["is_head"] for node in status["nodes"]] == [True]
    assert {row["name"]: (row["model"], len(row["replicas"])) for row in status["deployments"]} == {
        "ingress": (None, 1),
        "replica-a": ("a", 2),
        "replica-b": ("b", 1),
    }
    table = commands.run("status")
    assert commands.url in table and all(each["id"] in table for each in replicas)
    return status


def an_update_changes_replicas(commands: Commands, before: dict[str, Any]) -> None:
    def ids(status: dict[str, Any], name: str) -> set[str]:
        (row,) = [row for row in status["deployments"] if row["name"] == name]
        return {each["id"] for each in row["replicas"] if each["state"] == "running"}

    # What no replica can load is refused before anything is replaced, wherever the cluster is.
    bad = commands.settings("--set", 'models=[{"name":"a"},{"name":"b","resources":{"kv_cache_max_memory_mb":0.0001}}]')
    for where in ([], ["--address", before["address"]], ["--address", "auto"]):
        with commands.start("up", *bad, *where) as refused:
            assert refused.wait(LIMIT_S) == 2, commands.log
        assert "there must be two; raise it" in commands.log.splitlines()[-1]
    assert {name: ids(status_of(commands), name) for name in ("replica-a", "replica-b")} == {
        name: ids(before, name) for name in ("replica-a", "replica-b")
    }

    settings = commands.settings("--set", 'models=[{"name":"a","cluster":{"replicas":1}},"b"]')
    assert commands.run("up", *settings) == f"cLLM is updated: {commands.url} (a, 1 replica; b, 1 replica)\n"
    after = status_of(commands)
    assert ids(after, "replica-a") < ids(before, "replica-a"), "one was stopped, and the other was not started again"
    assert ids(after, "replica-b") == ids(before, "replica-b")
