"""What waits to be written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cllm.kv.disk.keeper import Shelf


@dataclass(slots=True)
class Run:
    """Consecutive blocks of a chain."""

    shelf: Shelf
    parent: bytes
    first: int
    names: list[bytes]
    blocks: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.blocks))

    def parts(self, most: int) -> Iterator[Run]:
        """The same in runs of at most so many blocks, one at least."""
        step = max(1, most)
        for start in range(0, len(self.names), step):
            part = slice(start, start + step)
            parent = self.names[start - 1] if start else self.parent
            yield Run(self.shelf, parent, self.first + start, self.names[part], self.blocks[part])


@dataclass(slots=True)
class Saved:
    """A whole sequence: the names of its blocks, that of its end, and what the backend made of it."""

    shelf: Shelf
    names: list[bytes]
    tokens: bytes
    count: int
    payload: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.payload)

    def pieces(self, size: int) -> list[memoryview]:
        return [self.payload[at : at + size] for at in range(0, self.nbytes, size)]


def joined(runs: list[Run]) -> list[Run]:
    """Runs that follow each other, in whatever order they came, become one."""
    followers = {run.parent: run for run in runs}
    lasts = {run.names[-1] for run in runs}
    whole_runs: list[Run] = []
    done: set[int] = set()
    for run in sorted(runs, key=lambda run: run.parent in lasts):
        whole: Run | None = None
        part: Run | None = run
        while part is not None and id(part) not in done:
            done.add(id(part))
            if whole is None:
                whole = Run(part.shelf, part.parent, part.first, list(part.names), list(part.blocks))
            else:
                whole.names += part.names
                whole.blocks += part.blocks
            part = followers.get(part.names[-1])
        if whole is not None:
            whole_runs.append(whole)
    return whole_runs
