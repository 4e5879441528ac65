"""What the documents say, held against the code: links, names, commands, examples, tables, layers."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cllm.cli import app as cllm_app
from cllm.config import Config, load_config
from cllm.config.keys import KEYS
from cllm_bench.cli import app as bench_app
from repository import ROOT, TESTS
from server_process import serving

SOURCE = ROOT / "src" / "cllm"
NAMES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "src").rglob("README.md")),
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
DOCUMENTS = [ROOT / name for name in NAMES]
ADDRESS = "http://127.0.0.1:8000"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"(?P<path>[\w./*-]+\.(?:py|md|yaml))(?:::(?P<test>\w+))?")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)


def without_fences(text: str) -> str:
    return FENCE.sub("", text)


def fences(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def inline(text: str) -> list[str]:
    return INLINE.findall(without_fences(text))


def commands(text: str) -> list[list[str]]:
    """Everything that is meant to be typed, as words: lines of shell blocks, and inline code."""
    joined = "\n".join(fences(text, "bash")).replace("\\\n", " ")
    lines = [part for line in joined.splitlines() for part in line.split(" && ")]
    return [words for line in [*lines, *inline(text)] if (words := _words(line))]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # inline code that is no command: an unbalanced quote
        return []


# -- links and names -----------------------------------------------------------------------------------------------


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(without_fences(document.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{target.name} has no heading #{anchor}"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_fences(document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_files_and_tests_that_are_named_exist(document: Path) -> None:
    places = (ROOT, SOURCE, SOURCE.parent, TESTS, *TESTS.glob("*/"), document.parent)
    for span in inline(document.read_text(encoding="utf-8")):
        named = FILE.fullmatch(span)
        if named is None:
            continue
        found = [file for place in places for file in place.glob(named["path"])]
        assert found, f"there is no {span}"
        if named["test"]:
            assert f"def {named['test']}(" in found[0].read_text(encoding="utf-8"), f"there is no {span}"


@each_document
def test_members_of_classes_that_are_named_exist(document: Path) -> None:
    for span in inline(document.read_text(encoding="utf-8")):
        if (named := re.fullmatch(r"([A-Z]\w+)\.(\w+)(\(.*)?", span)) and named[1] in MEMBERS:
            assert named[2] in MEMBERS[named[1]], f"there is no {span}"


def _members() -> dict[str, set[str]]:
    """The names in each class, its bases included. Classes of the same name are taken together."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = members.setdefault(node.name, set())
                for each in node.body:
                    if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        own.add(each.name)
                    else:
                        own |= {name.id for name in ast.walk(each) if isinstance(name, ast.Name)}
                own |= {
                    each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and _is_self(each.value)
                }
                bases.setdefault(node.name, set()).update(each.id for each in node.bases if isinstance(each, ast.Name))
    for _ in range(4):  # as deep as they are
        for name, above in bases.items():
            members[name].update(*(members.get(base, ()) for base in above))
    return members


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


MEMBERS = _members()


def test_every_directory_of_tests_is_in_the_map() -> None:
    spans = set(inline((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    missing = {f"tests/{file.parent.name}/" for file in TESTS.glob("*/test_*.py")} - spans
    assert not missing, f"add {sorted(missing)} to the table of tests in CONTRIBUTING.md"


# -- commands ------------------------------------------------------------------------------------------------------


@each_document
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in commands(document.read_text(encoding="utf-8")):
        if words[0] == "make" and len(words) > 1:
            assert words[1] in targets, f"there is no `make {words[1]}`"


@each_document
def test_cllm_commands_and_their_options_exist(document: Path) -> None:
    for words in commands(document.read_text(encoding="utf-8")):
        if "cllm" in words and words[0] in ("cllm", "kernprof"):
            check_command(words[words.index("cllm") + 1 :])


CLLM, BENCH = get_command(cllm_app), get_command(bench_app)


def check_command(words: list[str]) -> None:
    """Follow the words to a command; capitals stand for something to fill in."""
    command: Any = CLLM
    shown = "cllm " + " ".join(words)
    for position, word in enumerate(words):
        if not hasattr(command, "commands") or word.startswith("-") or word.isupper():
            break
        assert word in command.commands, f"`{shown}`: there is no command {word}"
        command = BENCH if (position, word) == (0, "bench") else command.commands[word]
    known = {"--help"}.union(*(parameter.opts for parameter in command.params))
    for option in (word.partition("=")[0] for word in words if word.startswith("-") and word != "-"):
        assert option in known, f"`{shown}`: there is no option {option}"


# -- settings ------------------------------------------------------------------------------------------------------


@each_document
def test_settings_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    dotted = re.compile(rf"({'|'.join(Config.model_fields)})(\.\w+)+")
    named = {span for span in inline(text) if dotted.fullmatch(span) and not FILE.fullmatch(span)}
    named |= {name.replace("__", ".").lower() for name in re.findall(r"\bCLLM_([A-Z_]+__[A-Z_]+)", text)}
    assert named <= set(KEYS), f"there is no {sorted(named - set(KEYS))}"


def test_the_table_of_settings_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "config_table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run python scripts/config_table.py"


def test_the_example_configuration_is_valid() -> None:
    example = ROOT / "docs" / "configuration.example.yaml"
    result = CliRunner().invoke(cllm_app, ["config", "check", str(example)])
    assert (result.exit_code, result.output) == (0, f"{example}: ok\n")
    server = load_config(example, environ={}).config.server
    assert ip_address(server.host).is_loopback and not server.needs_key, "whoever copies it must not be open to others"


# -- examples ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with the fake backend, which accepts the default model's name."""
    with serving() as served:
        yield served.url


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_python_client_runs(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [body for body in fences(read("README.md"), "python") if "openai" in body]
    assert ADDRESS in example
    exec(compile(example.replace(ADDRESS, server), "README.md", "exec"), {})
    assert "prompt tokens came from the cache" in capsys.readouterr().out


def test_the_curl_requests_are_answered(server: str) -> None:
    shown = commands(read("README.md")) + commands(read("docs/api.md"))
    requests = [words for words in shown if words[0] == "curl" and "-d" in words]
    assert len(requests) == 3
    for words in requests:
        url = next(word for word in words if word.startswith(ADDRESS)).replace(ADDRESS, server)
        body = json.loads(words[words.index("-d") + 1])
        answer = httpx.post(url, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n") == bool(body.get("stream"))


def without_names(path: str) -> str:
    return re.sub(r"{\w+}", "{}", path)


def test_endpoints_metrics_and_fields_of_the_cache_exist(server: str) -> None:
    paths = httpx.get(f"{server}/openapi.json").json()["paths"]
    known = {(method.upper(), without_names(path)) for path, methods in paths.items() for method in methods}
    known |= {("POST", "/models/load"), ("POST", "/models/unload")}  # only where there are several models
    spans = [re.fullmatch(r"(GET|POST|DELETE) (/\S*)", span) for span in inline(read("docs/api.md"))]
    named = {(span[1], without_names(span[2])) for span in spans if span}
    assert known <= named, "docs/api.md has all endpoints"
    for method, path in named - known:
        assert httpx.request(method, server + path).status_code == 200
    metrics = httpx.get(f"{server}/metrics").text
    for name in re.findall(r"^cllm:\w+", read("docs/monitoring.md"), re.MULTILINE):
        assert f"\n{name}{{" in metrics, f"there is no metric {name}"
    single, cluster = map(json.loads, fences(read("docs/monitoring.md"), "json"))
    answered = set(httpx.get(f"{server}/kv").json())
    assert set(single) <= answered
    assert set(cluster) <= answered | {"replicas"}


@pytest.mark.model
def test_the_python_face_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_RESOURCES__MAX_CONTEXT_LENGTH", "512")
    (example,) = [body for body in fences(read("docs/python.md"), "python") if "from cllm import" in body]
    exec(compile(example, "docs/python.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


# -- layers --------------------------------------------------------------------------------------------------------

LAYERS = [
    {"errors", "machine", "_native"},
    {"kv"},
    {"models", "config", "routing"},
    {"work"},
    {"backends", "text"},
    {"structured"},
    {"engine"},
    {"dialect"},
    {"observe", "drafts", "generation"},
    {"loading"},
    {"executor"},
    {"llm"},
    {"tasks"},
    {"offline", "served"},
    {"server"},
    {"cluster"},
    {"cli"},
    {"__init__", "__main__"},
]
"""Parts of the package from the bottom up. Those that stand together do not import each other either."""

KV_LAYERS = [
    {"groups", "sequence", "window", "usage", "view", "ops", "sizing", "ledger", "block_names", "throughput"},
    {"radix", "eviction", "pins", "events", "operations", "manager"},
    {"disk"},
    {"tiers"},
    {"paged", "slots"},
]
"""Parts of kv/ from the bottom up. The two managers do not import each other."""

KV_PART_LAYERS = {
    "paged": [
        {"extents", "holder_ids", "snapshot_places"},
        {"free_runs"},
        {"pool", "block_table"},
        {"local"},
        {"prefix_cache", "fragmentation"},
        {"arena"},
        {"view", "checks", "compaction", "disk_offload"},
        {"upkeep", "resizing", "offload"},
        {"room"},
        {"pins", "state_tables"},
        {"local_tables"},
        {"tables", "edits"},
        {"loads"},
        {"manager"},
    ],
    "slots": [
        {"sizes", "events", "snapshots", "packing"},
        {"index"},
        {"store", "view"},
        {"places"},
        {"offload"},
        {"room"},
        {"pins", "loads", "resizing", "states"},
        {"manager"},
    ],
    "tiers": [{"loads", "tier"}, {"disk_tier", "host_tier"}, {"tiers"}],
    "disk": [
        {"files", "threads", "throttle", "staging"},
        {"model_digest", "format", "directory", "payload_writer"},
        {"segment"},
        {"index", "overview"},
        {"catalog"},
        {"reader", "pending_writes", "writer"},
        {"store"},
    ],
}

DISK_USES = {"block_names", "throughput"}
"""All that kv/disk/ imports of the rest of kv/."""


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def rank(layers: list[set[str]], name: str) -> int:
    (found,) = [number for number, layer in enumerate(layers) if name in layer]
    return found


def test_no_layer_imports_upwards() -> None:
    for file in SOURCE.rglob("*.py"):
        part = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        for module in imported(file):
            package, _, rest = module.partition(".")
            if package == "cllm_bench":  # the laboratory, which the command line offers
                assert part == "cli", f"{file.relative_to(ROOT)} imports {module}"
            other = rest.partition(".")[0]
            if package == "cllm" and other not in ("", part):
                assert rank(LAYERS, other) < rank(LAYERS, part), f"{file.relative_to(ROOT)} imports {module}"


def test_kv_imports_nothing_from_above() -> None:
    root = SOURCE / "kv"
    for file in root.rglob("*.py"):
        *folders, name = file.relative_to(root).with_suffix("").parts
        part = folders[0] if folders else name
        for module in imported(file):
            if not module.startswith("cllm"):
                continue
            _, _, *path = module.split(".")
            if not module.startswith("cllm.kv."):
                assert module == "cllm.errors" and part != "disk", f"{file.relative_to(root)} imports {module}"
            elif path[0] == part:
                if folders:
                    layers = KV_PART_LAYERS[part]
                    assert rank(layers, path[1]) <= rank(layers, name), f"{file.relative_to(root)} imports {module}"
            else:
                allowed = path[0] in DISK_USES if part == "disk" else rank(KV_LAYERS, path[0]) <= rank(KV_LAYERS, part)
                both = {part, path[0]} == {"paged", "slots"}
                assert allowed and not both, f"{file.relative_to(root)} imports {module}"
