"""The compose file, the Prometheus and Grafana files it mounts, the KubeRay manifest and the systemd unit."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cllm.cli import app
from cllm.cli.http_server import DELIVERY_S
from cllm.config import ServerConfig, load_config
from cllm.config.keys import KEYS
from dockerfile_kit import read_dockerfile
from repository import ROOT

DEPLOY = ROOT / "deploy"
STOPS_S = ServerConfig().shutdown_grace_s + DELIVERY_S
"""How long a server may take to stop."""
SETTING = re.compile(r"CLLM_([A-Z_]+__[A-Z_]+)")
IMAGE = re.compile(r"[\w./-]+:v?\d[\w.-]*")


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)s?", text)
    assert found, f"{text} is no time in seconds"
    return float(found[1])


@pytest.mark.parametrize("name", ["compose.yaml", "kuberay.yaml", "cllm.service", "Dockerfile", "Dockerfile.cuda"])
def test_settings_that_are_named_exist(name: str) -> None:
    text = (DEPLOY / name).read_text("utf-8")
    named = {setting.replace("__", ".").lower() for setting in SETTING.findall(text)}
    assert named and named <= set(KEYS), f"there is no {sorted(named - set(KEYS))}"


def parse_serve(words: list[str]) -> None:
    """Have the real command line parse `serve ...`; raises if it refuses."""
    command: Any = get_command(app)
    assert words[0] == "serve"
    command.commands["serve"].make_context("cllm serve", words[1:])


# -- compose ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found = read("compose.yaml")
    assert isinstance(found, dict) and found.keys() == {"name", "services", "volumes"}
    return found


def test_mounted_files_exist_and_volumes_are_declared(compose: dict[str, Any]) -> None:
    used = set()
    for service in compose["services"].values():
        for mount in service.get("volumes", ()):
            source, target, *mode = mount.split(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (DEPLOY / source).exists() and mode == ["ro"], f"there is no {source}"
            else:
                used.add(source)
    assert used == set(compose["volumes"])


def test_the_image_is_built_from_this_repository(compose: dict[str, Any]) -> None:
    build = compose["services"]["cllm"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    others = {name: service["image"] for name, service in compose["services"].items() if name != "cllm"}
    assert all(IMAGE.fullmatch(image) for image in others.values()), "name a version"


def test_the_command_is_accepted_and_the_cache_is_kept(compose: dict[str, Any]) -> None:
    service = compose["services"]["cllm"]
    parse_serve([re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]])
    final = read_dockerfile(DEPLOY / "Dockerfile")[-1]
    cache = final.environment({})["CLLM_CACHE_DIR"]
    assert [mount for mount in service["volumes"] if mount.endswith(f":{cache}")]
    assert seconds(service["stop_grace_period"]) > STOPS_S


def test_ports_are_those_that_the_services_listen_on(compose: dict[str, Any]) -> None:
    published = {name: mapping for name, service in compose["services"].items() for mapping in service.get("ports", ())}
    assert published.keys() == {"cllm", "grafana"}
    for mapping in published.values():
        host, outside, inside = mapping.split(":")
        assert host == "127.0.0.1", "there is no key by default"
        assert outside == inside
    exposed = read_dockerfile(DEPLOY / "Dockerfile")[-1].last("EXPOSE").value
    assert published["cllm"].endswith(f":{exposed}")


def test_prometheus_scrapes_the_server(compose: dict[str, Any]) -> None:
    config = read("prometheus.yml")
    assert config.keys() == {"global", "scrape_configs"}
    (job,) = config["scrape_configs"]
    (targets,) = [each["targets"] for each in job["static_configs"]]
    port = read_dockerfile(DEPLOY / "Dockerfile")[-1].last("EXPOSE").value
    assert targets == [f"cllm:{port}"] and "cllm" in compose["services"]
    assert job.get("metrics_path", "/metrics") == "/metrics"


def test_grafana_finds_prometheus_and_the_board(compose: dict[str, Any]) -> None:
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"])
    folder = DEPLOY / "grafana" / "provisioning"
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text("utf-8"))["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    host = re.fullmatch(r"http://(\w+):9090", source["url"])
    assert host and host[1] in compose["services"]
    assert source["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "cllm.yaml").read_text("utf-8"))["providers"]
    folder_of_boards = provider["options"]["path"]
    assert mounts["boards"] == folder_of_boards
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    writer = compose["services"]["board"]
    assert home.startswith(folder_of_boards) and writer["command"][-1] == home
    written = dict(mount.split(":")[:2] for mount in writer["volumes"])
    assert written["boards"] == folder_of_boards
    (script,) = [source for source, target in written.items() if target == writer["command"][1]]
    assert (DEPLOY / script).is_file()
    assert compose["services"]["grafana"]["depends_on"]["board"]["condition"] == "service_completed_successfully"


def test_no_password_is_written_down() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text("utf-8")
            assert not re.search(r"(?i)(password|secret|api_key)[\"']?\s*[:=]\s*[\"']?\w", text), path.name


# -- KubeRay ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    found = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text("utf-8")))
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def cluster(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = manifests["RayService"]["spec"]["rayClusterConfig"]
    return config


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_kinds_are_those_of_the_operator(manifests: dict[str, dict[str, Any]]) -> None:
    assert {kind: document["apiVersion"] for kind, document in manifests.items()} == {
        "ConfigMap": "v1",
        "RayService": "ray.io/v1",
    }
    assert all(document["metadata"]["name"] == "cllm" for document in manifests.values())


def application(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    serve = yaml.safe_load(manifests["RayService"]["spec"]["serveConfigV2"])
    (found,) = serve["applications"]
    assert isinstance(found, dict)
    return found


def test_the_serve_configuration_is_valid(manifests: dict[str, dict[str, Any]]) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    serve = yaml.safe_load(manifests["RayService"]["spec"]["serveConfigV2"])
    parsed = schema.ServeDeploySchema.model_validate(serve)
    assert serve.keys() <= schema.ServeDeploySchema.model_fields.keys(), "it ignores what it does not know"
    for each in serve["applications"]:
        assert each.keys() <= schema.ServeApplicationSchema.model_fields.keys()
    assert parsed.applications[0].import_path == "cllm.cluster:build"
    assert parsed.applications[0].args == {"config": "/etc/cllm/cllm.yaml"}


def test_the_application_can_be_imported(manifests: dict[str, dict[str, Any]]) -> None:
    pytest.importorskip("ray")
    module, _, name = application(manifests)["import_path"].partition(":")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not part of this version")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_configuration_is_mounted_where_it_is_read(
    manifests: dict[str, dict[str, Any]], cluster: dict[str, Any], tmp_path: Path
) -> None:
    path = Path(application(manifests)["args"]["config"])
    content = manifests["ConfigMap"]["data"][path.name]
    file = tmp_path / path.name
    file.write_text(content, "utf-8")
    load_config(file, environ={})
    for pod in pods(cluster):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == set(volumes)
        assert volumes[mounts[str(path.parent)]]["configMap"]["name"] == manifests["ConfigMap"]["metadata"]["name"]
        cache = {each["name"]: each["value"] for each in container["env"]}["CLLM_CACHE_DIR"]
        assert cache in mounts


def test_pods_have_resources_probes_and_no_root(cluster: dict[str, Any]) -> None:
    for pod in pods(cluster):
        (container,) = pod["containers"]
        resources = container["resources"]
        assert resources["requests"] == resources["limits"], "memory must not be promised twice"
        assert {"cpu", "memory"} <= resources["limits"].keys()
        assert {"readinessProbe", "livenessProbe"} <= container.keys(), "KubeRay's own need wget"
        assert container["securityContext"]["runAsNonRoot"]
    head, *workers = pods(cluster)
    assert head["containers"][0]["readinessProbe"]["httpGet"]["port"] != 8000, "the application comes after the head"
    for worker in workers:
        assert worker["containers"][0]["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}
        assert worker["terminationGracePeriodSeconds"] > STOPS_S


def test_the_cluster_scales_within_limits(cluster: dict[str, Any]) -> None:
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_start_parameters_are_options_of_ray(cluster: dict[str, Any]) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    options = {option for parameter in scripts.start.params for option in parameter.opts}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for name, value in group["rayStartParams"].items():
            assert f"--{name}" in options and isinstance(value, str), name


def test_the_ports_of_ray_are_the_real_ones(cluster: dict[str, Any]) -> None:
    constants = pytest.importorskip("ray._private.ray_constants")
    ports = {port["name"]: port["containerPort"] for port in pods(cluster)[0]["containers"][0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000}
    assert ports["gcs-server"] == constants.DEFAULT_PORT and ports["dashboard"] == constants.DEFAULT_DASHBOARD_PORT
    for pod in pods(cluster):
        probe = pod["containers"][0]["livenessProbe"]["httpGet"]
        assert probe["port"] == constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT


# -- systemd ---------------------------------------------------------------------------------------------------------

UNIT = DEPLOY / "cllm.service"
MOST_EXPOSED = 25
"""Of 100, by systemd's own measure; a service without any protection has 96."""


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text("utf-8"))
    assert parser.sections() == ["Unit", "Service", "Install"]
    return dict(parser["Service"])


def test_the_command_line_of_the_service_is_accepted(service: dict[str, str]) -> None:
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "cllm" and Path(program).is_absolute()
    parse_serve(words)
    with pytest.raises(Exception, match="no-such-option"):
        parse_serve([*words, "--no-such-option"])


def test_the_service_keeps_its_cache_and_has_time_to_stop(service: dict[str, str]) -> None:
    assert service["DynamicUser"] == "yes"
    assert service["Environment"] == f"CLLM_CACHE_DIR=%C/{service['CacheDirectory']}"
    assert service["Restart"] == "on-failure"
    assert seconds(service["TimeoutStopSec"]) > STOPS_S


def analyse(tmp_path: Path, *arguments: str, name: str = "cllm.service") -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / name
    text = UNIT.read_text("utf-8")
    # It looks whether the program exists.
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", text, flags=re.MULTILINE), "utf-8")
    return subprocess.run([program, *arguments, str(unit)], capture_output=True, text=True, timeout=60, check=False)


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    done = analyse(tmp_path, "verify", "--man=no")
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_finds_little_exposed(tmp_path: Path) -> None:
    done = analyse(tmp_path, "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", "--no-pager")
    if "nrecognized option" in done.stderr:
        pytest.skip("systemd is older than 250")
    assert done.returncode == 0, done.stdout
