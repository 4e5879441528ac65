"""The cgroups of this process, from its own up to the topmost visible one.

    /proc/self/cgroup      4:memory:/kubepods/pod7/abc      version 1: a path for each controller
                           0::/kubepods/pod7/abc            version 2: one path
    /proc/self/mountinfo   … /kubepods /sys/fs/cgroup/memory … - cgroup cgroup rw,memory
                              │         └ mount point
                              └ the part of the hierarchy that is mounted there

A limit applies to a group and all below it, so the tightest one on the way up counts. Both versions may be mounted at
once, with a controller in either; missing files limit nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Group:
    """One cgroup's directory."""

    directory: Path
    version: int

    def text(self, name: str) -> str | None:
        return read_text(self.directory / name)

    def number(self, name: str) -> int | None:
        return as_number(self.text(name))

    def entries(self, name: str) -> dict[str, int]:
        """A file whose lines are a name and a number, such as memory.stat."""
        found = {}
        for line in (self.text(name) or "").splitlines():
            key, _, value = line.partition(" ")
            if (number := as_number(value)) is not None:
                found[key] = number
        return found


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    top: PurePosixPath
    """The part of the hierarchy that is mounted."""
    point: PurePosixPath


def groups(controller: str, root: Path) -> list[Group]:
    """The groups that may limit `controller`, each before its parent."""
    paths = dict(_paths(controller, root))
    found: dict[Path, Group] = {}
    for mount in _mounts(root):
        if mount.version in paths and (mount.version == 2 or controller in mount.controllers):
            for place in _upwards(paths[mount.version], mount):
                directory = root / place.relative_to("/")
                found.setdefault(directory, Group(directory, mount.version))
    return list(found.values())


def _paths(controller: str, root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """The version and path of this process's group."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if number == "0" and not controllers:
            yield 2, PurePosixPath(path)
        elif controller in controllers.split(","):
            yield 1, PurePosixPath(path)


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2") or fields[4][:1] != "/":
            continue
        version = 2 if kinds[0] == "cgroup2" else 1
        top, point = (PurePosixPath(_plain(field)) for field in fields[3:5])
        yield _Mount(version, frozenset(kinds[2].split(",")), top, point)


def _upwards(path: PurePosixPath, mount: _Mount) -> list[PurePosixPath]:
    """Directories from the group at `path` up to the mount point. A group outside of what is mounted, as in another
    namespace, is limited at least by the mount point."""
    below = path.relative_to(mount.top) if path.is_relative_to(mount.top) else PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    place = mount.point / below
    return [place, *(parent for parent in place.parents if parent.is_relative_to(mount.point))]


def _plain(text: str) -> str:
    """Decode the octal escapes for spaces and backslashes in mountinfo."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def read_text(file: Path) -> str | None:
    """None if the file is missing or not readable."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def as_number(text: str | None) -> int | None:
    """None for anything but a plain number, such as "max", "-1" or nothing."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 25 else None
