"""The Dockerfiles: known instructions, files that exist, no root, no secrets; and their commands, run as they stand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along there
    import tomli as tomllib

from cllm.cli.http_server import DELIVERY_S
from cllm.config import ServerConfig
from dockerfile_kit import Stage, is_ignored, read_dockerfile, read_ignored
from repository import ROOT
from thorough import slow

DEPLOY = ROOT / "deploy"
FILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
IGNORED = read_ignored(ROOT / ".dockerignore")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SECRET = re.compile(r"(?i)(password|passwd|secret|token|api_?key|BEGIN [A-Z ]*PRIVATE)\s*[=:]")
LIMIT_S = 60

each_image = pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])


def stages(path: Path) -> list[Stage]:
    return read_dockerfile(path)


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.splitlines()


def copied(stage: Stage) -> list[str]:
    """What is copied from the repository."""
    return [name for each in stage.all("COPY") if "from" not in each.options for name in each.arguments[:-1]]


@each_image
def test_what_is_copied_exists_and_is_not_ignored(path: Path) -> None:
    names = [name for stage in stages(path) for name in copied(stage)]
    assert names
    for name in names:
        assert (ROOT / name).exists(), f"there is no {name}"
        assert not is_ignored(name, IGNORED), f".dockerignore leaves {name} out"


@each_image
def test_stages_that_are_named_exist(path: Path) -> None:
    known: set[str] = set()
    for stage in stages(path):
        assert stage.base in known or re.fullmatch(r"[\w./-]+:[\w.-]+", stage.base), "name a version of the base image"
        assert not stage.base.endswith(":latest")
        for each in stage.all("COPY"):
            assert each.options.get("from", next(iter(known), None)) in {*known, None}, each
        known |= {stage.name} if stage.name else set()


@each_image
def test_all_that_the_wheel_is_built_from_is_copied(path: Path) -> None:
    (build,) = [stage for stage in stages(path) if copied(stage)]
    names = copied(build)
    needed = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml", "CMakeLists.txt"}
    needed |= set(re.findall(r"csrc/[\w/]+\.cpp", (ROOT / "CMakeLists.txt").read_text("utf-8")))
    needed |= {name for name in tracked() if name.startswith(("src/", "csrc/"))}
    for name in needed:
        assert any(name == each or name.startswith(f"{each}/") for each in names), f"{name} is not copied"
        assert not is_ignored(name, IGNORED), f".dockerignore leaves {name} out"


def test_nothing_else_of_a_checkout_is_sent_to_the_builder() -> None:
    for name in (".git/config", ".venv/bin/python", "tests/conftest.py", "keys.json", ".env", "docs/api.md"):
        assert is_ignored(name, IGNORED), name
    for name in ("src/cllm/_native.cpython-311-x86_64-linux-gnu.so", "src/cllm/kv/__pycache__/pool.pyc"):
        assert is_ignored(name, IGNORED), f"{name}: built for another Python"


@pytest.mark.parametrize(
    ("path", "patterns", "ignored"),
    [
        ("a", ["*"], True),
        ("a/b", ["*"], True),
        ("a/b", ["*", "!a"], False),
        ("a/b/c.so", ["*", "!a", "**/*.so"], True),
        ("a/b", ["a/b"], True),
        ("a/b", ["b"], False),
        ("c", ["!c", "*"], True),
    ],
)
def test_how_ignore_patterns_are_read(path: str, patterns: list[str], ignored: bool) -> None:
    assert is_ignored(path, patterns) is ignored


@each_image
def test_extras_exist(path: Path) -> None:
    """Each default of ARG EXTRAS, and what is written out."""
    text = path.read_text("utf-8")
    named = re.findall(r"\[([\w,-]+,)?\$EXTRAS\]", text)[0] + re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)[0]
    assert set(named.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


@each_image
def test_the_result_runs_without_root_and_with_its_cache_in_a_volume(path: Path) -> None:
    final = stages(path)[-1]
    user = final.last("USER").value
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that Kubernetes can check that it is not root"
    (created,) = [each.value for each in final.all("RUN") if "useradd" in each.value]
    assert f"--uid {user.partition(':')[0]} " in created
    cache = final.environment({})["CLLM_CACHE_DIR"]
    assert cache in final.last("VOLUME").arguments and f"--owner=cllm --group=cllm {cache}" in created
    words = [each.word for each in final.instructions]
    assert words.index("USER") > max(index for index, word in enumerate(words) if word in ("RUN", "COPY"))
    assert final.last("EXPOSE").arguments == [str(ServerConfig().port)]


@each_image
def test_there_are_no_secrets_and_no_leftovers(path: Path) -> None:
    assert not SECRET.search(path.read_text("utf-8"))
    for stage in stages(path):
        for each in stage.all("RUN"):
            assert "apt-get install" not in each.value or "rm -rf /var/lib/apt/lists/*" in each.value
            assert "--no-cache-dir" in each.value or not re.search(r"\bpip (install|wheel)\b", each.value), each


# -- the commands, run ---------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory that has `cllm` and `python`, as the image has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("cllm", "-m cllm "), ("python", "")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n', "utf-8")
        program.chmod(0o755)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@each_image
@slow
def test_the_command_serves_and_the_health_check_knows_when(path: Path, programs: Path, tmp_path: Path) -> None:
    final = stages(path)[-1]
    given = {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}
    environment = final.environment({**given, "PATH": f"{programs}:{os.environ['PATH']}"})
    environment |= {"CLLM_CACHE_DIR": str(tmp_path / "cache"), "CLLM_BACKEND__TYPE": "fake"}
    environment |= {"CLLM_SERVER__PORT": str(free_port()), "http_proxy": "http://127.0.0.1:9"}

    def health() -> int:
        check = final.last("HEALTHCHECK").command
        return subprocess.run(check, env=environment, timeout=LIMIT_S, capture_output=True, check=False).returncode

    assert health() == 1, "nothing runs yet"
    with started([*final.last("ENTRYPOINT").command, *final.last("CMD").command], environment) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert f"http://0.0.0.0:{environment['CLLM_SERVER__PORT']}" in line, line
        assert health() == 0
        server.terminate()
        assert server.wait(LIMIT_S) == 0
    assert health() == 1, "it has ended"


@each_image
def test_the_health_check_is_not_ready_while_the_server_says_so(path: Path, programs: Path) -> None:
    """A server that is up and refuses requests."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        final = stages(path)[-1]
        port = str(listener.getsockname()[1])
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CLLM_SERVER__PORT": port}
        with subprocess.Popen(final.last("HEALTHCHECK").command, env=environment, stderr=subprocess.PIPE) as check:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(4096).startswith(b"GET /ready ")
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
            assert check.wait(LIMIT_S) == 1


@each_image
def test_the_health_check_has_more_time_than_it_takes(path: Path) -> None:
    check = stages(path)[-1].last("HEALTHCHECK")
    inner = re.search(r"timeout=(\d+)", check.command[-1])
    assert inner and int(inner[1]) < int(check.options["timeout"].removesuffix("s"))


def test_docker_waits_longer_than_a_shutdown_takes() -> None:
    """By default for 10 s, which is too short for `server.shutdown_grace_s`: so the documents say --stop-timeout."""
    needed = ServerConfig().shutdown_grace_s + DELIVERY_S
    text = (ROOT / "docs" / "containers.md").read_text("utf-8")
    times = [int(seconds) for seconds in re.findall(r"--stop-timeout (\d+)", text)]
    assert times and min(times) > needed
