"""The memory this process may use. Several limits apply at once; the one that leaves the least counts.

Swap does not count: a cache that is swapped out is slower than no cache.
"""

from __future__ import annotations

import mmap
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cllm.machine.cgroups import Group, as_number, groups, read_text

_ROOT = Path("/")
_MIB = 1024 * 1024
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_UNLIMITED = 1 << 60
"""Without a limit, cgroups v1 report 9223372036854771712 or similar, depending on the page size."""
_STRICT = 2
"""vm.overcommit_memory: the system never commits more memory than it has."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit, and how much of it is left for this process."""

    name: str
    limit: int
    free: int
    hard: bool
    """Beyond it, allocations fail or the system kills the process."""
    counts_mapped: bool = False
    """Whether mapped files count, although the system could drop their pages."""

    def __str__(self) -> str:
        return f"the {mib(self.free)} that {self.name} of {mib(self.limit)} leaves"


def mib(size: float) -> str:
    return f"{size / _MIB:,.0f} MiB"


def read_memory_limits(root: Path = _ROOT) -> list[MemoryLimit]:
    """All limits; at least one."""
    found = [_machine(root), *_commit(root), *_of_process(root)]
    for group in groups("memory", root):
        found += _of_group(group)
    return found


def tightest(limits: Sequence[MemoryLimit]) -> MemoryLimit:
    return min(limits, key=lambda limit: limit.free)


def total_memory(limits: Sequence[MemoryLimit]) -> int:
    """The most memory this process could use if it were alone."""
    return min(limit.limit for limit in limits)


def _machine(root: Path) -> MemoryLimit:
    sizes = _meminfo(root)
    if "MemTotal" in sizes:
        total = sizes["MemTotal"]
        available = sizes.get("MemAvailable", sizes.get("MemFree", 0) + sizes.get("Cached", 0))
    else:
        total, available = _elsewhere()
    return MemoryLimit("the machine's memory", total, min(available, total), hard=False)


def _commit(root: Path) -> Iterator[MemoryLimit]:
    if as_number(read_text(root / "proc/sys/vm/overcommit_memory")) != _STRICT:
        return
    sizes = _meminfo(root)
    if "CommitLimit" in sizes and "Committed_AS" in sizes:
        limit = sizes["CommitLimit"]
        yield MemoryLimit(
            "the system's commit limit (vm.overcommit_memory is 2)",
            limit,
            max(0, limit - sizes["Committed_AS"]),
            hard=True,
        )


def _of_process(root: Path) -> Iterator[MemoryLimit]:
    """ulimits. They count mapped memory, used or not: -v all of it, -d only private memory."""
    pages = [as_number(text) for text in (read_text(root / "proc/self/statm") or "").split()]
    page = resource.getpagesize()
    # In statm: size, resident, shared, text, lib, data.
    for kind, name, field in ((resource.RLIMIT_AS, "ulimit -v", 0), (resource.RLIMIT_DATA, "ulimit -d", 5)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and limit < _UNLIMITED:
            used = (pages[field] if field < len(pages) else None) or 0
            mapped = kind == resource.RLIMIT_AS
            yield MemoryLimit(name, limit, max(0, limit - used * page), hard=True, counts_mapped=mapped)


def _of_group(group: Group) -> Iterator[MemoryLimit]:
    """A cgroup's limits. The page cache does not count as used: the system reclaims it first."""
    stat = group.entries("memory.stat")
    if group.version == 2:
        prefix, current = "", group.number("memory.current")
        limits = [(group.number("memory.max"), True), (group.number("memory.high"), False)]
    else:
        prefix, current = "total_", group.number("memory.usage_in_bytes")
        # The second one includes limits of parent groups that are not visible here.
        limits = [(group.number("memory.limit_in_bytes"), True), (stat.get("hierarchical_memory_limit"), True)]
    cached = sum(stat.get(prefix + name, stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    used = max(0, (current or 0) - cached)
    for limit, hard in limits:
        if limit is not None and limit < _UNLIMITED:
            name = "the container's memory limit" if hard else "the container's memory.high"
            yield MemoryLimit(name, limit, max(0, limit - used), hard)


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name."""
    sizes = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        kilobytes = as_number(value.strip().removesuffix("kB"))
        if kilobytes is not None:
            sizes[name.strip()] = kilobytes * 1024
    return sizes


def _elsewhere() -> tuple[int, int]:
    """Total and available memory on systems without /proc."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def can_reserve(size: int) -> bool:
    """Whether this many bytes of address space are available now (`ulimit -v`). No memory is used.

    Some libraries end the process when an allocation fails, so ask before calling them.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        mmap.mmap(-1, size, flags=flags).close()
    except (OSError, MemoryError):
        return False
    return True


def has_huge_pages(root: Path = _ROOT) -> bool:
    """Whether the system offers huge pages on request. The setting looks like `always [madvise] never`; if it is
    missing, there are none."""
    chosen = re.search(r"\[(\w+)\]", read_text(root / _HUGE_PAGES) or "")
    return chosen is not None and chosen[1] in ("always", "madvise")
