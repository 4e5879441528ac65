"""What the figures were measured on."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from cllm.machine import cpu_features, cpu_info, default_threads, read_cpus, read_memory_limits, tightest, total_memory

_FEATURES = ("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp")
_PACKAGES = ("cllm", "llama-cpp-python", "xllamacpp", "openvino-genai", "numpy", "uvicorn")


def describe_machine() -> dict[str, Any]:
    """What of it this process may use: in a container, not the host's numbers."""
    cpus, rooms, features = read_cpus(), read_memory_limits(), cpu_features()
    return {
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "physical_cores": min(cpus.cores, cpus.usable),
        "logical_cores": cpus.usable,
        "cpu_limit": cpus.limit(),
        "default_threads": default_threads(cpus).count,
        "cpu_features": [feature for feature in _FEATURES if feature in features],
        "memory_bytes": total_memory(rooms),
        "memory_available_bytes": tightest(rooms).free,
        "memory_limit": tightest(rooms).name,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": _versions(),
    }


def busy_percent(seconds: float = 0.3) -> float:
    """How busy all cores together were over the next `seconds`: near 0 if nothing else runs and no server spins."""
    return psutil.cpu_percent(interval=seconds)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
