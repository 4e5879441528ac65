"""What waits to be written."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from cllm.kv.disk.keeper import Shelf


class Sums:
    """Checksums of pieces, which others may be computing while something else is written."""

    def __init__(self, *, known: list[int] | None = None) -> None:
        self._known = known
        self._coming: list[Future[list[int]]] = []

    def begin(self, pieces: Sequence[memoryview], helpers: Executor | None) -> None:
        if helpers is None:
            return
        try:
            coming = helpers.submit(_checksums, pieces)
        except RuntimeError:  # the interpreter is about to end, and takes no more work for other threads
            coming = Future()
            coming.set_result(_checksums(pieces))
        self._coming.append(coming)

    def add(self, other: Sums) -> None:
        """What follows this."""
        self._coming += other._coming

    def of(self, pieces: Sequence[memoryview]) -> list[int]:
        """Computed here and now if nobody else does."""
        if self._known is None:
            coming = [one.result() for one in self._coming]
            self._known = [found for one in coming for found in one] if coming else _checksums(pieces)
        return self._known


def _checksums(pieces: Sequence[memoryview]) -> list[int]:
    return list(map(zlib.crc32, pieces))


@dataclass(slots=True)
class Run:
    """Consecutive blocks of a chain."""

    shelf: Shelf
    parent: bytes
    first: int
    names: list[bytes]
    blocks: list[memoryview]
    sums: Sums

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.blocks))

    def parts(self, most: int) -> Iterator[Run]:
        """The same in runs of at most so many blocks, one at least."""
        step = max(1, most)
        for start in range(0, len(self.names), step):
            part = slice(start, start + step)
            parent = self.names[start - 1] if start else self.parent
            sums = self.sums.of(self.blocks)[part]
            yield Run(self.shelf, parent, self.first + start, self.names[part], self.blocks[part], Sums(known=sums))


@dataclass(slots=True)
class Saved:
    """A whole sequence: the names of its blocks, that of its end, and what the backend made of it."""

    shelf: Shelf
    names: list[bytes]
    tokens: bytes
    count: int
    payload: memoryview
    sums: Sums

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
                whole = Run(part.shelf, part.parent, part.first, list(part.names), list(part.blocks), Sums())
                whole.sums.add(part.sums)
            else:
                whole.names += part.names
                whole.blocks += part.blocks
                whole.sums.add(part.sums)
            part = followers.get(part.names[-1])
        if whole is not None:
            whole_runs.append(whole)
    return whole_runs
