"""Reads what was asked for, in the background: with large reads into the caller's memory, and checked."""

from __future__ import annotations

import errno
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from cllm.kv.disk.files import read_all
from cllm.kv.disk.format import PAGE, Record
from cllm.kv.disk.helpers import Helpers
from cllm.kv.disk.keeper import Keeper, Shelf
from cllm.kv.disk.segment import Segment
from cllm.kv.disk.speed import Speed

log = logging.getLogger("cllm.kv.disk")

READ_BYTES = 3 << 19
"""In one call: large enough for the disk, small enough that several threads have work soon."""

MOST_NOTES = 1000
"""Uses that wait to be noted; they matter for the order in which things go, and for nothing else."""

MOST_PIECES = 500
"""In one call."""


PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
"""Errors that say nothing of the file."""


class Ticket:
    """Something that is being loaded. The buffers belong to the reader until `done`."""

    def __init__(
        self,
        shelf: Shelf,
        pieces: int,
        nbytes: int,
        buffers: Sequence[memoryview],
        tell: Callable[[Ticket], None] | None,
    ) -> None:
        self.pieces = pieces
        self.nbytes = nbytes
        self.loaded = 0
        """Blocks, from the first on, that are in their buffers and right; what the other buffers hold is undefined."""
        self.error: str | None = None
        """Why it is not all."""
        self.names: Sequence[bytes] = ()
        self.sequence: Segment | None = None
        self.shelf = shelf
        self.buffers = buffers
        self._tell = tell
        self._finished = threading.Event()
        self._cancelled = False

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def complete(self) -> bool:
        return self.done and self.loaded == self.pieces

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """It is not needed any more; `done` comes soon."""
        self._cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        return self._finished.wait(timeout)

    def finish(self) -> None:
        """Once, by the reader. `tell` is called on its thread."""
        self._finished.set()
        if self._tell is not None:
            self._tell(self)


class Part(NamedTuple):
    """A piece to read, and where it goes."""

    segment: Segment
    block: int
    record: Record
    piece: int
    buffer: memoryview


class Reader:
    def __init__(
        self, keeper: Keeper, *, helpers: Helpers | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`helpers`: threads that read and check, so that the disk has always something to do."""
        self.speed = Speed()
        self._helpers = helpers
        self.queued_bytes = 0
        self._keeper = keeper
        self._files = keeper.files
        self._monotonic = monotonic
        self._tickets: deque[Ticket] = deque()
        self._stale: dict[str, Shelf] = {}
        self._used: dict[bytes, Shelf] = {}

    # -- asking (the keeper's lock is held) --------------------------------------------------------------------

    def add(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)
        self.queued_bytes += ticket.nbytes

    def look(self, shelf: Shelf) -> None:
        """Learn what others have done to this model's files, when there is time for it."""
        self._stale[shelf.space] = shelf

    def note_use(self, shelf: Shelf, name: bytes) -> None:
        """The chain up to this block was used, though not loaded."""
        if len(self._used) < MOST_NOTES:
            self._used[name] = shelf

    # -- the thread --------------------------------------------------------------------------------------------

    def work(self) -> float | None:
        """One ticket, or one look into the directory. 0: there may be more; None: nothing to do."""
        with self._keeper.lock:
            ticket = self._tickets.popleft() if self._tickets else None
            shelf = self._stale.popitem()[1] if ticket is None and self._stale else None
            used = self._used.popitem() if ticket is None and shelf is None and self._used else None
        if ticket is not None:
            self._serve(ticket)
        elif used is not None:
            self._keeper.touch(used[1], used[0])
        elif shelf is not None:
            try:
                self._keeper.refresh(shelf)
                self._keeper.keep_to_limit()
            except OSError as error:
                self._keeper.count("read_errors")
                log.debug("%s cannot be read: %s", self._keeper.directory.root, error)
            finally:
                shelf.ready.set()
        else:
            return None
        return 0.0

    def give_up(self) -> None:
        """Nobody will read these any more."""
        with self._keeper.lock:
            tickets, self._tickets = list(self._tickets), deque()
            self.queued_bytes -= sum(ticket.nbytes for ticket in tickets)
        for ticket in tickets:
            ticket.error = "the store was closed"
            ticket.finish()

    def _serve(self, ticket: Ticket) -> None:
        try:
            self._load(ticket)
        except Exception as error:
            ticket.error = f"{type(error).__name__}: {error}"
            log.exception("loading K/V failed")
        finally:
            with self._keeper.lock:
                self.queued_bytes -= ticket.nbytes
            ticket.finish()

    def _load(self, ticket: Ticket) -> None:
        parts = self._plan(ticket)
        if len(parts) < ticket.pieces:
            ticket.error = "it is not on disk any more"
        begin = 0
        while begin < len(parts) and not ticket.cancelled:
            end = begin + 1
            while end < len(parts) and parts[end].segment is parts[begin].segment:
                end += 1
            loaded = self._read_segment(ticket, parts[begin:end])
            ticket.loaded += loaded
            if loaded < end - begin:
                break
            begin = end
        if ticket.cancelled:
            ticket.error = "it was cancelled"
        if ticket.loaded and ticket.sequence is not None:
            self._keeper.touch_sequence(ticket.sequence)
        elif ticket.loaded:
            self._keeper.touch(ticket.shelf, ticket.names[ticket.loaded - 1])

    def _plan(self, ticket: Ticket) -> list[Part]:
        parts: list[Part] = []
        with self._keeper.lock:
            if ticket.sequence is not None:
                if not ticket.sequence.records:
                    return []
                record = ticket.sequence.records[0]
                return [Part(ticket.sequence, 0, record, i, buffer) for i, buffer in enumerate(ticket.buffers)]
            for name, buffer in zip(ticket.names, ticket.buffers, strict=True):
                found = ticket.shelf.index.find(name)
                if found is None:
                    break
                segment, block = found
                parts.append(Part(segment, block, *segment.place(block), buffer))
        return parts

    def _read_segment(self, ticket: Ticket, parts: list[Part]) -> int:
        """Read parts of one file. How many of them, from the first on, are right."""
        segment, done, began = parts[0].segment, 0, self._monotonic()
        try:
            with self._keeper.directory.opened(segment.path) as file:
                self._choose_way(file, parts)
                for right, wanted in self._read_spans(ticket, file, _spans(parts)):
                    done += right
                    if right < wanted and not ticket.cancelled:
                        ticket.error = "it is damaged, or not on disk any more"
                        self._keeper.distrust(ticket.shelf, segment, parts[done].block, parts[done].record)
        except FileNotFoundError:
            ticket.error = "it is not on disk any more"
            self._keeper.count("vanished")
            self._keeper.distrust(ticket.shelf, segment, parts[done].block, parts[done].record)
        except OSError as error:
            ticket.error = f"it cannot be read: {error.strerror or error}"
            self._keeper.count("read_errors")
            if error.errno == errno.EIO:
                self._keeper.distrust(ticket.shelf, segment, parts[done].block, parts[done].record)
            elif error.errno not in PASSING:  # something else is in its place: what it held can be written again
                self._keeper.forget(ticket.shelf, segment)
        with self._keeper.lock:
            nbytes = sum(len(part.buffer) for part in parts[:done])
            ticket.shelf.read_bytes += nbytes
            self.speed.add(nbytes, self._monotonic() - began)
        return done

    def _choose_way(self, file: int, parts: list[Part]) -> None:
        """What the system does not have in its memory goes straight to the caller's, where pages fit: that saves half
        of the processor's time."""
        if all(map(_fits, parts)) and not self._files.cached(file, _offset(parts[0])):
            with suppress(OSError):
                self._files.direct(file, True)

    def _read_spans(self, ticket: Ticket, file: int, spans: list[list[Part]]) -> Iterator[tuple[int, int]]:
        """For every span in turn how many of its parts are right, and how many there are; none after a wrong one."""

        def read(span: list[Part]) -> int:
            return 0 if ticket.cancelled else self._read_span(file, span)

        if self._helpers is None or len(spans) == 1:
            for span in spans:
                right = read(span)
                yield right, len(span)
                if right < len(span):
                    return
            return
        reads: list[Future[int]] = []
        try:
            for span in spans:
                reads.append(self._helpers.submit(read, span))  # noqa: PERF401 - one of them may fail
            for span, pending in zip(spans, reads, strict=True):
                right = pending.result()
                yield right, len(span)
                if right < len(span):
                    return
        finally:  # the file is closed and the buffers are given back next
            for pending in reads:
                pending.cancel()
            wait(reads)

    def _read_span(self, file: int, span: list[Part]) -> int:
        """Pieces that lie one behind the other. How many of them are right."""
        last = span[-1]
        padding = bytearray(last.record.piece_end(last.piece) - _offset(last) - len(last.buffer))
        buffers = [*(part.buffer for part in span), memoryview(padding)]
        try:
            got = read_all(self._files, file, buffers, _offset(span[0]))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._files.direct(file, False)  # the file system has its own idea of pages
            got = read_all(self._files, file, buffers, _offset(span[0]))
        for number, part in enumerate(span):
            got -= len(part.buffer) + (len(padding) if part is last else 0)
            checksum = zlib.crc32(part.buffer) if got >= 0 else -1
            if part is last and padding:
                checksum = zlib.crc32(padding, checksum) if got >= 0 else -1
            if checksum != part.record.checksums[part.piece]:
                return number
        return len(span)


def _fits(part: Part) -> bool:
    """Whether it is made of whole pages, on disk and in memory."""
    address: int = np.frombuffer(part.buffer, np.uint8).__array_interface__["data"][0]
    return not (_offset(part) % PAGE or len(part.buffer) % PAGE or address % PAGE)


def _offset(part: Part) -> int:
    return part.record.payload + part.piece * part.record.piece_bytes


def _spans(parts: list[Part]) -> list[list[Part]]:
    """What one read can get each: pieces that lie one behind the other in a record."""
    spans: list[list[Part]] = []
    size = 0
    for part in parts:
        last = spans[-1][-1] if spans else None
        if (
            last is not None
            and part.record is last.record
            and part.piece == last.piece + 1
            and size + len(part.buffer) <= READ_BYTES
            and len(spans[-1]) < MOST_PIECES
        ):
            spans[-1].append(part)
            size += len(part.buffer)
        else:
            spans.append([part])
            size = len(part.buffer)
    return spans
