"""Build, check and time everything on one GPU, in minutes; one table at the end.

    python -m cllm_bench.torch_gpu [--json FILE] [--only kernels,8B] [--peer] [--set scheduler.max_step_tokens=2048]
    python -m cllm_bench.torch_gpu --shape tiny --device cpu        does all of it in a minute, to try the script itself

Every section runs in a process of its own, so that one that fails takes nothing from the others, and all memory of the
GPU is free for the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .figures import table
from .work import Keep, Measures, Place

Section = Callable[[Place, Keep], Coroutine[Any, Any, None]]
SECTIONS = {
    "kernels": "kernels.kernels",
    "attention": "bandwidth.attention",
    "8B": "speed.speed_8b",
    "1B": "speed.speed_1b",
    "fp8": "speed.speed_fp8",
    "structured": "structured.structured",
    "http": "over_http.http",
    "invariance": "invariance.invariance",
    "host": "host.host",
    "peer": "peer.peer",
}
NEEDS_GPU = ("fp8",)
OPTIONAL = ("peer",)
LIMIT_S = 240


def main() -> int:
    args = _arguments()
    if args.section is not None:
        return run_section(args)
    chosen = args.only.split(",") if args.only else [name for name in SECTIONS if name not in OPTIONAL or args.peer]
    if unknown := set(chosen) - SECTIONS.keys():
        sys.exit(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if args.device == "cpu":
        chosen = [name for name in chosen if name not in NEEDS_GPU]
    report = Report(args)
    with tempfile.TemporaryDirectory(prefix="cllm-torch-gpu-") as directory:
        _write_models(Path(directory), tiny=args.shape == "tiny")
        for name in chosen:
            report.add(name, *_start_section(name, args, Path(directory)))
    print(report.rendered())
    return 0 if report.fine else 1


class Report:
    """What was found so far. It is written after every section: whoever breaks off later has the rest."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._file: Path | None = args.json
        self._judged = args.shape == "real"
        self._facts = {"machine": _machine(args.device), "shape": args.shape, "settings": args.set}
        self._found: dict[str, Measures] = {}
        self._errors: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    def add(self, name: str, measures: dict[str, Measures], error: str | None, seconds: float) -> None:
        self._found |= measures
        self._seconds[name] = seconds
        print(f"{name}: {'done' if error is None else 'FAILED'} after {seconds:.0f} s", flush=True)
        if error is not None:
            self._errors[name] = error
            print(error, flush=True)
        if self._file is not None:
            rows, _ = self._table()
            sides = {"seconds": self._seconds, "measures": self._found, "table": rows, "errors": self._errors}
            self._file.write_text(json.dumps(self._facts | sides, indent=1) + "\n")

    @property
    def fine(self) -> bool:
        return self._table()[1] and not self._errors

    def rendered(self) -> str:
        return _rendered([["work", "comparison", "must reach", "came", "ok"], *self._table()[0]])

    def _table(self) -> tuple[list[list[str]], bool]:
        return table(self._found, judged=self._judged)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cllm_bench.torch_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measures there")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--peer", action="store_true", help="also measure Hugging Face transformers here")
    parser.add_argument("--shape", choices=("real", "tiny"), default="real", help="tiny: to try the script")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1 or cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _write_models(directory: Path, *, tiny: bool) -> None:
    from .models import write_directory

    for shape in ("tiny",) if tiny else ("8B", "1B"):
        write_directory(directory / shape, shape)


def _start_section(
    name: str, args: argparse.Namespace, directory: Path
) -> tuple[dict[str, Measures], str | None, float]:
    """What it measured, also if it failed afterwards, why it failed, and how long it took."""
    started = time.perf_counter()
    result = directory / f"{name}.jsonl"
    command = [sys.executable, "-m", __package__, "--section", name, "--directory", str(directory)]
    command += ["--shape", args.shape, "--device", args.device, "--json", str(result)]
    command += [part for setting in args.set for part in ("--set", setting)]
    error: str | None = None
    try:
        done = subprocess.run(command, timeout=LIMIT_S, stderr=subprocess.PIPE, text=True, errors="replace")
        if done.returncode:
            error = "\n".join(done.stderr.strip().splitlines()[-12:]) or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        error = f"it took more than {LIMIT_S} s"
    lines = result.read_text().splitlines() if result.exists() else []
    return dict(json.loads(line) for line in lines), error, time.perf_counter() - started


def run_section(args: argparse.Namespace) -> int:
    """In the section's own process: one line of JSON for each measure."""
    place = Place(args.device, args.directory, args.shape == "tiny", dict(_setting(each) for each in args.set))
    module, _, function = SECTIONS[args.section].rpartition(".")
    with args.json.open("w") as file:

        def keep(name: str, measures: Measures) -> None:
            file.write(json.dumps([name, measures]) + "\n")
            file.flush()
            plain = {key: value for key, value in measures.items() if not isinstance(value, dict)}
            print(f"  {name}: {json.dumps(plain)}", flush=True)

        try:
            section: Section = getattr(import_module(f".{module}", __package__), function)
            if args.section != "http":  # its server is a process of its own
                from .models import use_random_weights

                use_random_weights(args.device)
            asyncio.run(section(place, keep))
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _machine(device: str) -> dict[str, Any]:
    """The GPU is asked by a process that ends: whoever has used one keeps some of its memory."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": version("torch"), "cpus": os.cpu_count()}
    if device != "cpu":
        ask = f"import torch; print(torch.cuda.get_device_name({device!r}))"
        found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
        facts["gpu"] = found.stdout.strip() or found.stderr.strip().splitlines()[-1]
    return facts


def _rendered(rows: list[list[str]]) -> str:
    """As Markdown, which can be pasted."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
