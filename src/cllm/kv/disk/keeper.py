"""Keeps the directory in order: what is there, what has to go, what is damaged. For the threads that read and write.

Files are begun, shortened and removed only with the directory locked, and only if nobody writes to them. What is known
in memory follows what was done on disk, never the other way round; if something could not be done there, the blocks in
question are forgotten, which is always safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from cllm.kv.disk.directory import BusyError, Directory, Found, Tally
from cllm.kv.disk.format import PAGE, SUFFIX, DamagedError, OtherVersionError, Record
from cllm.kv.disk.index import Index
from cllm.kv.disk.segment import Piece, Segment, read_page, read_record, scan

log = logging.getLogger("cllm.kv.disk")

SURVEY_INTERVAL_S = 60.0
"""How often, at least, all files are looked at while something is written."""

MANY_FILES, SPARE_PART = 64, 32
"""Where looking at all of them takes long, a little more goes than has to, so that it is not done for every record."""


class Shelf:
    """What belongs to one model."""

    def __init__(
        self, fingerprint: bytes, *, block_tokens: int, block_bytes: int, about: Mapping[str, str | int]
    ) -> None:
        self.fingerprint = fingerprint
        self.space = space_of(fingerprint)
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.about = about
        self.index = Index(block_tokens)
        self.pending: set[bytes] = set()
        """Blocks that wait to be written."""
        self.ready = threading.Event()
        """What lies on disk is known."""
        self.unusable: dict[str, tuple[int, int]] = {}
        """Files that are left alone as long as size and time are these: of another version, or being written to."""
        self.written_bytes = self.read_bytes = 0


def space_of(fingerprint: bytes) -> str:
    return fingerprint[:16].hex()


class Keeper:
    def __init__(self, directory: Directory, limit: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self.files = directory.files
        self.limit = limit
        self._monotonic = monotonic
        self._survey_at = float("-inf")
        """Until then, what others say of the directory's bytes is believed."""
        self.lock = threading.Lock()
        """Guards all that is known in memory. Nobody waits for a disk while he holds it."""
        self.shelves: dict[str, Shelf] = {}
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        """In all files of the directory, when it was last looked at."""
        self.writing: str | None = None
        """The segment that this process appends to now."""

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.counts[what] += number

    # -- what is there -----------------------------------------------------------------------------------------

    def refresh(self, shelf: Shelf) -> None:
        """Learn what others have written, used, shortened and removed since."""
        with self.lock:
            before = dict(shelf.index.segments)
        survey = self.directory.survey()
        self.bytes = survey.bytes
        mine = {found.path: found for found in survey.files if found.space == shelf.space}
        with self.lock:
            self.counts["foreign"] = survey.foreign
            known = dict(shelf.index.segments)
            writing = self.writing
            for path, segment in known.items():
                if path not in mine and path != writing and before.get(path) is segment:
                    shelf.index.remove(segment)
        shelf.unusable = {path: state for path, state in shelf.unusable.items() if path in mine}
        for path, found in mine.items():
            if path != writing and self._is_news(shelf, found, known.get(path)):
                self._learn(shelf, found)

    def _is_news(self, shelf: Shelf, found: Found, segment: Segment | None) -> bool:
        if segment is None:
            return shelf.unusable.get(found.path) != (found.size, found.modified_ns)
        if segment.size != found.size:
            return True
        if segment.modified_ns != found.modified_ns:
            with self.lock:
                segment.use(segment.count, found.modified_ns)
                segment.modified_ns = found.modified_ns
        return False

    def _learn(self, shelf: Shelf, found: Found) -> None:
        """Read a segment's headers, and mend it if it was not finished."""
        segment: Segment | None = None
        try:
            with self.directory.opened(found.path) as file:
                segment, torn = scan(self.files, file, found.path)
            if segment.count == 0 or not self._belongs(shelf, segment):
                segment = self._mend(shelf, found, None)
            elif torn:
                segment = self._mend(shelf, found, segment)
        except OtherVersionError:
            shelf.unusable[found.path] = (found.size, found.modified_ns)
        except DamagedError:
            segment = self._mend(shelf, found, None)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.count("read_errors")
            log.debug("%s cannot be read: %s", found.path, error)
        self._replace(shelf, found.path, segment)

    def _belongs(self, shelf: Shelf, segment: Segment) -> bool:
        header = segment.header
        named = segment.path.endswith(f"/{header.id.hex()}{SUFFIX}")
        return named and header.fingerprint == shelf.fingerprint and header.block_tokens == shelf.block_tokens

    def _replace(self, shelf: Shelf, path: str, segment: Segment | None) -> None:
        with self.lock:
            if path == self.writing:
                return
            old = shelf.index.segments.get(path)
            if old is not None:
                shelf.index.remove(old)
            if segment is not None and segment.count:
                segment.use(segment.count, segment.modified_ns)
                shelf.index.add(segment)

    def _mend(self, shelf: Shelf, found: Found, begun: Segment | None) -> Segment | None:
        """A file that is not whole: cut off what was never finished, or remove it; unless somebody writes to it now.

        `begun` is what of it is right. That is used even if the rest has to stay: its length then is not the file's, so
        it is looked at again, and not appended to.
        """
        try:
            with self.directory.locked(), self.directory.taken(found.path) as file:
                return self._mend_taken(shelf, found.path, file)
        except FileNotFoundError:
            return None
        except BusyError:
            shelf.unusable[found.path] = (found.size, found.modified_ns)
        except OSError as error:
            self.count("write_errors")
            log.debug("%s cannot be mended: %s", found.path, error)
        if begun is not None:
            begun.size = begun.records[-1].end
        return begun

    def _mend_taken(self, shelf: Shelf, path: str, file: int) -> Segment | None:
        status = self.files.status(file)
        try:
            segment, torn = scan(self.files, file, path)
        except OtherVersionError:
            return None
        except DamagedError:
            begun = not any(read_page(self.files, file, 0, PAGE))
            self._discard(path, "torn" if begun else "damaged")
            return None
        if not self._belongs(shelf, segment):
            self._discard(path, "misplaced")
            return None
        if segment.count == 0:
            self._discard(path, "torn")
            return None
        if torn:
            segment.size = segment.records[-1].end
            self.files.truncate(file, segment.size)
            self.count("torn")
            segment.modified_ns = status.st_mtime_ns
            self.set_time(segment, status.st_mtime_ns)
        return segment

    def _discard(self, path: str, why: str) -> None:
        self.files.remove(path)
        self.count(why)

    # -- what is damaged ---------------------------------------------------------------------------------------

    def distrust(self, shelf: Shelf, segment: Segment, block: int, record: Record) -> None:
        """A block is not what its checksum says, or cannot be read: it and what follows it there has to go."""
        try:
            with self.directory.locked(), self.directory.taken(segment.path) as file:
                if not self._is_still(segment, file, record):
                    mended = self._mend_taken(shelf, segment.path, file)
                    self._replace(shelf, segment.path, mended)
                    if mended is None or mended.count <= block or mended.place(block).record != record:
                        return
                    segment = mended
                self.count("damaged")
                self._shorten(shelf, segment, block, file)
        except FileNotFoundError:
            self._forget(shelf, segment, 0)
        except OSError as error:
            log.debug("%s is damaged and cannot be shortened: %s", segment.path, error)
            self._forget(shelf, segment, block)

    def _is_still(self, segment: Segment, file: int, record: Record) -> bool:
        """Whether the file is what we know. Otherwise it was shortened or replaced, or its headers are damaged."""
        if self.files.status(file).st_size != segment.size:
            return False
        try:
            return read_record(self.files, file, segment.header, record.offset) == record
        except DamagedError:
            return False

    def forget(self, shelf: Shelf, segment: Segment) -> None:
        """Its file cannot be read. It is left alone."""
        self._forget(shelf, segment, 0)

    def _forget(self, shelf: Shelf, segment: Segment, block: int) -> None:
        """In memory only; what remains of it there is not appended to, for its file has another length."""
        with self.lock:
            if shelf.index.segments.get(segment.path) is segment and block < segment.count:
                shelf.index.cut(segment, block, segment.size)

    def _shorten(self, shelf: Shelf, segment: Segment, block: int, file: int) -> int:
        """Cut a segment that is taken before this block, or remove it. The bytes that were freed."""
        if block >= segment.count:
            return 0
        before = segment.size
        size = 0 if block == 0 or segment.is_sequence else segment.offset(block)
        if size:
            self.files.truncate(file, size)
            self.set_time(segment, segment.modified_ns)
        else:
            self.files.remove(segment.path)
        with self.lock:
            if shelf.index.segments.get(segment.path) is segment:
                shelf.index.cut(segment, block if size else 0, size)
        return before - size

    # -- what has to go ----------------------------------------------------------------------------------------

    def keep_to_limit(self) -> None:
        """The limit may have been lowered since the files were written."""
        if self.bytes > self.limit:
            with self.directory.locked() as tally:
                self.make_room(0, {}, tally)

    def make_room(self, needed: int, protected: Mapping[str, int], tally: Tally) -> bool:
        """Have `needed` bytes free below the limit; the directory is locked. What was used longest ago goes first, but
        for the first blocks of protected segments. False: too much is being written, or protected."""
        if needed > self.limit:
            return False
        total = tally.read() if self._monotonic() < self._survey_at else None
        if total is None or total + needed > self.limit:
            survey = self.directory.survey()
            self._survey_at = self._monotonic() + SURVEY_INTERVAL_S
            total = survey.bytes
            if total + needed > self.limit:
                spare = self.limit // SPARE_PART if len(survey.files) >= MANY_FILES else 0
                self._evict(survey.files, total + needed + spare - self.limit, protected)
                total = self.directory.survey().bytes
        fits = total + needed <= self.limit
        self.bytes = total + needed if fits else total  # what fits is taken at once
        if fits:
            tally.write(self.bytes)
        return fits

    def _evict(self, files: list[Found], excess: int, protected: Mapping[str, int]) -> None:
        candidates = [
            (stamp, max(first, protected.get(found.path, 0)), found)
            for found in files
            for stamp, first in self._pieces(found)
        ]
        candidates.sort(key=lambda candidate: candidate[:2])
        for _, first, found in candidates:
            if excess <= 0:
                break
            excess -= self._evict_piece(found, first, excess)

    def _pieces(self, found: Found) -> list[Piece]:
        known = self._known(found)
        if known is None or known[1].size != found.size:
            return [Piece(found.modified_ns, 0)]
        segment = known[1]
        with self.lock:
            if segment.modified_ns < found.modified_ns:
                segment.use(segment.count, found.modified_ns)
                segment.modified_ns = found.modified_ns
            return segment.pieces()

    def _known(self, found: Found) -> tuple[Shelf, Segment] | None:
        shelf = self.shelves.get(found.space)
        segment = shelf.index.segments.get(found.path) if shelf is not None else None
        return (shelf, segment) if shelf is not None and segment is not None else None

    def _evict_piece(self, found: Found, first: int, excess: int) -> int:
        """Take enough from the end of a segment, but nothing before block `first`. The bytes that were freed."""
        known = self._known(found)
        try:
            with self.directory.taken(found.path) as file:
                if known is None or self.files.status(file).st_size != known[1].size:
                    if first:
                        return 0
                    self.files.remove(found.path)
                    self.count("evicted_bytes", found.size)
                    if known is not None:
                        self._forget(*known, 0)
                    return found.size
                shelf, segment = known
                block = self._cut_for(segment, first, excess)
                freed = self._shorten(shelf, segment, block, file)
                self.count("evicted_bytes", freed)
                return freed
        except FileNotFoundError:
            if known is not None:
                self._forget(*known, 0)
            return found.size
        except OSError as error:  # somebody writes to it, or it cannot be removed: others go instead
            log.debug("%s cannot be evicted: %s", found.path, error)
            return 0

    def _cut_for(self, segment: Segment, first: int, excess: int) -> int:
        block = segment.count
        while block > first and (block == segment.count or segment.size - segment.offset(block) < excess):
            block -= 1
        return block

    def supersede(self, shelf: Shelf, segment: Segment) -> None:
        """Another one holds all of it."""
        try:
            with self.directory.locked(), self.directory.taken(segment.path) as file:
                self._shorten(shelf, segment, 0, file)
        except OSError as error:  # it goes when it was not used for long enough
            log.debug("%s cannot be removed: %s", segment.path, error)

    # -- what is used ------------------------------------------------------------------------------------------

    def touch(self, shelf: Shelf, name: bytes) -> None:
        """The chain up to this block is used now. Its beginning is always younger than its end."""
        with self.lock:
            path = list(shelf.index.path(name))
            first = self.directory.stamps(len(path))
            for number, (segment, blocks) in enumerate(path):
                segment.use(blocks, first + number)
                segment.modified_ns = first + number
        for number, (segment, _) in enumerate(path):
            self.set_time(segment, first + number)

    def touch_sequence(self, segment: Segment) -> None:
        with self.lock:
            stamp = self.directory.stamps(1)
            segment.use(segment.count, stamp)
            segment.modified_ns = stamp
        self.set_time(segment, stamp)

    def set_time(self, segment: Segment, stamp: int) -> None:
        try:
            self.files.set_time(segment.path, stamp)
        except OSError as error:  # it is gone, or will go a little early
            log.debug("the time of %s cannot be set: %s", segment.path, error)
