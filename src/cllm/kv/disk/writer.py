"""Writes what was handed over, in the background: large, in order, and never more than is allowed.

    hand-over (copied, bounded) --> wait a moment for more --> runs of one chain --> room below the limit
        --> the file gets its new length --> payload --> fdatasync --> header: from here on it counts

A process that dies anywhere on the way leaves a file that ends with something that is no record. Nobody uses that, and
the next to find it cuts it off. `fdatasync` comes before the header, so that a header never outlives its payload in a
power cut, and so that no more than one record of ours waits in the system's memory for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from cllm.kv.disk.directory import BusyError
from cllm.kv.disk.files import write_all
from cllm.kv.disk.format import (
    PAGE,
    SEQUENCE_PIECE,
    SUFFIX,
    Kind,
    Record,
    SegmentHeader,
    most_names,
    record_bytes,
    whole_pages,
)
from cllm.kv.disk.helpers import Helpers
from cllm.kv.disk.keeper import Keeper, Shelf
from cllm.kv.disk.pace import Pace
from cllm.kv.disk.pen import Pen
from cllm.kv.disk.runs import Run, Saved, joined
from cllm.kv.disk.segment import Segment
from cllm.kv.disk.speed import Speed
from cllm.kv.disk.staging import AHEAD_BYTES, Staging

log = logging.getLogger("cllm.kv.disk")

RECORD_BYTES = 32 << 20
"""Most bytes of one append; at most an eighth of the limit, unless that is very small."""

SMALL_RECORD_BYTES = 64 << 10

SEGMENT_BYTES = 256 << 20
"""A segment that would become longer is not appended to; at most a quarter of the limit."""

KEEP_COPIES_S = 5.0
"""How long the memory of copies stays taken when there is nothing to write."""


GENTLE_LINGER_S = 5.0
"""How long the writer waits for more while answers are generated: every record has its price, whatever its size."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""How long nothing is written after it could not be; twice as long every time, up to the longest."""


class Writer:
    def __init__(
        self,
        keeper: Keeper,
        *,
        staging: Staging,
        helpers: Helpers | None,
        queue_bytes: int,
        linger_s: float,
        rate: float | None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speed = Speed()
        self.queued_bytes = 0
        self.closed = False
        """Nothing more is taken."""
        self.pace = Pace(rate, sleep=sleep)
        self._pen = Pen(keeper.files, self.pace, helpers)
        self.trouble: str | None = None
        """Why nothing is written now."""
        self._keeper = keeper
        self._files = keeper.files
        self._staging = staging
        self.queue_bytes = queue_bytes
        self._linger_s = linger_s
        self._monotonic = monotonic
        self._items: deque[Run | Saved] = deque()
        self._arrived = threading.Condition(keeper.lock)
        self._oldest: float = 0.0
        self._busy = False
        self._idle_since = 0.0
        self._flushes = 0
        """Those who wait until all is written."""
        self._pause_s = FIRST_PAUSE_S
        self._paused_until: float | None = None
        limit = keeper.limit
        self._record_bytes = min(RECORD_BYTES, max(limit // 8, min(limit // 2, SMALL_RECORD_BYTES)))
        self._segment_bytes = min(SEGMENT_BYTES, max(limit // 4, 2 * self._record_bytes))

    # -- handing over (the engine's thread; the keeper's lock is held) -----------------------------------------

    def room(self) -> int:
        """Bytes that can be handed over now."""
        if self.closed or not self._may_write():
            return 0
        return self.queue_bytes - self.queued_bytes

    def reserve(self, nbytes: int) -> None:
        """So much will be added."""
        self.queued_bytes += nbytes

    def add(self, item: Run | Saved) -> None:
        if not self._items:
            self._oldest = self._monotonic()
        self._items.append(item)

    # -- the thread --------------------------------------------------------------------------------------------

    def work(self) -> float | None:
        """Write a batch if one is due. 0: there may be more; otherwise how long to wait for it."""
        if self._prepare():
            return 0.0
        with self._keeper.lock:
            if not self._items:
                return self._rest()
            linger, enough = self._linger_s, min(self._record_bytes, self.queue_bytes // 2)
            if self.pace.gentle:
                linger, enough = max(linger, GENTLE_LINGER_S), min(enough, AHEAD_BYTES // 2)
            wait = self._oldest + linger - self._monotonic()
            if wait > 0 and not self._flushes and self.queued_bytes < enough:
                return min(wait, self._linger_s) or wait
            items, self._items = list(self._items), deque()
            self._busy = True
        self.pace.begin()
        try:
            lost: set[bytes] = set()
            for item in self._in_order(items):
                self._write_or_give_up(item, lost)
        finally:
            with self._keeper.lock:
                self._busy = False
                self._idle_since = self._monotonic()
                self._arrived.notify_all()
        return 0.0

    def _prepare(self) -> bool:
        """Have memory for copies that the engine has no time to take."""
        self.pace.begin()
        prepared = self._staging.prepare(self.queued_bytes)
        if prepared:
            self._idle_since = self._monotonic()
            self.pace.rest(0)
        return bool(prepared)

    def _rest(self) -> float | None:
        """Nothing to write: memory for copies goes back after a while."""
        if not self._staging.kept:
            return None
        wait = self._idle_since + KEEP_COPIES_S - self._monotonic()
        if wait > 0:
            return wait
        self._staging.clear()
        self._pen.forget()
        return None

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Nothing waits for more to come."""
        self._count_flushes(1)
        try:
            yield
        finally:
            self._count_flushes(-1)

    def _count_flushes(self, more: int) -> None:
        with self._keeper.lock:
            self._flushes += more
            self.pace.hurried = self._flushes > 0

    def wait_empty(self, timeout: float) -> bool:
        """Wait until all that was handed over is written, or given up."""
        with self._keeper.lock:
            return self._arrived.wait_for(lambda: not (self._items or self._busy), timeout)

    def _in_order(self, items: list[Run | Saved]) -> Iterator[Run | Saved]:
        """Chains put together, in parts that become a record each."""
        for run in joined([item for item in items if isinstance(item, Run)]):
            yield from run.parts(most_names(run.shelf.block_bytes, self._record_bytes))
        yield from (item for item in items if isinstance(item, Saved))

    def _write_or_give_up(self, item: Run | Saved, lost: set[bytes]) -> None:
        """Whatever happens, it is out of the queue afterwards. What follows something that is `lost` is not written."""
        written = False
        try:
            if isinstance(item, Saved):
                written = self._may_write() and self._write_sequence(item)
            else:
                written = self._may_write() and item.parent not in lost and self._append(item)
        except BusyError as error:
            log.debug("%s", error)
        except OSError as error:
            self._back_off(error)
        except Exception:
            log.exception("K/V could not be written")
        finally:
            with self._keeper.lock:
                self.queued_bytes -= item.nbytes
                self._keeper.counts["unwritten_bytes"] += 0 if written else item.nbytes
                if isinstance(item, Run):
                    if not written:
                        lost.add(item.names[-1])
                    item.shelf.pending.difference_update(item.names)
                    self._staging.give_back(item.blocks)
                else:
                    item.shelf.pending.discard(item.names[-1])

    def _may_write(self) -> bool:
        return self._paused_until is None or self._monotonic() >= self._paused_until

    def _back_off(self, error: OSError) -> None:
        self._keeper.count("write_errors")
        reason = error.strerror or str(error)
        if self.trouble is None:
            log.warning(
                "K/V cannot be written to %s (%s): what is computed is kept in memory only. Trying again in %.0f s",
                self._keeper.directory.root, reason, self._pause_s,
            )  # fmt: skip
        self.trouble = reason
        self._paused_until = self._monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _recovered(self) -> None:
        if self.trouble is not None:
            log.info("K/V are written to %s again", self._keeper.directory.root)
        self.trouble, self._paused_until, self._pause_s = None, None, FIRST_PAUSE_S

    # -- records -----------------------------------------------------------------------------------------------

    def _append(self, run: Run) -> bool:
        """Write blocks behind their parent, or into a file of their own. False: there is no room for them."""
        keeper, shelf = self._keeper, run.shelf
        size = record_bytes(len(run.names), len(run.names), run.nbytes)
        with keeper.lock:
            tip = shelf.index.tip(run.parent)
            protected = {use.segment.path: use.blocks for use in shelf.index.path(run.parent)}
        if tip is not None and tip.size + size > self._segment_bytes:
            tip = None
        with ExitStack() as stack:
            with keeper.directory.locked() as tally:
                if not keeper.make_room(size + PAGE, protected, tally):
                    return False
                segment, file = self._reserve_behind(shelf, tip, size, stack) if tip is not None else (None, -1)
                if segment is None:
                    header = self._header(shelf, Kind.BLOCKS, run.parent, run.first)
                    segment, file = self._reserve_new(header, size, stack)
            record = Record(
                segment.header.id, segment.size, shelf.block_bytes, run.nbytes, 0, tuple(run.names), array("I")
            )
            linked = self._fill(file, record, run.blocks, size)
        with keeper.lock:
            keeper.writing = None
            if linked:
                first = segment.count
                segment.size += size
                shelf.written_bytes += size
                segment.add(record)
                segment.use(segment.count, keeper.directory.stamps(1))
                shelf.index.add(segment, first)
        keeper.touch(shelf, run.names[-1])
        return True

    def _write_sequence(self, saved: Saved) -> bool:
        """Write it into a file of its own. False: there is no room for it."""
        keeper, shelf = self._keeper, saved.shelf
        pieces = saved.pieces(SEQUENCE_PIECE)
        size = record_bytes(len(saved.names), len(pieces), saved.nbytes)
        header = self._header(shelf, Kind.SEQUENCE, bytes(len(saved.names[0])), 0)
        with ExitStack() as stack:
            with keeper.directory.locked() as tally:
                if not keeper.make_room(size + PAGE, {}, tally):
                    return False
                segment, file = self._reserve_new(header, size, stack)
            record = Record(header.id, PAGE, SEQUENCE_PIECE, saved.nbytes, saved.count, tuple(saved.names), array("I"))
            linked = self._fill(file, record, pieces, size)
        with keeper.lock:
            keeper.writing = None
            covered = shelf.index.covered(saved.names[:-1], saved.tokens)
            if linked:
                segment.size += size
                shelf.written_bytes += size
                segment.add(record)
                shelf.index.add(segment)
        keeper.touch_sequence(segment)
        for other in covered:
            keeper.supersede(shelf, other)
        return True

    def _header(self, shelf: Shelf, kind: Kind, parent: bytes, first: int) -> SegmentHeader:
        block_bytes = shelf.block_bytes if kind is Kind.BLOCKS else 0
        return SegmentHeader(
            shelf.fingerprint, self._files.fresh_id(), kind, block_bytes, shelf.block_tokens, first, parent, shelf.about
        )

    # -- files -------------------------------------------------------------------------------------------------

    def _reserve_behind(self, shelf: Shelf, tip: Segment, size: int, stack: ExitStack) -> tuple[Segment | None, int]:
        """Give a segment its new length. None: it is gone, or another process writes to it, or has."""
        try:
            file = stack.enter_context(self._keeper.directory.taken(tip.path))
        except (FileNotFoundError, BusyError):
            return None, -1
        status = self._files.status(file)
        with self._keeper.lock:
            before = tip.size
            known = shelf.index.segments.get(tip.path) is tip
            if not known or status.st_size != before or status.st_nlink == 0:
                return None, -1
            self._keeper.writing = tip.path  # from here on nobody replaces what is known of it
        self._undo_unless_done(stack, lambda: self._files.truncate(file, before))
        self._files.truncate(file, before + size)
        return tip, file

    def _reserve_new(self, header: SegmentHeader, size: int, stack: ExitStack) -> tuple[Segment, int]:
        directory = self._keeper.directory
        inside = directory.space_path(header.fingerprint[:16].hex())
        self._files.make_directory(inside)
        path = f"{inside}/{header.id.hex()}{SUFFIX}"
        file = stack.enter_context(directory.opened(path, new=True, write=True))
        self._begin(path)
        self._undo_unless_done(stack, lambda: self._files.remove(path))
        if not self._files.lock(file):
            raise BusyError(f"{path} is new, and held by another process")
        self._files.truncate(file, PAGE + size)
        write_all(self._files, file, [header.encode()], 0)
        return Segment(path, header, PAGE, 0), file

    def _begin(self, path: str) -> None:
        with self._keeper.lock:
            self._keeper.writing = path

    def _undo_unless_done(self, stack: ExitStack, undo: Callable[[], None]) -> None:
        def leave(kind: type[BaseException] | None, *_: object) -> None:
            if kind is not None:
                with suppress(OSError):
                    undo()
                with self._keeper.lock:
                    self._keeper.writing = None

        stack.push(leave)

    def _fill(self, file: int, record: Record, pieces: Sequence[memoryview], size: int) -> bool:
        """Payload, then the disk's word for it, then the header. False: the file was removed meanwhile."""
        began = self._monotonic()
        padded = whole_pages(record.payload_bytes)
        offset = record.offset + size - padded
        self.pace.rest(0)
        sums, rested = self._pen.write(file, pieces, padded - record.payload_bytes, offset)
        record.checksums.extend(sums)
        self._files.sync(file)
        rested += self.pace.rest(0)
        write_all(self._files, file, [record.encode()], record.offset)
        self._recovered()
        self.speed.add(size, self._monotonic() - began - rested)
        linked = self._files.status(file).st_nlink > 0
        self.pace.rest(0)
        return linked
