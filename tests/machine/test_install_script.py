"""scripts/install.py on a machine that cannot compile: one line that says what to install, and nothing is tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script in a directory that is no package: whatever went on to pip would fail there, and change nothing."""
    script = tmp_path / "scripts" / "install.py"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts" / "install.py").read_text())
    (tmp_path / "bin").mkdir()
    return tmp_path


def install(checkout: Path, *extras: str, programs: tuple[str, ...] = (), **env: str) -> list[str]:
    for name in programs:
        program = checkout / "bin" / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(checkout / "scripts" / "install.py"), *extras],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": str(checkout / "bin"), "HOME": str(checkout), **env},
    )
    assert done.returncode == 1 and done.stdout == "", done.stdout
    return done.stderr.splitlines()


def test_no_compiler(checkout: Path) -> None:
    assert install(checkout) == ["cLLM: no C++ compiler found (c++ g++ clang++); install g++"]


@pytest.mark.parametrize(
    ("manager", "how"),
    [("apt-get", "apt-get install g++"), ("dnf", "dnf install gcc-c++"), ("apk", "apk add g++")],
)
def test_the_package_manager_that_is_there_is_named(checkout: Path, manager: str, how: str) -> None:
    (line,) = install(checkout, programs=(manager,))
    sudo = "" if os.geteuid() == 0 else "sudo "
    assert line.endswith(f"; install g++, for example with: {sudo}{how}")


def test_a_compiler_by_name_that_is_not_there(checkout: Path) -> None:
    (line,) = install(checkout, programs=("g++",), CXX="g++-99 -O2")
    assert line == (
        "cLLM: the C++ compiler that the variable CXX names, g++-99 -O2, was not found; unset CXX or correct it"
    )


def test_no_headers_of_python(checkout: Path) -> None:
    (checkout / "sitecustomize.py").write_text("import sysconfig\nsysconfig.get_path = lambda name: '/nowhere'\n")
    (line,) = install(checkout, programs=("g++",), PYTHONPATH=str(checkout))
    assert line == "cLLM: the headers of Python are missing (/nowhere/Python.h); install python3-dev"
