"""The GitHub workflows: their structure, and that every target, file and Python version they name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from repository import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EVENTS = {"push", "pull_request", "schedule", "workflow_dispatch"}
JOB_KEYS = {"runs-on", "timeout-minutes", "strategy", "steps", "needs"}
STEP_KEYS = {"name", "uses", "with", "run", "env", "if"}
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=[path.name for path in WORKFLOWS])


def load(path: Path) -> dict[str, Any]:
    """YAML 1.1 reads the key `on` as true."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(workflow, dict)
    return {"on" if key is True else key: value for key, value in workflow.items()}


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(path)["jobs"]
    assert found
    return found


def matrix(job: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = job.get("strategy", {}).get("matrix", {})
    return found


def filled(text: str, job: dict[str, Any]) -> Iterator[str]:
    """The text for each value of the matrix."""
    names = [name.removeprefix("matrix.") for name in EXPRESSION.findall(text) if name.startswith("matrix.")]
    if not names:
        yield text
    for value in matrix(job)[names[0]] if names else ():
        yield from filled(re.sub(rf"\$\{{\{{\s*matrix\.{names[0]}\s*\}}\}}", value, text), job)


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "extended", "wheels"}


@each_workflow
def test_the_structure_is_valid(path: Path) -> None:
    workflow = load(path)
    assert workflow.keys() <= {"name", "on", "permissions", "concurrency", "jobs"}
    assert workflow["on"].keys() <= EVENTS and workflow["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert job.keys() <= JOB_KEYS, name
        assert isinstance(job["timeout-minutes"], int) and re.fullmatch(r"[a-z]+-[\d.]+", job["runs-on"]), name
        assert all(isinstance(value, str) for values in matrix(job).values() for value in values), "3.10 is not 3.1"
        assert job["steps"], name
        for step in job["steps"]:
            assert step.keys() <= STEP_KEYS and ("uses" in step) != ("run" in step), step
            assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v[\d.]+", step["uses"]), step
    for name in EXPRESSION.findall(path.read_text(encoding="utf-8")):
        known = {f"matrix.{key}" for job in jobs(path).values() for key in matrix(job)}
        assert name in known or name.startswith(("github.", "hashFiles(")), name


@each_workflow
def test_targets_and_files_exist(path: Path) -> None:
    for job in jobs(path).values():
        for step in job["steps"]:
            for line in filled(step.get("run", ""), job):
                for target in re.findall(r"\bmake ([\w-]+)", line):
                    assert target in TARGETS, f"there is no `make {target}`"
    text = path.read_text(encoding="utf-8")
    filters = [
        name for event in load(path)["on"].values() if isinstance(event, dict) for name in event.get("paths", ())
    ]
    named = [*filters, *re.findall(r"hashFiles\('(.+?)'\)", text), *re.findall(r"cache-dependency-path: (.+)", text)]
    for name in named:
        assert list(ROOT.glob(name)), f"there is no {name}"


def test_every_supported_python_is_tested_and_has_a_wheel() -> None:
    found = {path.stem: jobs(path) for path in WORKFLOWS}
    assert matrix(found["ci"]["test"])["python-version"] == PYTHONS
    wheels = matrix(found["wheels"]["wheels"])["python"]
    assert wheels == [f"cp{version.replace('.', '')}" for version in PYTHONS]
