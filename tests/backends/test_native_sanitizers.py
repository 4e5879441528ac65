"""The native engine built with sanitizers, and run through everything it can do: any report is a failure.

The build lies in pytest's cache directory, so that only what has changed is compiled again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repository import KITS, ROOT
from thorough import only_exhaustive

EXERCISE = KITS / "native_exercise.py"

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:exitcode=66",
}
"""Leaks are not looked for: Python itself ends without giving all memory back."""

pytestmark = [
    *only_exhaustive,
    pytest.mark.skipif(sys.platform != "linux", reason="the sanitizers' runtime is preloaded, as Linux does it"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.timeout(1800),
]


def tool(name: str) -> str:
    """A program of this environment (the wheels cmake and ninja), or of the system."""
    here = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([here, os.environ.get("PATH", "")]))
    assert found, f"{name} is missing: pip install {name}"
    return found


def build(folder: Path, sanitizers: str) -> Path:
    """The extension with these sanitizers, and the optimiser at a level that keeps their reports readable."""
    configure = [
        tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_COMPILER=g++",
        "-DCMAKE_BUILD_TYPE=Sanitize", "-DCMAKE_CXX_FLAGS_SANITIZE=-O1", f"-DCLLM_SANITIZE={sanitizers}",
    ]  # fmt: skip
    for command in (configure, [tool("cmake"), "--build", str(folder), "--target", "_native"]):
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-5000:]}"
    (extension,) = folder.glob("_native*.so")
    return extension


def runtime(name: str) -> str:
    """The path of one of gcc's shared libraries."""
    done = subprocess.run(["g++", f"-print-file-name={name}.so"], text=True, capture_output=True, check=True)
    path = Path(done.stdout.strip())
    assert path.is_absolute(), f"g++ has no {name}"
    return str(path.resolve())


@pytest.mark.parametrize(("library", "sanitizers"), [("libasan", "address,undefined"), ("libtsan", "thread")])
def test_no_sanitizer_reports_anything(library: str, sanitizers: str, request: pytest.FixtureRequest) -> None:
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir(f"native-{library}")
    extension = build(folder, sanitizers)
    environment = os.environ | OPTIONS
    # libstdc++ too, or the runtime finds no function behind the exceptions it watches. Python's own allocator would
    # hide from it where objects end.
    environment |= {"LD_PRELOAD": f"{runtime(library)}:{runtime('libstdc++')}", "PYTHONMALLOC": "malloc"}
    command = [sys.executable, str(EXERCISE), str(extension), *(["--quick"] if library == "libtsan" else [])]
    if library == "libtsan" and (setarch := shutil.which("setarch")):
        # Its shadow memory has fixed addresses, which a randomised layout may have taken.
        command = [setarch, "-R", *command]
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}"
    assert "Sanitizer" not in done.stdout, done.stdout[-8000:]
    assert "runtime error" not in done.stdout, done.stdout[-8000:]
    assert done.stdout.rstrip().endswith("all exercises done"), done.stdout[-8000:]
    print(done.stdout)
