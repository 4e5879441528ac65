"""Writes queued blocks in the background: in large appends, in order, within the limit.

    put (copied, bounded) --> wait a moment for more --> join runs of one chain --> make room below the limit
        --> set the file's new length --> payload --> fdatasync --> header: from here on it counts

A process that dies on the way leaves a file that does not end with a record. Nobody uses that part, and the next
process to find it cuts it off. `fdatasync` comes before the header, so that a header never outlives its payload in a
power cut, and at most one record waits in the page cache.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from cllm.kv.disk.catalog import Catalog, ModelEntry, folder_of
from cllm.kv.disk.directory import BusyError
from cllm.kv.disk.files import write_all
from cllm.kv.disk.format import (
    PAGE,
    SEQUENCE_PIECE,
    SUFFIX,
    Record,
    SegmentHeader,
    SegmentKind,
    most_names,
    record_bytes,
    whole_pages,
)
from cllm.kv.disk.payload_writer import PayloadWriter
from cllm.kv.disk.pending_writes import BlockRun, SavedSequence, joined
from cllm.kv.disk.segment import Segment
from cllm.kv.disk.staging import AHEAD_BYTES, Staging
from cllm.kv.disk.threads import DaemonPool
from cllm.kv.disk.throttle import Throttle
from cllm.kv.throughput import Throughput

log = logging.getLogger("cllm.kv.disk")

RECORD_BYTES = 32 << 20
"""Most bytes per append; at most an eighth of the limit, unless that is very small."""

SMALL_RECORD_BYTES = 64 << 10

SEGMENT_BYTES = 256 << 20
"""The longest segment; at most a quarter of the limit."""

KEEP_COPIES_S = 5.0
"""How long buffers are kept when there is nothing to write."""


THROTTLED_LINGER_S = 5.0
"""How long the writer waits for more while sequences run: every record has a fixed cost."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""Pause after a write error; doubled with every further one."""


class Writer:
    def __init__(
        self,
        catalog: Catalog,
        *,
        staging: Staging,
        pool: DaemonPool | None,
        queue_bytes: int,
        linger_s: float,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.speed = Throughput()
        self.queued_bytes = 0
        self.closed = False
        """Nothing more is accepted."""
        self.throttle = Throttle(sleep=sleep)
        self._payload_writer = PayloadWriter(catalog.files, self.throttle, pool)
        self.trouble: str | None = None
        """Why nothing is written now."""
        self._catalog = catalog
        self._files = catalog.files
        self._staging = staging
        self.queue_bytes = queue_bytes
        self._linger_s = linger_s
        self._monotonic = monotonic
        self._items: deque[BlockRun | SavedSequence] = deque()
        self._arrived = threading.Condition(catalog.lock)
        self._oldest: float = 0.0
        self._busy = False
        self._idle_since = 0.0
        self._flushes = 0
        """How many callers wait for the queue to be written."""
        self._pause_s = FIRST_PAUSE_S
        self._paused_until: float | None = None
        limit = catalog.limit
        self._record_bytes = min(RECORD_BYTES, max(limit // 8, min(limit // 2, SMALL_RECORD_BYTES)))
        self._segment_bytes = min(SEGMENT_BYTES, max(limit // 4, 2 * self._record_bytes))

    # -- handing over (the engine's thread; the catalog's lock is held) -----------------------------------------

    def room(self) -> int:
        """Bytes that can be queued now."""
        if self.closed or not self._may_write():
            return 0
        return self.queue_bytes - self.queued_bytes

    def reserve(self, nbytes: int) -> None:
        """`nbytes` will be added."""
        self.queued_bytes += nbytes

    def add(self, item: BlockRun | SavedSequence) -> None:
        if not self._items:
            self._oldest = self._monotonic()
        self._items.append(item)

    # -- the thread --------------------------------------------------------------------------------------------

    def work(self) -> float | None:
        """Write a batch if one is due. 0: there may be more; otherwise how long to wait."""
        if self._prepare():
            return 0.0
        with self._catalog.lock:
            if not self._items:
                return self._rest()
            linger, enough = self._linger_s, min(self._record_bytes, self.queue_bytes // 2)
            if self.throttle.active:
                linger, enough = max(linger, THROTTLED_LINGER_S), min(enough, AHEAD_BYTES // 2)
            wait = self._oldest + linger - self._monotonic()
            if wait > 0 and not self._flushes and self.queued_bytes < enough:
                return min(wait, self._linger_s) or wait
            items, self._items = list(self._items), deque()
            self._busy = True
        self.throttle.begin()
        try:
            lost: set[tuple[str, bytes]] = set()
            for item in self._in_order(items):
                self._write_or_give_up(item, lost)
        finally:
            with self._catalog.lock:
                self._busy = False
                self._idle_since = self._monotonic()
                self._arrived.notify_all()
        return 0.0

    def _prepare(self) -> bool:
        """Allocate buffers, which the engine's thread has no time for."""
        self.throttle.begin()
        prepared = self._staging.prepare(self.queued_bytes)
        if prepared:
            self._idle_since = self._monotonic()
            self.throttle.rest()
        return bool(prepared)

    def _rest(self) -> float | None:
        """Nothing to write: free the buffers after a while."""
        if not self._staging.kept:
            return None
        wait = self._idle_since + KEEP_COPIES_S - self._monotonic()
        if wait > 0:
            return wait
        self._staging.clear()
        self._payload_writer.forget()
        return None

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Write everything now, without waiting for more."""
        self._count_flushes(1)
        try:
            yield
        finally:
            self._count_flushes(-1)

    def _count_flushes(self, more: int) -> None:
        with self._catalog.lock:
            self._flushes += more
            self.throttle.suspended = self._flushes > 0

    def wait_empty(self, timeout: float) -> bool:
        """Wait until the queue is written or given up."""
        with self._catalog.lock:
            return self._arrived.wait_for(lambda: not (self._items or self._busy), timeout)

    def _in_order(self, items: list[BlockRun | SavedSequence]) -> Iterator[BlockRun | SavedSequence]:
        """Joined chains, in parts that become one record each."""
        for run in joined([item for item in items if isinstance(item, BlockRun)]):
            yield from run.parts(most_names(run.model.block_bytes, self._record_bytes))
        yield from (item for item in items if isinstance(item, SavedSequence))

    def _write_or_give_up(self, item: BlockRun | SavedSequence, lost: set[tuple[str, bytes]]) -> None:
        """Afterwards it is out of the queue, whatever happens. What follows a `lost` block is not written."""
        written = False
        try:
            if isinstance(item, SavedSequence):
                written = self._may_write() and self._write_sequence(item)
            else:
                follows_lost = (item.model.folder, item.parent) in lost
                written = self._may_write() and not follows_lost and self._append(item)
        except BusyError as error:
            log.debug("%s", error)
        except OSError as error:
            self._back_off(error)
        except Exception:
            log.exception("writing K/V failed")
        finally:
            with self._catalog.lock:
                self.queued_bytes -= item.nbytes
                self._catalog.counts["unwritten_bytes"] += 0 if written else item.nbytes
                if isinstance(item, BlockRun):
                    if not written:
                        lost.add((item.model.folder, item.names[-1]))
                    item.model.pending.difference_update(item.names)
                    self._staging.give_back(item.blocks)
                else:
                    item.model.pending.discard(item.names[-1])

    def _may_write(self) -> bool:
        return self._paused_until is None or self._monotonic() >= self._paused_until

    def _back_off(self, error: OSError) -> None:
        self._catalog.count("write_errors")
        reason = error.strerror or str(error)
        if self.trouble is None:
            log.warning(
                "cannot write K/V to %s (%s): keeping it in memory only; trying again in %.0f s",
                self._catalog.directory.root, reason, self._pause_s,
            )  # fmt: skip
        self.trouble = reason
        self._paused_until = self._monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _recovered(self) -> None:
        if self.trouble is not None:
            log.info("writing K/V to %s again", self._catalog.directory.root)
        self.trouble, self._paused_until, self._pause_s = None, None, FIRST_PAUSE_S

    # -- records -----------------------------------------------------------------------------------------------

    def _append(self, run: BlockRun) -> bool:
        """Append blocks after their parent, or write them to a new file. False: there is no room."""
        catalog, model = self._catalog, run.model
        size = record_bytes(len(run.names), len(run.names), run.nbytes)
        with catalog.lock:
            tip = model.index.tip(run.parent)
            protected = {use.segment.path: use.blocks for use in model.index.path(run.parent)}
        if tip is not None and tip.size + size > self._segment_bytes:
            tip = None
        with ExitStack() as stack:
            with catalog.directory.locked() as tally:
                if not catalog.make_room(size + PAGE, protected, tally):
                    return False
                segment, file = self._reserve_behind(model, tip, size, stack) if tip is not None else (None, -1)
                if segment is None:
                    header = self._header(model, SegmentKind.BLOCKS, run.parent, run.first)
                    segment, file = self._reserve_new(header, size, stack)
            record = Record(
                segment.header.id, segment.size, model.block_bytes, run.nbytes, 0, tuple(run.names), array("I")
            )
            linked = self._fill(file, record, run.blocks, size)
        with catalog.lock:
            catalog.writing = None
            if linked:
                first = segment.count
                segment.size += size
                model.written_bytes += size
                segment.add(record)
                segment.use(segment.count, catalog.directory.stamps(1))
                model.index.add(segment, first)
        catalog.touch(model, run.names[-1])
        return True

    def _write_sequence(self, saved: SavedSequence) -> bool:
        """Write it to a new file. False: there is no room."""
        catalog, model = self._catalog, saved.model
        pieces = saved.pieces(SEQUENCE_PIECE)
        size = record_bytes(len(saved.names), len(pieces), saved.nbytes)
        header = self._header(model, SegmentKind.SEQUENCE, bytes(len(saved.names[0])), 0)
        with ExitStack() as stack:
            with catalog.directory.locked() as tally:
                if not catalog.make_room(size + PAGE, {}, tally):
                    return False
                segment, file = self._reserve_new(header, size, stack)
            record = Record(header.id, PAGE, SEQUENCE_PIECE, saved.nbytes, saved.count, tuple(saved.names), array("I"))
            linked = self._fill(file, record, pieces, size)
        with catalog.lock:
            catalog.writing = None
            covered = model.index.covered(saved.names[:-1], saved.tokens)
            if linked:
                segment.size += size
                model.written_bytes += size
                segment.add(record)
                model.index.add(segment)
        catalog.touch_sequence(segment)
        for other in covered:
            catalog.supersede(model, other)
        return True

    def _header(self, model: ModelEntry, kind: SegmentKind, parent: bytes, first: int) -> SegmentHeader:
        block_bytes = model.block_bytes if kind is SegmentKind.BLOCKS else 0
        return SegmentHeader(
            model.fingerprint, self._files.fresh_id(), kind, block_bytes, model.block_tokens, first, parent, model.about
        )

    # -- files -------------------------------------------------------------------------------------------------

    def _reserve_behind(
        self, model: ModelEntry, tip: Segment, size: int, stack: ExitStack
    ) -> tuple[Segment | None, int]:
        """Extend a segment. None: it is gone, or another process writes to it, or has."""
        try:
            file = stack.enter_context(self._catalog.directory.taken(tip.path))
        except (FileNotFoundError, BusyError):
            return None, -1
        status = self._files.status(file)
        with self._catalog.lock:
            before = tip.size
            known = model.index.segments.get(tip.path) is tip
            if not known or status.st_size != before or status.st_nlink == 0:
                return None, -1
            self._catalog.writing = tip.path  # from here on its entry is not replaced
        self._undo_unless_done(stack, lambda: self._files.truncate(file, before))
        self._files.truncate(file, before + size)
        return tip, file

    def _reserve_new(self, header: SegmentHeader, size: int, stack: ExitStack) -> tuple[Segment, int]:
        directory = self._catalog.directory
        inside = directory.path_in(folder_of(header.fingerprint))
        self._files.make_directory(inside)
        path = f"{inside}/{header.id.hex()}{SUFFIX}"
        file = stack.enter_context(directory.opened(path, new=True, write=True))
        with self._catalog.lock:
            self._catalog.writing = path
        self._undo_unless_done(stack, lambda: self._files.remove(path))
        if not self._files.lock(file):
            raise BusyError(f"{path} is new, but another process holds it")
        self._files.truncate(file, PAGE + size)
        write_all(self._files, file, [header.encode()], 0)
        return Segment(path, header, PAGE, 0), file

    def _undo_unless_done(self, stack: ExitStack, undo: Callable[[], None]) -> None:
        def leave(kind: type[BaseException] | None, *_: object) -> None:
            if kind is not None:
                with suppress(OSError):
                    undo()
                with self._catalog.lock:
                    self._catalog.writing = None

        stack.push(leave)

    def _fill(self, file: int, record: Record, pieces: Sequence[memoryview], size: int) -> bool:
        """Write the payload, sync, then the header. False: the file was removed meanwhile."""
        began = self._monotonic()
        padded = whole_pages(record.payload_bytes)
        offset = record.offset + size - padded
        self.throttle.rest()
        sums, rested = self._payload_writer.write(file, pieces, padded - record.payload_bytes, offset)
        record.checksums.extend(sums)
        self._files.sync(file)
        rested += self.throttle.rest()
        write_all(self._files, file, [record.encode()], record.offset)
        self._recovered()
        self.speed.add(size, self._monotonic() - began - rested)
        linked = self._files.status(file).st_nlink > 0
        self.throttle.rest()
        return linked
