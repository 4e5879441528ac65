"""The CPUs this process may use, and the default number of compute threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cllm.machine.cgroups import as_number, groups, read_text

_ROOT = Path("/")
_TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology"

FEW = 4
"""Up to this many CPUs, all of them compute: leaving one free would cost more than the server's own threads need."""
MANY = 12
"""From this many CPUs on, two are left free: of 16, 14 threads compute as fast as 15, and answers reach clients sooner
(`docs/benchmarks.md`)."""


@dataclass(frozen=True, slots=True)
class Cpus:
    machine: int
    """CPUs of the machine, counting hyperthreads."""
    allowed: int
    """CPUs that affinity and cpusets allow this process."""
    cores: int
    """Physical cores of the allowed CPUs."""
    quota: float | None = None
    """CPU time that cgroups grant, in CPUs, if it is limited."""

    @property
    def usable(self) -> int:
        """Whole CPUs. A quota of 1.5 counts as one: two threads would use it up early and both be stopped."""
        if self.quota is None:
            return self.allowed
        return max(1, min(self.allowed, math.floor(self.quota + 1e-6)))

    def limit(self) -> str:
        """What limits this process to fewer CPUs than the machine has; empty if nothing does."""
        if self.quota is not None and self.quota < self.allowed:
            return f"cgroup quota of {_counted(self.quota)}; the machine has {self.machine}"
        if self.allowed < self.machine:
            return f"CPU affinity of {_counted(self.allowed)}; the machine has {self.machine}"
        return ""


@dataclass(frozen=True, slots=True)
class Threads:
    count: int
    reason: str


def read_cpus(root: Path = _ROOT, affinity: Iterable[int] | None = None, machine: int | None = None) -> Cpus:
    allowed = set(_affinity() if affinity is None else affinity)
    count = machine or os.cpu_count() or 1
    return Cpus(max(count, len(allowed)), len(allowed), _physical(allowed, root), _quota(root))


def default_threads(cpus: Cpus) -> Threads:
    """The number of compute threads if `backend.threads` is not set.

    - With few CPUs, all of them.
    - Otherwise some are left free for the event loop, the engine's own thread and the rest of the system: compute
      threads wait for each other, so anything that takes one CPU's time slows down all of them.
    - A physical core is no faster with two threads, so hyperthreads do not count; they are left free, too.
    """
    usable = cpus.usable
    left = 0 if usable <= FEW else 1 if usable < MANY else 2
    count = usable - left
    parts = [cpus.limit()] if cpus.limit() else []
    if usable > FEW and cpus.cores < count:
        count = cpus.cores
        parts.append(f"one for each physical core of {_counted(cpus.allowed)}")
    elif left:
        parts.append(f"{left} of {_counted(usable)} left free for the server's own threads")
    return Threads(count, "; ".join(parts) or f"one for each of {_counted(usable)}")


def cpu_info(key: str, root: Path = _ROOT) -> str:
    """The first processor's value in /proc/cpuinfo; empty where there is none."""
    lines = (read_text(root / "proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def cpu_features(root: Path = _ROOT) -> frozenset[str]:
    """By Linux's names, such as avx2; empty where they are unknown."""
    return frozenset((cpu_info("flags", root) or cpu_info("Features", root)).split())


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))  # systems without affinity


def _quota(root: Path) -> float | None:
    quotas = []
    for group in groups("cpu", root):
        if group.version == 2:
            quota, _, period = (group.text("cpu.max") or "").strip().partition(" ")
        else:
            quota, period = group.text("cpu.cfs_quota_us") or "", group.text("cpu.cfs_period_us") or ""
        time, span = as_number(quota), as_number(period)
        if time and span:
            quotas.append(time / span)
    return min(quotas, default=None)


def _physical(allowed: set[int], root: Path) -> int:
    """A CPU with unknown siblings counts as a core."""
    cores = set()
    for cpu in allowed:
        topology = root / _TOPOLOGY.format(cpu)
        siblings = read_text(topology / "thread_siblings_list") or read_text(topology / "core_cpus_list")
        cores.add((siblings or "").strip() or f"cpu{cpu}")
    return max(1, len(cores))


def _counted(number: float) -> str:
    return f"{number:g} CPU" if number == 1 else f"{number:g} CPUs"
