"""The file of named keys and `cllm keys`: what is kept, who may read it, and what happens when writing fails."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cllm.cli import app
from cllm.config import ServerConfig
from cllm.errors import ConfigError
from cllm.server.auth import key_file
from cllm.server.auth.key_file import KeyFile, NamedKey, add_key, digest, new_salt, read_keys, remove_key
from cllm.server.auth.tenants import Tenants

KEY = re.compile(r"sk-cllm-[\w-]{43}")


def names(path: Path) -> list[str]:
    return [key.name for key in read_keys(path).keys]


def invoke(*args: object, **env: str) -> Any:
    return CliRunner().invoke(app, ["keys", *map(str, args)], env=env)


# -- what is kept --------------------------------------------------------------------------------------------------


def test_a_key_is_kept_as_a_digest_that_only_its_owner_can_read(path: Path) -> None:
    key = add_key(path, "ann", 4)
    assert KEY.fullmatch(key)
    text = path.read_text()
    assert key not in text and key.removeprefix("sk-cllm-") not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_keys(path)
    assert found.keys[0].digest == digest(key.encode(), found.salt).hex()
    assert (found.keys[0].name, found.keys[0].max_concurrent) == ("ann", 4)


def test_no_two_keys_and_no_two_files_are_alike(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    keys = {add_key(file, name, None) for file in files for name in "abc"}
    assert len(keys) == 6
    first, second = map(read_keys, files)
    assert digest(b"the same", first.salt) != digest(b"the same", second.salt)


def test_whoever_loosened_the_file_has_it_tight_again(path: Path) -> None:
    add_key(path, "ann", None)
    path.chmod(0o644)
    add_key(path, "bob", None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_to_the_file_stays_one(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    add_key(link, "ann", None)
    add_key(link, "bob", None)
    assert link.is_symlink() and names(path) == ["ann", "bob"]


def test_removing_leaves_the_others(path: Path) -> None:
    for name in ("ann", "bob", "cyd"):
        add_key(path, name, None)
    before = read_keys(path)
    remove_key(path, "bob")
    after = read_keys(path)
    assert after.keys == (before.keys[0], before.keys[2]) and after.salt == before.salt


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "-a", "a\n", "x" * 65, "api_key"])
def test_names_are_fit_for_logs_and_metrics(path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        add_key(path, name, None)
    assert not path.exists()


def test_a_name_is_given_once_and_a_limit_is_at_least_one(path: Path) -> None:
    add_key(path, "ann", None)
    with pytest.raises(ConfigError, match="has a key named ann already"):
        add_key(path, "ann", None)
    with pytest.raises(ConfigError, match="max-concurrent is 0"):
        add_key(path, "bob", 0)
    with pytest.raises(ConfigError, match="no key named an: did you mean ann"):
        remove_key(path, "an")
    assert names(path) == ["ann"]


def test_there_is_an_end_to_the_number_of_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "MOST_KEYS", 2)
    add_key(path, "ann", None)
    add_key(path, "bob", None)
    with pytest.raises(ConfigError, match="already has the maximum of 2 keys"):
        add_key(path, "cyd", None)


# -- files that are not as they should be --------------------------------------------------------------------------


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "ann", "digest": "a" * 64, "max_concurrent": None, "created": "2026-01-31", **changes}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "EOF"),
        ("{", "EOF"),
        ("[]", "not a valid key file"),
        ("\x00\xff", "not a valid key file"),
        ({"salt": "b" * 64, "version": 2}, "version"),
        ({"keys": []}, "salt"),
        ({"salt": "b"}, "salt"),
        ({"salt": "b" * 64, "keys": [entry(digest="sk-cllm-plain")]}, "keys.0.digest"),
        ({"salt": "b" * 64, "keys": [entry(name="a b")]}, "keys.0.name"),
        ({"salt": "b" * 64, "keys": [entry(max_concurrent=0)]}, "keys.0.max_concurrent"),
        ({"salt": "b" * 64, "keys": [entry(max_concurrent="4")]}, "keys.0.max_concurrent"),
        ({"salt": "b" * 64, "keys": [entry(admin=True)]}, "keys.0.admin"),
        ({"salt": "b" * 64, "keys": [entry(), entry(digest="c" * 64)]}, "ann occurs twice"),
        ({"salt": "b" * 64, "keys": [entry(), entry(name="bob")]}, "has two names"),
        ({"salt": "b" * 64, "keys": [entry(name="api_key")]}, "server.api_key"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_and_left_alone(path: Path, content: Any, reason: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text)
    for attempt in (lambda: read_keys(path), lambda: add_key(path, "eve", None), lambda: remove_key(path, "ann")):
        with pytest.raises(ConfigError) as raised:
            attempt()
        assert reason in str(raised.value) and str(path) in str(raised.value)
        assert "sk-cllm-plain" not in str(raised.value)
    assert path.read_text() == text


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such key file; create it with `cllm keys add NAME --file .*keys`"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_keys(tmp_path)
    with pytest.raises(ConfigError, match="larger than"):
        read_keys(Path("/dev/zero"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the directory .*file does not exist; create it"):
        add_key(tmp_path / "file" / "keys", "ann", None)


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.fdopen", "os.fsync", "pathlib.Path.replace"])
def test_writing_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    add_key(path, "ann", None)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="No space left on device; nothing"):
        patch.setattr(call, fail)
        add_key(path, "bob", None)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_who_adds_at_the_same_time_loses_nothing(path: Path) -> None:
    code = "import sys; from pathlib import Path; from cllm.server.auth.key_file import add_key\n" + (
        "for n in range(10): add_key(Path(sys.argv[1]), f'{sys.argv[2]}{n}', None)"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert sorted(names(path)) == sorted(f"{name}{n}" for name in "abc" for n in range(10))


def test_no_directory_is_made_for_a_file_of_keys(tmp_path: Path) -> None:
    missing = tmp_path / "cllm" / "keys.json"
    problem = f"{missing}: the directory {missing.parent} does not exist; create it or choose another file"
    for change in (lambda: add_key(missing, "ann", None), lambda: remove_key(missing, "ann")):
        with pytest.raises(ConfigError) as raised:
            change()
        assert str(raised.value) == problem
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("operator", [None, "sesame"])
def test_keys_are_counted_alike_at_the_start_and_later(
    path: Path, operator: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    add_key(path, "ann", None)
    with caplog.at_level("INFO"):
        tenants = Tenants(ServerConfig(api_keys=path, api_key=operator), lambda: now)
        add_key(path, "bob", None)
        now = 10.0
        tenants.find(b"whatever")
    first, second = caplog.messages
    assert first.startswith(f"1 keys from {path}") and second == f"reloaded keys from {path}: 2 keys"


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_prints_a_key_once(path: Path) -> None:
    added = invoke("add", "ann", "--max-concurrent", 3, "--file", path)
    assert added.exit_code == 0
    key = added.stdout.strip()
    assert KEY.fullmatch(key) and str(path) in added.stderr and key not in added.stderr
    invoke("add", "a-longer.name", "--file", path)
    listed = invoke("list", "--file", path)
    assert [line.split()[:2] for line in listed.stdout.splitlines()] == [
        ["name", "max_concurrent"],
        ["ann", "3"],
        ["a-longer.name", "-"],
    ]
    assert key not in listed.output
    assert invoke("remove", "ann", "--file", path).exit_code == 0
    assert names(path) == ["a-longer.name"]


def test_the_file_is_the_configured_one(path: Path, tmp_path: Path) -> None:
    config = tmp_path / "cllm.yaml"
    config.write_text(f"server: {{api_keys: {path}}}\n")
    assert invoke("add", "ann", "--config", config).exit_code == 0
    assert invoke("add", "bob", "--set", f"server.api_keys={path}").exit_code == 0
    assert invoke("add", "cyd", CLLM_SERVER__API_KEYS=str(path)).exit_code == 0
    assert names(path) == ["ann", "bob", "cyd"]


def test_without_a_file_the_command_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLLM_SERVER__API_KEYS", raising=False)
    for args in (["add", "ann"], ["list"], ["remove", "ann"]):
        result = invoke(*args)
        assert isinstance(result.exception, ConfigError)
        assert "--file FILE" in str(result.exception)


def test_an_empty_file_of_keys_is_one() -> None:
    assert KeyFile.model_validate_json(KeyFile(salt="b" * 64).model_dump_json()).keys == ()


# -- finding a key ---------------------------------------------------------------------------------------------------


def test_the_file_is_looked_at_now_and_then(path: Path) -> None:
    add_key(path, "ann", None)
    now = 0.0
    found = Tenants(ServerConfig(api_keys=path), clock=lambda: now)
    cyd = add_key(path, "cyd", None).encode()
    assert found.find(cyd) is None
    now = 1.0
    caller = found.find(cyd)
    assert caller is not None and caller.tenant.name == "cyd"


def test_a_thousand_keys_are_told_apart(path: Path) -> None:
    salt = new_salt()
    stored = tuple(
        NamedKey(name=f"user-{n}", digest=digest(f"key-{n}".encode(), salt).hex(), max_concurrent=n + 1)
        for n in range(1000)
    )
    path.write_text(KeyFile(salt=salt, keys=stored).model_dump_json())
    found = Tenants(ServerConfig(api_keys=path))
    callers = [found.find(f"key-{n}".encode()) for n in range(1000)]
    assert [caller and (caller.tenant.name, caller.limit) for caller in callers] == [
        (f"user-{n}", n + 1) for n in range(1000)
    ]
    assert len({caller.tenant.space for caller in callers if caller}) == 1000
    assert found.find(b"key-1000") is None
