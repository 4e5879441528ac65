"""The commands that hints name: they work where they are printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cllm.machine import install_extra, install_packages, packages
from repository import ROOT

LINES = [
    "numpy<3,>=1.26",
    'torch<3,>=2.8; extra == "torch"',
    "huggingface_hub<3,>=0.25 ; extra == 'torch'",
    'torch==2.13.0; extra == "test-torch"',
]


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a Python in it that runs this."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    return tmp_path


def test_in_a_checkout_the_script_is_named(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (venv / "scripts").mkdir()
    (venv / "scripts" / "install.py").touch()
    monkeypatch.setattr(packages, "_CHECKOUT", venv)
    assert install_extra("torch") == ".venv/bin/python scripts/install.py torch"
    for elsewhere in ("/", "/usr"):
        monkeypatch.chdir(elsewhere)
        assert install_extra("torch") == f"{venv}/.venv/bin/python {venv}/scripts/install.py torch"


def test_elsewhere_the_packages_are_named(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_CHECKOUT", venv)
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: LINES)
    pip = ".venv/bin/python -m pip install"
    assert install_extra("torch") == f"{pip} 'torch<3,>=2.8' 'huggingface_hub<3,>=0.25'"
    assert install_packages("--upgrade", "gguf") == f"{pip} --upgrade gguf"


def test_no_hint_installs_cllm_from_an_index() -> None:
    """It is on none."""
    found = [
        str(file)
        for folder in ("src", "docs", "deploy")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md", ".yaml", ".toml") and "cllm[" in file.read_text(encoding="utf-8")
    ]
    assert found == []


def test_the_extras_that_hints_name_exist() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for extra in ("bench", "cluster", "hf", "llama-cpp", "otel", "torch"):
        assert f"\n{extra} = [" in declared
        assert install_extra(extra).endswith(f"scripts/install.py {extra}")
