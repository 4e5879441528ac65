"""Items in the writer's queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cllm.kv.disk.catalog import ModelEntry


@dataclass(slots=True)
class BlockRun:
    """Consecutive blocks of a chain."""

    model: ModelEntry
    parent: bytes
    first: int
    names: list[bytes]
    blocks: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.blocks))

    def parts(self, most: int) -> Iterator[BlockRun]:
        """This run in parts of at most `most` blocks, but at least one."""
        step = max(1, most)
        for start in range(0, len(self.names), step):
            part = slice(start, start + step)
            parent = self.names[start - 1] if start else self.parent
            yield BlockRun(self.model, parent, self.first + start, self.names[part], self.blocks[part])


@dataclass(slots=True)
class SavedSequence:
    """A whole sequence: the names of its blocks and of its end, and the bytes the backend saved."""

    model: ModelEntry
    names: list[bytes]
    tokens: bytes
    count: int
    payload: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.payload)

    def pieces(self, size: int) -> list[memoryview]:
        return [self.payload[at : at + size] for at in range(0, self.nbytes, size)]


def joined(runs: list[BlockRun]) -> list[BlockRun]:
    """Join runs of a model that follow each other, in whatever order they came."""
    followers = {(run.model.folder, run.parent): run for run in runs}
    lasts = {(run.model.folder, run.names[-1]) for run in runs}
    whole_runs: list[BlockRun] = []
    done: set[int] = set()
    for run in sorted(runs, key=lambda run: (run.model.folder, run.parent) in lasts):
        whole: BlockRun | None = None
        part: BlockRun | None = run
        while part is not None and id(part) not in done:
            done.add(id(part))
            if whole is None:
                whole = BlockRun(part.model, part.parent, part.first, list(part.names), list(part.blocks))
            else:
                whole.names += part.names
                whole.blocks += part.blocks
            part = followers.get((part.model.folder, part.names[-1]))
        if whole is not None:
            whole_runs.append(whole)
    return whole_runs
