"""Install into the environment of the Python that runs this.

    python scripts/install.py                    cLLM, with its native engine
    python scripts/install.py test hf            the requirements of these extras; cLLM must be installed
    python scripts/install.py llama-cpp          llama.cpp compiled for this CPU, instead of the wheel
    python scripts/install.py browser            Chromium for browser tests, with apt

The first and the third compile for a while, and show their progress from the compiler's "[12/193]" lines. Only the
standard library is used, since nothing is installed yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")
LINES_KEPT = 40
LLAMA_CPP = "llama-cpp"
BROWSER = "browser"
BROWSER_PROGRAMS = ("chromium", "chromedriver")
BROWSER_PACKAGES = ("chromium", "chromium-driver")
COMPILERS = ("c++", "g++", "clang++")
# Of each package manager: how it is called, the compiler and the headers of Python.
PACKAGES = (
    ("apt-get", "apt-get install", "g++", "python3-dev"),
    ("dnf", "dnf install", "gcc-c++", "python3-devel"),
    ("zypper", "zypper install", "gcc-c++", "python3-devel"),
    ("pacman", "pacman -S", "gcc", "python"),
    ("apk", "apk add", "g++", "python3-dev"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"extras of pyproject.toml, or {BROWSER}")
    extras: list[str] = parser.parse_args().extras
    return install_extras(extras) if extras else install_package()


def install_package() -> int:
    if problem := missing_for_compiling():
        return fail(problem)
    print("cLLM: installing cLLM; compiling its native engine takes about two minutes on two cores", flush=True)
    # Verbose, because pip hides the compiler's progress otherwise.
    return pip("install", "--verbose", "--editable", str(ROOT), what="compiling and installing cLLM")


def install_extras(extras: list[str]) -> int:
    """Install only their requirements: installing cLLM again would compile its engine again."""
    for extra in extras:
        if extra == BROWSER:
            install_browser()
            continue
        arguments = ["install", "--quiet", "--no-compile"]  # Python compiles what is imported, a fraction of it
        what = f"installing the requirements of {extra}"
        if extra == LLAMA_CPP:
            if importlib.util.find_spec("llama_cpp") is not None:
                continue
            if problem := missing_for_compiling():
                return fail(problem)
            print(
                "cLLM: compiling llama.cpp for this CPU, once; this takes about ten minutes on two cores",
                flush=True,
            )
            arguments, what = ["install", "--verbose"], "compiling llama.cpp"
        if code := pip(*arguments, *requirements(extra), what=what):
            return code
    return 0


def missing_for_compiling() -> str | None:
    """What the system lacks to compile, and how to install it. CMake would say it in fifty lines, after a minute."""
    chosen = os.environ.get("CXX")
    compilers = shlex.split(chosen)[:1] if chosen else COMPILERS
    if not any(map(shutil.which, compilers)):
        if chosen:
            return f"the C++ compiler that the variable CXX names, {chosen}, was not found; unset CXX or correct it"
        return f"no C++ compiler found ({' '.join(COMPILERS)}); install g++{how_to_install(2)}"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"the headers of Python are missing ({headers}/Python.h); install python3-dev{how_to_install(3)}"
    return None


def how_to_install(package: int) -> str:
    for row in PACKAGES:
        if shutil.which(row[0]):
            return f", for example with: {'' if os.geteuid() == 0 else 'sudo '}{row[1]} {row[package]}"
    return ""


def fail(problem: str) -> int:
    print(f"cLLM: {problem}", file=sys.stderr)
    return 1


def requirements(extra: str) -> list[str]:
    """The requirements of an extra of the installed cLLM, in pip's format."""
    declared = [line.partition(";") for line in importlib.metadata.requires("cllm") or []]
    return [
        requirement.strip() for requirement, _, marker in declared if re.search(rf"extra == ['\"]{extra}['\"]", marker)
    ]


def install_browser() -> None:
    """Install Chromium with apt if possible. Without it, only the browser tests are skipped."""
    if all(map(shutil.which, BROWSER_PROGRAMS)):
        return
    if (apt := apt_command()) is None:
        print(f"cLLM: browser tests will be skipped: install {' and '.join(BROWSER_PACKAGES)} to run them")
        return
    quiet = ("--yes", "--quiet", "--no-install-recommends")
    for arguments in (("update", "--quiet"), ("install", *quiet, *BROWSER_PACKAGES)):
        if run([*apt, *arguments], what=f"installing Chromium for tests (apt-get {arguments[0]})"):
            print("cLLM: no Chromium: browser tests will be skipped")
            return


def apt_command() -> list[str] | None:
    """apt-get as root, if this user is root or has passwordless sudo."""
    if shutil.which("apt-get") is None:
        return None
    command = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    if os.geteuid() == 0:
        return command
    sudo = shutil.which("sudo")
    may = sudo is not None and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0
    return ["sudo", "-n", *command] if may else None


def pip(*arguments: str, what: str) -> int:
    return run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], what)


def run(command: list[str], what: str) -> int:
    """Run a program; show its progress on one line, and its last output if it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    kept: deque[str] = deque(maxlen=LINES_KEPT)
    progress = ProgressLine(what)
    for line in process.stdout:
        kept.append(line)
        progress.show(STEP.match(line))
    code = process.wait()
    progress.end(code == 0)
    if code:
        sys.stderr.writelines(kept)
        print(f"cLLM: {what} failed; see the output above", file=sys.stderr)
    return code


class ProgressLine:
    """A progress line: updated in place on a terminal, repeated every half minute elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._shown = 0.0
        self._interactive = sys.stdout.isatty()
        self._interval = 0.5 if self._interactive else 30.0
        print(f"cLLM: {what} ...", end="" if self._interactive else "\n", flush=True)

    def show(self, step: re.Match[str] | None) -> None:
        now = time.monotonic()
        if now - self._shown < self._interval:
            return
        self._shown = now
        seconds = int(now - self._started)
        count = f" file {step[1]} of {step[2]}," if step else ""
        text = f"cLLM: {self._what} ...{count} {seconds // 60}:{seconds % 60:02d}"
        print(f"\r{text}\x1b[K" if self._interactive else text, end="" if self._interactive else "\n", flush=True)

    def end(self, success: bool) -> None:
        seconds = int(time.monotonic() - self._started)
        outcome = "done" if success else "failed"
        text = f"cLLM: {self._what}: {outcome} after {seconds // 60}:{seconds % 60:02d}"
        print(f"\r{text}\x1b[K" if self._interactive else text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
