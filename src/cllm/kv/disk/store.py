"""The store: one directory with one size limit, a writer and a reader thread, for all models of a process.

    store = DiskStore(Path("~/.cache/cllm/kv"), limit=2 << 30)
    model = store.open_model(fingerprint(...), block_tokens=16, block_bytes=368_640, about={"model": "smollm2"})
    root  = root_name(space)
    names = chain(root, tokens, 16)
    model.put(root, 0, names, blocks)             copied, written when there is time
    model.held(names)                             how many, from the first on, are on disk
    ticket = model.load(names[:n], buffers)       ticket.done, ticket.loaded

Nothing that the engine's thread calls here waits for a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.kv.block_names import TOKEN_BYTES, tail_name
from cllm.kv.disk.catalog import Catalog, ModelEntry, folder_of
from cllm.kv.disk.directory import Directory
from cllm.kv.disk.files import Files
from cllm.kv.disk.index import FoundSequence
from cllm.kv.disk.pending_writes import BlockRun, SavedSequence
from cllm.kv.disk.reader import Reader, ReadTicket
from cllm.kv.disk.staging import Staging
from cllm.kv.disk.threads import DaemonPool, PoolThread
from cllm.kv.disk.writer import Writer

Block = NDArray[np.uint8] | memoryview | bytes
POOL_THREADS = 4
"""Threads that read and verify, and checksum what is written at full speed. They mostly wait for the disk."""

LOOK_INTERVAL_S = 2.0
"""How often, at most, the directory is listed for what other processes wrote; only on a miss."""


class DiskStore:
    def __init__(
        self,
        directory: Path,
        *,
        limit: int,
        queue_bytes: int = 64 << 20,
        linger_s: float = 0.25,
        threads: bool = True,
        files: Files | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Without `threads` (tests), `work` does what they would."""
        root = str(directory)
        self._catalog = Catalog(
            Directory(root, files or Files(), clock_ns=clock_ns, monotonic=monotonic, sleep=sleep),
            limit,
            monotonic=monotonic,
        )
        self._monotonic = monotonic
        self.staging = Staging(queue_bytes)
        self._pool = DaemonPool(POOL_THREADS, "cllm-kv-help") if threads else None
        self.writer = Writer(
            self._catalog,
            staging=self.staging,
            pool=self._pool,
            queue_bytes=queue_bytes,
            linger_s=linger_s,
            monotonic=monotonic,
            sleep=sleep,
        )
        self.reader = Reader(self._catalog, pool=self._pool, monotonic=monotonic)
        self._workers = (
            PoolThread("cllm-kv-write", self.writer.work),
            PoolThread("cllm-kv-read", self.reader.work),
        )
        self._threads = threads
        self.closed = False
        if threads:
            for worker in self._workers:
                worker.start()

    def open_model(
        self, fingerprint: bytes, *, block_tokens: int, block_bytes: int, about: Mapping[str, str | int]
    ) -> ModelStore:
        """A model's part of the store. The directory is read in the background: nothing is found before `ready`."""
        model = ModelEntry(fingerprint, block_tokens=block_tokens, block_bytes=block_bytes, about=about)
        with self._catalog.lock:
            model = self._catalog.models.setdefault(model.folder, model)
            if (model.fingerprint, model.block_bytes) != (fingerprint, block_bytes):
                raise ValueError(f"another model has the fingerprint {folder_of(fingerprint)}")
            self.reader.look(model)
        self.wake()
        return ModelStore(self, self._catalog, model, self._monotonic)

    @property
    def limit(self) -> int:
        return self._catalog.limit

    @property
    def kept_bytes(self) -> int:
        """Size of the directory at the last survey."""
        return self._catalog.bytes

    def allow_queue(self, nbytes: int) -> None:
        """Raise the limit of the write queue to `nbytes`, if that is more."""
        self.writer.queue_bytes = max(self.writer.queue_bytes, nbytes)

    def load_seconds(self, nbytes: int) -> float:
        """How long loading `nbytes` would take now, behind everything queued."""
        with self._catalog.lock:
            return self.reader.speed.seconds(nbytes + self.reader.queued_bytes)

    def details(self) -> dict[str, Any]:
        """The store in numbers, as `GET /kv` shows them; `blocks` are those of this process's models. `trouble`: why
        nothing is written now. `counts` has files (damaged, torn, misplaced, vanished, outdated, foreign), bytes
        (unwritten_bytes, evicted_bytes) and failed calls (read_errors, write_errors)."""
        catalog = self._catalog
        with catalog.lock:
            return {
                "directory": catalog.directory.root,
                "limit_bytes": catalog.limit,
                "bytes": catalog.bytes,
                "blocks": sum(len(model.index) for model in catalog.models.values()),
                "write_bytes_per_s": round(self.writer.speed.bytes_per_s),
                "read_bytes_per_s": round(self.reader.speed.bytes_per_s),
                "trouble": self.writer.trouble,
                "counts": dict(catalog.counts),
            }

    def wake(self, *, to_read: bool = True) -> None:
        """There is something to do: wake the writer, and, if it is `to_read`, the reader."""
        if self._threads:
            for worker in self._workers[: 1 + to_read]:
                worker.wake()

    def work(self) -> None:
        """Without threads: do all pending work."""
        while self.reader.work() == 0.0:
            pass
        with self.writer.flushing():
            while self.writer.work() == 0.0:
                pass

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until the queue is written. False: it is not, yet."""
        if not self._threads:
            self.work()
            return True
        with self.writer.flushing():
            self._workers[0].wake()
            return self.writer.wait_empty(timeout)

    def close(self, flush_s: float = 5.0) -> None:
        """Write what is queued, for at most `flush_s`, then stop."""
        if self.closed:
            return
        self.closed = self.writer.closed = True
        if flush_s > 0:
            self.flush(flush_s)
        if self._threads:
            for worker in self._workers:
                worker.stop(1.0)
        self.reader.give_up()
        if self._pool is not None:
            self._pool.stop()


class ModelStore:
    """One model's part of a store."""

    def __init__(self, store: DiskStore, catalog: Catalog, model: ModelEntry, monotonic: Callable[[], float]) -> None:
        self.block_bytes = model.block_bytes
        self._store = store
        self._catalog = catalog
        self._model = model
        self._monotonic = monotonic
        self._looked_at = monotonic()

    @property
    def written_bytes(self) -> int:
        """Bytes that this process has written for this model; likewise `read_bytes`."""
        return self._model.written_bytes

    @property
    def read_bytes(self) -> int:
        return self._model.read_bytes

    def ready(self, timeout: float | None = 0.0) -> bool:
        """Whether the directory has been read."""
        return self._model.ready.is_set() or self._model.ready.wait(timeout)

    def held(self, names: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are on disk."""
        with self._catalog.lock:
            held = self._model.index.held(names)
        if held < len(names):
            self.look()
        return held

    def look(self) -> None:
        """Another process may have written what is missing: list the directory, unless that was done just now."""
        now = self._monotonic()
        if now - self._looked_at >= LOOK_INTERVAL_S:
            self._looked_at = now
            with self._catalog.lock:
                self._store.reader.look(self._model)
            self._store.wake()

    def used(self, name: bytes) -> None:
        """The chain up to this block is in use, though none of it was loaded."""
        with self._catalog.lock:
            self._store.reader.note_use(self._model, name)
        self._store.wake()

    def put(
        self, parent: bytes, first: int, names: Sequence[bytes], blocks: Sequence[Block], *, urgent: bool = False
    ) -> int:
        """Queue consecutive blocks that follow `parent`; the first is number `first` of its chain.

        They are copied as far as there is room; while sequences run, only into buffers that are ready, unless it is
        `urgent`. Returns how many, from the first on, are on disk or will be, if nothing fails.
        """
        views = [_view(block, self.block_bytes) for block in blocks]
        taken = self._missing(names, urgent)
        for number, (start, end) in enumerate(taken):
            try:
                copies = self._store.staging.copies(views[start:end])
            except MemoryError:  # do not write them
                self._give_up([name for begin, stop in taken[number:] for name in names[begin:stop]])
                break
            before = names[start - 1] if start else parent
            with self._catalog.lock:
                run = BlockRun(self._model, before, first + start, list(names[start:end]), copies)
                self._store.writer.add(run)
        with self._catalog.lock:
            index, pending = self._model.index, self._model.pending
            if not taken and names:
                self._store.reader.note_use(self._model, names[-1])
            kept = next((i for i, name in enumerate(names) if name not in pending and name not in index), len(names))
        self._store.wake(to_read=not taken)
        return kept

    def _missing(self, names: Sequence[bytes], urgent: bool) -> list[tuple[int, int]]:
        """The runs of these blocks to write, as far as there is room; they are pending from now on."""
        runs: list[tuple[int, int]] = []
        with self._catalog.lock:
            index, pending = self._model.index, self._model.pending
            room = self._store.writer.room() // self.block_bytes
            if self._store.writer.throttle.active and not urgent:
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
        with self._catalog.lock:
            self._model.pending.difference_update(names)
            self._store.writer.reserve(-self.block_bytes * len(names))

    def load(
        self, names: Sequence[bytes], buffers: Sequence[Block], tell: Callable[[ReadTicket], None] | None = None
    ) -> ReadTicket:
        """Read consecutive blocks into `buffers`, one each; `tell` is called on the reader's thread at the end."""
        views = [_view(buffer, self.block_bytes) for buffer in buffers]
        ticket = ReadTicket(self._model, len(names), len(names) * self.block_bytes, views, tell)
        ticket.names = list(names)
        return self._ask(ticket)

    def _ask(self, ticket: ReadTicket) -> ReadTicket:
        with self._catalog.lock:
            self._store.reader.add(ticket)
        if self._store.closed:
            self._store.reader.give_up()
        self._store.wake()
        return ticket

    # -- whole sequences ---------------------------------------------------------------------------------------

    def room(self) -> int:
        """Bytes that can be queued now."""
        with self._catalog.lock:
            return self._store.writer.room()

    def put_sequence(self, names: Sequence[bytes], tokens: bytes, payload: NDArray[np.uint8] | bytes) -> bool:
        """Queue a sequence that a backend saved: the names of its whole blocks, all its tokens, its bytes.

        The bytes are not copied and must not change. False: there is no room now, or it is shorter than a block.
        """
        view = np.frombuffer(payload, np.uint8).data.toreadonly()
        if not names or not len(view):
            return False
        model, count = self._model, len(tokens) // TOKEN_BYTES
        rest = tokens[len(names) * model.block_tokens * TOKEN_BYTES :]
        end = tail_name(names[-1], rest)
        with self._catalog.lock:
            found = model.index.find_sequence(names, tokens)
            if end in model.pending or (found is not None and found.matched == count):
                return True
            if self._store.writer.room() < len(view):
                return False
            model.pending.add(end)
            self._store.writer.reserve(len(view))
            self._store.writer.add(SavedSequence(model, [*names, end], tokens, count, view))
        self._store.wake()
        return True

    def find_sequence(self, names: Sequence[bytes], tokens: bytes) -> FoundSequence | None:
        """The saved sequence with the longest common prefix with a prompt: whole blocks, or all of it."""
        with self._catalog.lock:
            found = self._model.index.find_sequence(names, tokens)
        if found is None or found.matched < len(tokens) // TOKEN_BYTES:
            self.look()
        return found

    def load_sequence(
        self, found: FoundSequence, buffer: NDArray[np.uint8], tell: Callable[[ReadTicket], None] | None = None
    ) -> ReadTicket:
        """Read a saved sequence into `buffer`, which has its size; `ticket.complete`: it is intact."""
        view = _view(buffer, found.nbytes)
        with self._catalog.lock:
            records = found.segment.records
            step = records[0].piece_bytes if records else found.nbytes
        pieces = [view[at : at + step] for at in range(0, found.nbytes, step)]
        ticket = ReadTicket(self._model, len(pieces), found.nbytes, pieces, tell)
        ticket.sequence = found.segment
        return self._ask(ticket)


def _view(block: Block, size: int) -> memoryview:
    view = (block.data if isinstance(block, np.ndarray) else memoryview(block)).cast("B")
    if len(view) != size:
        raise ValueError(f"a block has {len(view)} bytes, not {size}")
    return view
