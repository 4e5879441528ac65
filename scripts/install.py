"""Install cLLM into the environment of the Python that runs this: the package, llama.cpp, and extras on request.

llama.cpp is compiled for the processor at hand, which takes minutes. This says so before it starts and shows a line of
progress while it runs, from the compiler's own "[12/193]" counts. Only the standard library is used: nothing is
installed yet when this runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")
LINES_KEPT = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="also install this extra of pyproject.toml")
    extras = parser.parse_args().extra
    wanted = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    if code := pip("install", "--quiet", "--editable", wanted, what="installing cLLM and what it needs"):
        return code
    if importlib.util.find_spec("llama_cpp") is not None:
        return 0
    print(
        "cLLM: compiling llama.cpp for this processor. It takes about ten minutes on two cores, once.",
        flush=True,
    )
    return pip("install", "--verbose", "--editable", f"{ROOT}[llama-cpp]", what="compiling llama.cpp")


def pip(*arguments: str, what: str) -> int:
    """Run pip; show progress on one line, and its last output only if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
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
        print(f"cLLM: {what} failed; pip's last lines stand above", file=sys.stderr)
    return code


class ProgressLine:
    """A line that is rewritten on a terminal, and repeated every half minute where it cannot be."""

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
