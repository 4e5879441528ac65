"""The memory this process may use. Several limits hold at once; each leaves some room, and the smallest counts.

Swap never counts: a cache that is swapped out is slower than none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cllm.machine.cgroups import Group, as_number, groups, read_text

_ROOT = Path("/")
_MIB = 1024 * 1024
_UNLIMITED = 1 << 60
"""Version 1 of cgroups says 9223372036854771712 where there is no limit, depending on the size of pages."""
_STRICT = 2
"""vm.overcommit_memory: the system promises no more than it can keep."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves to this process."""

    name: str
    limit: int
    free: int
    hard: bool
    """What lies beyond it cannot be had: the call fails, or the system ends the process."""
    counts_mapped: bool = False
    """Pages of files that are mapped count, although the system could drop them."""

    def __str__(self) -> str:
        return f"the {mib(self.free)} that {self.name} of {mib(self.limit)} leaves"


def mib(size: float) -> str:
    return f"{size / _MIB:,.0f} MiB"


def read_rooms(root: Path = _ROOT) -> list[Room]:
    """Every limit that there is; at least one."""
    found = [_machine(root), *_commit(root), *_of_process(root)]
    for group in groups("memory", root):
        found += _of_group(group)
    return found


def tightest(rooms: Sequence[Room]) -> Room:
    return min(rooms, key=lambda room: room.free)


def total_memory(rooms: Sequence[Room]) -> int:
    """What this process could have at most, if it were alone."""
    return min(room.limit for room in rooms)


def _machine(root: Path) -> Room:
    sizes = _meminfo(root)
    if "MemTotal" in sizes:
        total = sizes["MemTotal"]
        available = sizes.get("MemAvailable", sizes.get("MemFree", 0) + sizes.get("Cached", 0))
    else:
        total, available = _elsewhere()
    return Room("the machine's memory", total, min(available, total), hard=False)


def _commit(root: Path) -> Iterator[Room]:
    if as_number(read_text(root / "proc/sys/vm/overcommit_memory")) != _STRICT:
        return
    sizes = _meminfo(root)
    if "CommitLimit" in sizes and "Committed_AS" in sizes:
        limit = sizes["CommitLimit"]
        yield Room(
            "the system's commit limit (vm.overcommit_memory is 2)",
            limit,
            max(0, limit - sizes["Committed_AS"]),
            hard=True,
        )


def _of_process(root: Path) -> Iterator[Room]:
    """ulimits. They count what is mapped, touched or not: -v all of it, -d only what is the process's own."""
    try:
        import resource
    except ImportError:  # no such thing on this system
        return
    pages = [as_number(text) for text in (read_text(root / "proc/self/statm") or "").split()]
    page = resource.getpagesize()
    # In statm: size, resident, shared, text, lib, data.
    for kind, name, field in ((resource.RLIMIT_AS, "ulimit -v", 0), (resource.RLIMIT_DATA, "ulimit -d", 5)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and limit < _UNLIMITED:
            used = (pages[field] if field < len(pages) else None) or 0
            mapped = kind == resource.RLIMIT_AS
            yield Room(name, limit, max(0, limit - used * page), hard=True, counts_mapped=mapped)


def _of_group(group: Group) -> Iterator[Room]:
    """What a group's limit leaves. The page cache does not count as used: the system takes it back first."""
    stat = group.entries("memory.stat")
    if group.version == 2:
        prefix, current = "", group.number("memory.current")
        limits = [(group.number("memory.max"), True), (group.number("memory.high"), False)]
    else:
        prefix, current = "total_", group.number("memory.usage_in_bytes")
        # The second one knows of groups above that cannot be seen from here.
        limits = [(group.number("memory.limit_in_bytes"), True), (stat.get("hierarchical_memory_limit"), True)]
    cached = sum(stat.get(prefix + name, stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    used = max(0, (current or 0) - cached)
    for limit, hard in limits:
        if limit is not None and limit < _UNLIMITED:
            name = "the container's memory limit" if hard else "the container's memory.high"
            yield Room(name, limit, max(0, limit - used), hard)


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
    """On systems without /proc: all memory, and what is available of it."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available
