"""Reads blocks in the background: large reads into the caller's memory, with checksums verified."""

from __future__ import annotations

import errno
import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from cllm.kv.disk.catalog import Catalog, ModelEntry
from cllm.kv.disk.files import read_all
from cllm.kv.disk.format import PAGE, Record
from cllm.kv.disk.segment import Segment
from cllm.kv.disk.threads import DaemonPool
from cllm.kv.throughput import Throughput

log = logging.getLogger("cllm.kv.disk")

READ_BYTES = 3 << 19
"""Bytes per call: large enough for the disk, small enough to keep several threads busy."""

MOST_NOTES = 1000
"""Most uses that wait to be recorded; they only affect the order of eviction."""

MOST_PIECES = 500
"""Most pieces per call."""


PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
"""Errors that say nothing about the file."""


class ReadTicket:
    """A load in progress. The buffers belong to the reader until `done`."""

    def __init__(
        self,
        model: ModelEntry,
        pieces: int,
        nbytes: int,
        buffers: Sequence[memoryview],
        tell: Callable[[ReadTicket], None] | None,
    ) -> None:
        self.pieces = pieces
        self.nbytes = nbytes
        self.loaded = 0
        """Blocks, from the first on, that are in their buffers and intact; other buffers are undefined."""
        self.error: str | None = None
        """Why not everything was loaded."""
        self.names: Sequence[bytes] = ()
        self.sequence: Segment | None = None
        self.model = model
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
        """It is no longer needed; `done` follows soon."""
        self._cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        return self._finished.wait(timeout)

    def finish(self) -> None:
        """Called once, by the reader; calls `tell` on its thread."""
        self._finished.set()
        if self._tell is not None:
            self._tell(self)


class Part(NamedTuple):
    """A piece to read, and its buffer."""

    segment: Segment
    block: int
    record: Record
    piece: int
    buffer: memoryview


class Reader:
    def __init__(self, catalog: Catalog, *, pool: DaemonPool | None, monotonic: Callable[[], float]) -> None:
        """`pool`: threads that read and check, so that the disk has always something to do."""
        self.speed = Throughput()
        self._pool = pool
        self.queued_bytes = 0
        self._catalog = catalog
        self._files = catalog.files
        self._monotonic = monotonic
        self._tickets: deque[ReadTicket] = deque()
        self._stale: dict[str, ModelEntry] = {}
        self._used: dict[tuple[str, bytes], ModelEntry] = {}
        self._outdated = catalog.remove_outdated()

    # -- asking (the catalog's lock is held) --------------------------------------------------------------------

    def add(self, ticket: ReadTicket) -> None:
        self._tickets.append(ticket)
        self.queued_bytes += ticket.nbytes

    def look(self, model: ModelEntry) -> None:
        """Refresh this model's part of the catalog when there is time."""
        self._stale[model.folder] = model

    def note_use(self, model: ModelEntry, name: bytes) -> None:
        """The chain up to this block was used without being loaded."""
        if len(self._used) < MOST_NOTES:
            self._used[model.folder, name] = model

    # -- the thread --------------------------------------------------------------------------------------------

    def work(self) -> float | None:
        """Serve one ticket, or refresh the catalog. 0: there may be more; None: nothing to do."""
        with self._catalog.lock:
            ticket = self._tickets.popleft() if self._tickets else None
            model = self._stale.popitem()[1] if ticket is None and self._stale else None
            used = self._used.popitem() if ticket is None and model is None and self._used else None
        if ticket is not None:
            self._serve(ticket)
        elif used is not None:
            (_, name), used_model = used
            self._catalog.touch(used_model, name)
        elif model is not None:
            try:
                self._catalog.refresh(model)
                self._catalog.keep_to_limit()
            except OSError as error:
                self._catalog.count("read_errors")
                log.debug("%s cannot be read: %s", self._catalog.directory.root, error)
            finally:
                model.ready.set()
        else:
            return 0.0 if self._clean() else None
        return 0.0

    def _clean(self) -> bool:
        """There is nothing else to do: look at another file that may be outdated. False: all were looked at."""
        try:
            return next(self._outdated, False) is None
        except OSError as error:
            log.debug("%s cannot be cleaned up: %s", self._catalog.directory.root, error)
            return False

    def give_up(self) -> None:
        """The store closes: fail all waiting tickets."""
        with self._catalog.lock:
            tickets, self._tickets = list(self._tickets), deque()
            self.queued_bytes -= sum(ticket.nbytes for ticket in tickets)
        for ticket in tickets:
            ticket.error = "the store was closed"
            ticket.finish()

    def _serve(self, ticket: ReadTicket) -> None:
        try:
            self._load(ticket)
        except Exception as error:
            ticket.error = f"{type(error).__name__}: {error}"
            log.exception("loading K/V failed")
        finally:
            with self._catalog.lock:
                self.queued_bytes -= ticket.nbytes
            ticket.finish()

    def _load(self, ticket: ReadTicket) -> None:
        parts = self._plan(ticket)
        if len(parts) < ticket.pieces:
            ticket.error = "it is no longer on disk"
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
            self._catalog.touch_sequence(ticket.sequence)
        elif ticket.loaded:
            self._catalog.touch(ticket.model, ticket.names[ticket.loaded - 1])

    def _plan(self, ticket: ReadTicket) -> list[Part]:
        parts: list[Part] = []
        with self._catalog.lock:
            if ticket.sequence is not None:
                if not ticket.sequence.records:
                    return []
                record = ticket.sequence.records[0]
                return [Part(ticket.sequence, 0, record, i, buffer) for i, buffer in enumerate(ticket.buffers)]
            for name, buffer in zip(ticket.names, ticket.buffers, strict=True):
                found = ticket.model.index.find(name)
                if found is None:
                    break
                segment, block = found
                parts.append(Part(segment, block, *segment.place(block), buffer))
        return parts

    def _read_segment(self, ticket: ReadTicket, parts: list[Part]) -> int:
        """Read parts of one file; returns how many of them, from the first on, are intact."""
        segment, done, began = parts[0].segment, 0, self._monotonic()
        try:
            with self._catalog.directory.opened(segment.path) as file:
                self._choose_way(file, parts)
                for right, wanted in self._read_spans(ticket, file, _spans(parts)):
                    done += right
                    if right < wanted and not ticket.cancelled:
                        ticket.error = "it is damaged, or no longer on disk"
                        self._catalog.drop_damaged(ticket.model, segment, parts[done].block, parts[done].record)
        except FileNotFoundError:
            ticket.error = "it is no longer on disk"
            self._catalog.count("vanished")
            self._catalog.drop_damaged(ticket.model, segment, parts[done].block, parts[done].record)
        except OSError as error:
            ticket.error = f"it cannot be read: {error.strerror or error}"
            self._catalog.count("read_errors")
            if error.errno == errno.EIO:
                self._catalog.drop_damaged(ticket.model, segment, parts[done].block, parts[done].record)
            elif error.errno not in PASSING:  # something else is in its place: its blocks can be written again
                self._catalog.forget(ticket.model, segment)
        with self._catalog.lock:
            nbytes = sum(len(part.buffer) for part in parts[:done])
            ticket.model.read_bytes += nbytes
            self.speed.add(nbytes, self._monotonic() - began)
        return done

    def _choose_way(self, file: int, parts: list[Part]) -> None:
        """Bypass the page cache for what is not in it, if everything is page-aligned: that saves half the CPU time."""
        if all(map(_fits, parts)) and not self._files.cached(file, _offset(parts[0])):
            with suppress(OSError):
                self._files.direct(file, True)

    def _read_spans(self, ticket: ReadTicket, file: int, spans: list[list[Part]]) -> Iterator[tuple[int, int]]:
        """For every span in order: how many of its parts are intact, and how many there are; stops at the first bad
        one."""

        def read(span: list[Part]) -> int:
            return 0 if ticket.cancelled else self._read_span(file, span)

        if self._pool is None or len(spans) == 1:
            for span in spans:
                right = read(span)
                yield right, len(span)
                if right < len(span):
                    return
            return
        reads: list[Future[int]] = []
        try:
            for span in spans:
                reads.append(self._pool.submit(read, span))  # noqa: PERF401 - one of them may fail
            for span, pending in zip(spans, reads, strict=True):
                right = pending.result()
                yield right, len(span)
                if right < len(span):
                    return
        finally:  # next, the file is closed and the buffers are returned
            for pending in reads:
                pending.cancel()
            wait(reads)

    def _read_span(self, file: int, span: list[Part]) -> int:
        """Read consecutive pieces; returns how many of them are intact."""
        last = span[-1]
        padding = bytearray(last.record.piece_end(last.piece) - _offset(last) - len(last.buffer))
        buffers = [*(part.buffer for part in span), memoryview(padding)]
        try:
            got = read_all(self._files, file, buffers, _offset(span[0]))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._files.direct(file, False)  # the file system needs another alignment
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
    """Whether it is page-aligned, on disk and in memory."""
    address: int = np.frombuffer(part.buffer, np.uint8).__array_interface__["data"][0]
    return not (_offset(part) % PAGE or len(part.buffer) % PAGE or address % PAGE)


def _offset(part: Part) -> int:
    return part.record.payload + part.piece * part.record.piece_bytes


def _spans(parts: list[Part]) -> list[list[Part]]:
    """Group parts into spans for one read each: consecutive pieces of a record."""
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
