"""What this process may use of the machine: CPUs, memory and open files, whoever sets the limit.

cpus.py      CPUs: affinity and cpusets, cgroup quota, physical cores; how many threads are started by default
files.py     open files: the limit, raised as far as it is needed
memory.py    memory: what is free, what cgroups, ulimits and the system's commit limit leave
pages.py     whether there are large pages
cgroups.py   where the cgroups of this process are, of both versions

On Linux only the standard library is needed. Functions take the root of the file system, so that tests can build one.
"""

from __future__ import annotations

from cllm.machine.cpus import Cpus, Threads, default_threads, read_cpus
from cllm.machine.memory import Room, mib, read_rooms, tightest, total_memory
from cllm.machine.pages import offers_large_pages

__all__ = [
    "Cpus",
    "Room",
    "Threads",
    "default_threads",
    "mib",
    "offers_large_pages",
    "read_cpus",
    "read_rooms",
    "tightest",
    "total_memory",
]
