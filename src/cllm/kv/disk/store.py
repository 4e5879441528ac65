"""The store: one directory, one limit, one thread that writes and one that reads, for all models of a process.

    store = DiskStore(Path("~/.cache/cllm/kv"), limit=2 << 30)
    space = store.space(fingerprint(...), block_tokens=16, block_bytes=368_640, about={"model": "smollm2"})
    root  = space.root(salt)
    names = chain(root, tokens, 16)
    space.put(root, 0, names, blocks)             copied, written when there is time
    space.held(names)                             how many, from the first on, are on disk
    ticket = space.load(names[:n], buffers)       ticket.done, ticket.loaded

What the engine's thread calls here never waits for a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cllm.kv.disk.directory import Directory
from cllm.kv.disk.files import Files
from cllm.kv.disk.helpers import Helpers
from cllm.kv.disk.index import FoundSequence
from cllm.kv.disk.keeper import Keeper, Shelf, space_of
from cllm.kv.disk.names import TOKEN_BYTES, root_name, tail_name
from cllm.kv.disk.reader import Reader, Ticket
from cllm.kv.disk.runs import Run, Saved
from cllm.kv.disk.speed import GUESS_BYTES
from cllm.kv.disk.staging import Staging
from cllm.kv.disk.worker import Worker
from cllm.kv.disk.writer import Writer

Block = NDArray[np.uint8] | memoryview | bytes
HELPERS = 4
"""Threads that read and check, and sum up what is written at full speed. They wait for the disk most of the time."""

LOOK_INTERVAL_S = 2.0
"""How often, at most, the directory is looked at for what others wrote; only while somebody asks."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """One moment of the store as plain numbers."""

    directory: str
    limit: int
    bytes: int
    """Of all models and all processes, when last looked at."""
    segments: int
    blocks: int
    """Of the models of this process."""
    queued_bytes: int
    loading_bytes: int
    written_bytes: int
    read_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    trouble: str | None
    """Why nothing is written now."""
    counts: Mapping[str, int]
    """damaged, torn, misplaced, vanished, foreign: files. unwritten_bytes, evicted_bytes. read_errors, write_errors."""


class DiskStore:
    def __init__(
        self,
        directory: Path,
        *,
        limit: int,
        queue_bytes: int = 64 << 20,
        linger_s: float = 0.25,
        rate: float | None = None,
        threads: bool = True,
        files: Files | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`rate`: most bytes per second to write. Without `threads`, `work` does what they would."""
        root = str(directory)
        self._keeper = Keeper(
            Directory(root, files or Files(), clock_ns=clock_ns, monotonic=monotonic, sleep=sleep),
            limit,
            monotonic=monotonic,
        )
        self._monotonic = monotonic
        self.staging = Staging(queue_bytes)
        self._helpers = Helpers(HELPERS, "cllm-kv-help") if threads else None
        self.writer = Writer(
            self._keeper,
            staging=self.staging,
            helpers=self._helpers,
            queue_bytes=queue_bytes,
            linger_s=linger_s,
            rate=rate,
            monotonic=monotonic,
            sleep=sleep,
        )
        self.reader = Reader(self._keeper, helpers=self._helpers, monotonic=monotonic)
        self._workers = (
            Worker("cllm-kv-write", self.writer.work),
            Worker("cllm-kv-read", self.reader.work),
        )
        self._threads = threads
        self._closed = False
        if threads:
            for worker in self._workers:
                worker.start()

    def space(
        self, fingerprint: bytes, *, block_tokens: int, block_bytes: int, about: Mapping[str, str | int]
    ) -> Space:
        """A model's part. What lies there is read in the background: until `ready`, nothing is found."""
        shelf = Shelf(fingerprint, block_tokens=block_tokens, block_bytes=block_bytes, about=about)
        with self._keeper.lock:
            shelf = self._keeper.shelves.setdefault(shelf.space, shelf)
            if (shelf.fingerprint, shelf.block_bytes) != (fingerprint, block_bytes):
                raise ValueError(f"another model has the fingerprint {space_of(fingerprint)}")
            self.reader.look(shelf)
        self.wake()
        return Space(self, self._keeper, shelf, self._monotonic)

    @property
    def limit(self) -> int:
        return self._keeper.limit

    @property
    def kept_bytes(self) -> int:
        """In the directory, when last looked at."""
        return self._keeper.bytes

    @property
    def closed(self) -> bool:
        return self._closed

    def allow_queue(self, nbytes: int) -> None:
        """So many bytes may wait to be written, if that is more than before."""
        self.writer.queue_bytes = max(self.writer.queue_bytes, nbytes)

    def load_seconds(self, nbytes: int) -> float:
        """How long loading so much would take now, behind all that waits."""
        with self._keeper.lock:
            return self.reader.speed.seconds(nbytes + self.reader.queued_bytes)

    @property
    def read_bytes_per_s(self) -> float:
        return self.reader.speed.bytes_per_s

    @property
    def read_speed_known(self) -> bool:
        """Whether what was read weighs more than the first guess."""
        return self.reader.speed.total >= GUESS_BYTES

    def stats(self) -> DiskStats:
        keeper = self._keeper
        with keeper.lock:
            indexes = [shelf.index for shelf in keeper.shelves.values()]
            return DiskStats(
                directory=keeper.directory.root,
                limit=keeper.limit,
                bytes=keeper.bytes,
                segments=sum(len(index.segments) for index in indexes),
                blocks=sum(map(len, indexes)),
                queued_bytes=self.writer.queued_bytes,
                loading_bytes=self.reader.queued_bytes,
                written_bytes=self.writer.speed.total,
                read_bytes=self.reader.speed.total,
                write_bytes_per_s=self.writer.speed.bytes_per_s,
                read_bytes_per_s=self.reader.speed.bytes_per_s,
                trouble=self.writer.trouble,
                counts=dict(keeper.counts),
            )

    def wake(self, *, to_read: bool = True) -> None:
        """There is something to do; unless it is `to_read`, for who writes alone."""
        if self._threads:
            for worker in self._workers[: 1 + to_read]:
                worker.wake()

    def work(self) -> None:
        """Without threads: do all that is to do."""
        while self.reader.work() == 0.0:
            pass
        with self.writer.flushing():
            while self.writer.work() == 0.0:
                pass

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all that was handed over is written. False: it is not, yet."""
        if not self._threads:
            self.work()
            return True
        with self.writer.flushing():
            self._workers[0].wake()
            return self.writer.wait_empty(timeout)

    def close(self, flush_s: float = 5.0) -> None:
        """Write what is queued, for so long; then stop."""
        if self._closed:
            return
        self._closed = self.writer.closed = True
        if flush_s > 0:
            self.flush(flush_s)
        if self._threads:
            for worker in self._workers:
                worker.stop(1.0)
        self.reader.give_up()
        if self._helpers is not None:
            self._helpers.stop()


class Space:
    """One model's part of a store."""

    def __init__(self, store: DiskStore, keeper: Keeper, shelf: Shelf, monotonic: Callable[[], float]) -> None:
        self.block_bytes = shelf.block_bytes
        self._store = store
        self._keeper = keeper
        self._shelf = shelf
        self._monotonic = monotonic
        self._looked_at = monotonic()

    @property
    def written_bytes(self) -> int:
        """Of this model, by this process; so is what follows."""
        return self._shelf.written_bytes

    @property
    def read_bytes(self) -> int:
        return self._shelf.read_bytes

    def ready(self, timeout: float | None = 0.0) -> bool:
        """Whether it is known what lies on disk."""
        return self._shelf.ready.wait(timeout)

    def root(self, salt: bytes = b"") -> bytes:
        """Where chains begin, for whoever shares the salt."""
        return root_name(self._shelf.fingerprint, salt)

    def held(self, names: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are on disk."""
        with self._keeper.lock:
            held = self._shelf.index.held(names)
        if held < len(names):
            self.look()
        return held

    def look(self) -> None:
        """Somebody else may have written what is missing: find out, if that was not done just now."""
        now = self._monotonic()
        if now - self._looked_at >= LOOK_INTERVAL_S:
            self._looked_at = now
            with self._keeper.lock:
                self._store.reader.look(self._shelf)
            self._store.wake()

    def used(self, name: bytes) -> None:
        """The chain up to this block is in use, though nothing of it was loaded."""
        with self._keeper.lock:
            self._store.reader.note_use(self._shelf, name)
        self._store.wake()

    def put(
        self, parent: bytes, first: int, names: Sequence[bytes], blocks: Sequence[Block], *, urgent: bool = False
    ) -> int:
        """Hand over consecutive blocks that follow `parent`, the first of which is number `first` of its chain.

        They are copied as far as there is room; while answers are generated, unless it is urgent, only into memory that
        has been used for that before. How many, from the first on, are on disk or will be, if nothing fails.
        """
        views = [_view(block, self.block_bytes) for block in blocks]
        taken = self._missing(names, urgent)
        for number, (start, end) in enumerate(taken):
            try:
                copies = self._store.staging.copies(views[start:end])
            except MemoryError:  # they are not written, then
                self._give_up([name for begin, stop in taken[number:] for name in names[begin:stop]])
                break
            before = names[start - 1] if start else parent
            with self._keeper.lock:
                run = Run(self._shelf, before, first + start, list(names[start:end]), copies)
                self._store.writer.add(run)
        with self._keeper.lock:
            index, pending = self._shelf.index, self._shelf.pending
            if not taken and names:
                self._store.reader.note_use(self._shelf, names[-1])
            kept = next((i for i, name in enumerate(names) if name not in pending and name not in index), len(names))
        self._store.wake(to_read=not taken)
        return kept

    def _missing(self, names: Sequence[bytes], urgent: bool) -> list[tuple[int, int]]:
        """The runs of these that are to be written, and that there is room for; they are pending from now on."""
        runs: list[tuple[int, int]] = []
        with self._keeper.lock:
            index, pending = self._shelf.index, self._shelf.pending
            room = self._store.writer.room() // self.block_bytes
            if self._store.writer.pace.gentle and not urgent:
                room = min(room, self._store.staging.ready(self.block_bytes))
            for number, name in enumerate(names):
                if name in index or name in pending:
                    continue
                if room <= 0:
                    break
                room -= 1
                pending.add(name)
                if runs and runs[-1][1] == number:
                    runs[-1] = (runs[-1][0], number + 1)
                else:
                    runs.append((number, number + 1))
            self._store.writer.reserve(self.block_bytes * sum(end - start for start, end in runs))
        return runs

    def _give_up(self, names: list[bytes]) -> None:
        with self._keeper.lock:
            self._shelf.pending.difference_update(names)
            self._store.writer.reserve(-self.block_bytes * len(names))

    def load(
        self, names: Sequence[bytes], buffers: Sequence[Block], tell: Callable[[Ticket], None] | None = None
    ) -> Ticket:
        """Read consecutive blocks into `buffers`, one each; `tell` is called on the reader's thread when it is done."""
        views = [_view(buffer, self.block_bytes) for buffer in buffers]
        ticket = Ticket(self._shelf, len(names), len(names) * self.block_bytes, views, tell)
        ticket.names = list(names)
        return self._ask(ticket)

    def _ask(self, ticket: Ticket) -> Ticket:
        with self._keeper.lock:
            self._store.reader.add(ticket)
        if self._store.closed:
            self._store.reader.give_up()
        self._store.wake()
        return ticket

    # -- whole sequences ---------------------------------------------------------------------------------------

    def room(self) -> int:
        """Bytes that can be handed over now."""
        with self._keeper.lock:
            return self._store.writer.room()

    def put_sequence(self, names: Sequence[bytes], tokens: bytes, payload: NDArray[np.uint8] | bytes) -> bool:
        """Hand over a sequence that a backend saved: the names of its whole blocks, all its tokens, its bytes.

        They are not copied: nobody may change them. False: there is no room now, or it is shorter than a block.
        """
        view = np.frombuffer(payload, np.uint8).data.toreadonly()
        if not names or not len(view):
            return False
        shelf, count = self._shelf, len(tokens) // TOKEN_BYTES
        rest = tokens[len(names) * shelf.block_tokens * TOKEN_BYTES :]
        end = tail_name(names[-1], rest)
        with self._keeper.lock:
            found = shelf.index.find_sequence(names, tokens)
            if end in shelf.pending or (found is not None and found.matched == count):
                return True
            if self._store.writer.room() < len(view):
                return False
            shelf.pending.add(end)
            self._store.writer.reserve(len(view))
            self._store.writer.add(Saved(shelf, [*names, end], tokens, count, view))
        self._store.wake()
        return True

    def find_sequence(self, names: Sequence[bytes], tokens: bytes) -> FoundSequence | None:
        """The saved sequence that has the most tokens in common with a prompt; in whole blocks, or all it has."""
        with self._keeper.lock:
            found = self._shelf.index.find_sequence(names, tokens)
        if found is None or found.matched < len(tokens) // TOKEN_BYTES:
            self.look()
        return found

    def load_sequence(
        self, found: FoundSequence, buffer: NDArray[np.uint8], tell: Callable[[Ticket], None] | None = None
    ) -> Ticket:
        """Read a saved sequence into `buffer`, which has its size; `ticket.complete` says whether it is right."""
        view = _view(buffer, found.nbytes)
        with self._keeper.lock:
            records = found.segment.records
            step = records[0].piece_bytes if records else found.nbytes
        pieces = [view[at : at + step] for at in range(0, found.nbytes, step)]
        ticket = Ticket(self._shelf, len(pieces), found.nbytes, pieces, tell)
        ticket.sequence = found.segment
        return self._ask(ticket)


def _view(block: Block, size: int) -> memoryview:
    view = (block.data if isinstance(block, np.ndarray) else memoryview(block)).cast("B")
    if len(view) != size:
        raise ValueError(f"a block has {len(view)} bytes, not {size}")
    return view
