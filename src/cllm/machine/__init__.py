"""What this process may use of the machine: CPUs, memory and open files, whatever sets the limit.

cpus.py           CPUs: affinity and cpusets, cgroup quota, physical cores, features; the default number of threads
memory_limits.py  memory: what is free, and what cgroups, ulimits and the system's commit limit leave
open_files.py     open files: the limit, raised as far as needed
packages.py       the Python environment: how to install what is missing
resident.py       how much memory the process holds, and what it gives back
cgroups.py        the cgroups of this process, versions 1 and 2

On Linux only the standard library is needed, but for resident.py. Functions take the root of the file system, which
tests replace.
"""

from __future__ import annotations

from cllm.machine.cpus import Cpus, Threads, cpu_features, cpu_info, default_threads, read_cpus
from cllm.machine.memory_limits import (
    MemoryLimit,
    can_reserve,
    has_huge_pages,
    mib,
    read_memory_limits,
    tightest,
    total_memory,
)
from cllm.machine.packages import install_extra, install_packages

__all__ = [
    "Cpus",
    "MemoryLimit",
    "Threads",
    "can_reserve",
    "cpu_features",
    "cpu_info",
    "default_threads",
    "has_huge_pages",
    "install_extra",
    "install_packages",
    "mib",
    "read_cpus",
    "read_memory_limits",
    "tightest",
    "total_memory",
]
