"""Where llama.cpp is on this machine: in llama-cpp-python, compiled for its processor, or in the wheel xllamacpp."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cllm.machine import cpu_features

KNOWN = "xllamacpp 2026.8.10566 to 2026.10.11549 and llama-cpp-python 0.3.36"
WHEEL = "xllamacpp>=2026.8.10566,<2026.11"
"""The same range as in pyproject.toml."""
_WHEELS_FEATURES = {"avx2", "bmi2", "f16c", "fma"}
"""What xllamacpp's wheels for x86 are compiled for, as `llama_print_system_info` says: without one of these, the
process would end at its first use."""


@dataclass(frozen=True)
class Found:
    package: str
    version: str
    path: Path
    """The shared library that exports llama.cpp's C API."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def installed() -> Iterator[Found]:
    """The best first: a compiled llama-cpp-python was installed on purpose."""
    for package, module, patterns in (
        ("llama-cpp-python", "llama_cpp", ("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll")),
        ("xllamacpp", "xllamacpp", ("xllamacpp*.so", "xllamacpp*.pyd")),
    ):
        for folder in _folders(module):
            for path in (path for pattern in patterns for path in folder.glob(pattern)):
                yield Found(package, _version(package), path)


def missing_features(found: Found) -> list[str]:
    """What the library is compiled for and this processor does not have."""
    features = cpu_features()
    if found.package != "xllamacpp" or platform.machine() != "x86_64" or not features:
        return []
    return sorted(_WHEELS_FEATURES - features)


def _folders(module: str) -> list[Path]:
    """Without importing it: we need its library, and none of its Python."""
    spec = importlib.util.find_spec(module)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
