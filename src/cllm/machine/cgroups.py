"""The cgroups of this process, from its own up to the topmost one that can be seen.

    /proc/self/cgroup      4:memory:/kubepods/pod7/abc      version 1: a path for each controller
                           0::/kubepods/pod7/abc            version 2: one path
    /proc/self/mountinfo   … /kubepods /sys/fs/cgroup/memory … - cgroup cgroup rw,memory
                              │         └ where it is mounted
                              └ what of the hierarchy is mounted there

A limit holds for a group and all below it, so what counts is the tightest one on the way up. Both versions may be
mounted at once, with a controller in either; files that are not there limit nothing.
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
        """A file with lines of a name and a number, such as memory.stat."""
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
    """Those that may limit what `controller` governs, each before its parent."""
    paths = dict(_paths(controller, root))
    found: dict[Path, Group] = {}
    for mount in _mounts(root):
        if mount.version in paths and (mount.version == 2 or controller in mount.controllers):
            for place in _upwards(paths[mount.version], mount):
                directory = root / place.relative_to("/")
                found.setdefault(directory, Group(directory, mount.version))
    return list(found.values())


def _paths(controller: str, root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """By version, where this process is in the hierarchy."""
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
    """Directories from the group at `path` to the mount point. A group that lies outside of what is mounted, as one of
    another namespace does, is limited by the mount point at least."""
    below = path.relative_to(mount.top) if path.is_relative_to(mount.top) else PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    place = mount.point / below
    return [place, *(parent for parent in place.parents if parent.is_relative_to(mount.point))]


def _plain(text: str) -> str:
    """Blanks and backslashes stand as octal numbers in mountinfo."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def read_text(file: Path) -> str | None:
    """None where it is not there or not for us."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def as_number(text: str | None) -> int | None:
    """None for whatever is no plain number: "max", "-1", nothing."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 25 else None
