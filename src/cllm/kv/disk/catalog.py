"""The catalog of a directory: which segments there are, which have to go, which are damaged.

Used by the reader's and the writer's threads. Files are created, shortened and removed only with the directory locked,
and only if nobody writes to them. Memory follows the disk, never the other way round: if something fails on disk, the
blocks in question are forgotten, which is always safe.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from cllm.kv.disk.directory import BusyError, Directory, SegmentFile, Tally
from cllm.kv.disk.format import (
    PAGE,
    SUFFIX,
    DamagedError,
    OtherVersionError,
    OutdatedError,
    Record,
    decode_segment_header,
)
from cllm.kv.disk.index import SegmentIndex
from cllm.kv.disk.segment import Piece, Segment, read_page, read_record, scan

log = logging.getLogger("cllm.kv.disk")

SURVEY_INTERVAL_S = 60.0
"""How often, at least, all files are listed while something is written."""

MANY_FILES, SPARE_PART = 64, 32
"""With many files, listing is slow: a little more than necessary is evicted, so that it does not happen per record."""


class ModelEntry:
    """One model's part of the catalog."""

    def __init__(
        self, fingerprint: bytes, *, block_tokens: int, block_bytes: int, about: Mapping[str, str | int]
    ) -> None:
        self.fingerprint = fingerprint
        self.folder = folder_of(fingerprint)
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.about = about
        self.index = SegmentIndex(block_tokens)
        self.pending: set[bytes] = set()
        """Names of blocks that wait to be written."""
        self.ready = threading.Event()
        """Set once the directory was read."""
        self.unusable: dict[str, tuple[int, int]] = {}
        """Files to skip while their size and time stay the same: of another version, or being written to."""
        self.written_bytes = self.read_bytes = 0


def folder_of(fingerprint: bytes) -> str:
    return fingerprint[:16].hex()


class Catalog:
    def __init__(self, directory: Directory, limit: int, *, monotonic: Callable[[], float]) -> None:
        self.directory = directory
        self.files = directory.files
        self.limit = limit
        self._monotonic = monotonic
        self._survey_at = float("-inf")
        """Until then, the tally in the lock file is trusted."""
        self.lock = threading.Lock()
        """Guards everything in memory. Never held during disk I/O."""
        self.models: dict[str, ModelEntry] = {}
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        """Size of all files of the directory at the last survey."""
        self.writing: str | None = None
        """The segment that this process is appending to."""

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.counts[what] += number

    # -- reading the directory ---------------------------------------------------------------------------------

    def refresh(self, model: ModelEntry) -> None:
        """Pick up what other processes have written, used, shortened and removed."""
        with self.lock:
            before = dict(model.index.segments)
        survey = self.directory.survey()
        self.bytes = survey.bytes
        mine = {found.path: found for found in survey.files if found.folder == model.folder}
        with self.lock:
            self.counts["foreign"] = survey.foreign
            known = dict(model.index.segments)
            writing = self.writing
            for path, segment in known.items():
                if path not in mine and path != writing and before.get(path) is segment:
                    model.index.remove(segment)
        model.unusable = {path: state for path, state in model.unusable.items() if path in mine}
        for path, found in mine.items():
            if path != writing and self._is_news(model, found, known.get(path)):
                self._learn(model, found)

    def _is_news(self, model: ModelEntry, found: SegmentFile, segment: Segment | None) -> bool:
        if segment is None:
            return model.unusable.get(found.path) != (found.size, found.modified_ns)
        if segment.size != found.size:
            return True
        if segment.modified_ns != found.modified_ns:
            with self.lock:
                segment.use(segment.count, found.modified_ns)
                segment.modified_ns = found.modified_ns
        return False

    def _learn(self, model: ModelEntry, found: SegmentFile) -> None:
        """Read a segment's headers, and repair it if it was not finished."""
        segment: Segment | None = None
        try:
            with self.directory.opened(found.path) as file:
                segment, torn = scan(self.files, file, found.path)
            if segment.count == 0 or not self._belongs(model, segment):
                segment = self._mend(model, found, None)
            elif torn:
                segment = self._mend(model, found, segment)
        except (DamagedError, OutdatedError):
            segment = self._mend(model, found, None)
        except OtherVersionError:
            model.unusable[found.path] = (found.size, found.modified_ns)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.count("read_errors")
            log.debug("%s cannot be read: %s", found.path, error)
        self._replace(model, found.path, segment)

    def _belongs(self, model: ModelEntry, segment: Segment) -> bool:
        header = segment.header
        named = segment.path.endswith(f"/{header.id.hex()}{SUFFIX}")
        return named and header.fingerprint == model.fingerprint and header.block_tokens == model.block_tokens

    def _replace(self, model: ModelEntry, path: str, segment: Segment | None) -> None:
        with self.lock:
            if path == self.writing:
                return
            old = model.index.segments.get(path)
            if old is not None:
                model.index.remove(old)
            if segment is not None and segment.count:
                segment.use(segment.count, segment.modified_ns)
                model.index.add(segment)

    def _mend(self, model: ModelEntry, found: SegmentFile, begun: Segment | None) -> Segment | None:
        """Cut off what was never finished, or remove the file; unless another process is writing to it.

        `begun` is its intact part. That is used even if the rest cannot be cut off: its length then differs from the
        file's, so the file is read again later, and not appended to.
        """
        try:
            with self.directory.locked(), self.directory.taken(found.path) as file:
                return self._mend_taken(model, found.path, file)
        except FileNotFoundError:
            return None
        except BusyError:
            model.unusable[found.path] = (found.size, found.modified_ns)
        except OSError as error:
            self.count("write_errors")
            log.debug("%s cannot be repaired: %s", found.path, error)
        if begun is not None:
            begun.size = begun.records[-1].end
        return begun

    def _mend_taken(self, model: ModelEntry, path: str, file: int) -> Segment | None:
        status = self.files.status(file)
        try:
            segment, torn = scan(self.files, file, path)
        except OutdatedError:
            self._discard(path, "outdated")
            return None
        except OtherVersionError:
            return None
        except DamagedError:
            begun = not any(read_page(self.files, file, 0, PAGE))
            self._discard(path, "torn" if begun else "damaged")
            return None
        if not self._belongs(model, segment):
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

    def remove_outdated(self) -> Iterator[None]:
        """Remove segments of an earlier version of the format that belong to models nobody may open again; stops after
        each file."""
        for found in self.directory.survey().files:
            if found.folder not in self.models:
                with suppress(OSError):
                    self._remove_if_outdated(found)
            yield

    def _remove_if_outdated(self, found: SegmentFile) -> None:
        with self.directory.opened(found.path) as file:
            try:
                decode_segment_header(read_page(self.files, file, 0, PAGE))
            except OutdatedError:
                with self.directory.locked(), self.directory.taken(found.path):
                    self._discard(found.path, "outdated")
                    with suppress(OSError):  # others are left in it
                        self.files.remove_directory(self.directory.path_in(found.folder))
            except (DamagedError, OtherVersionError):
                pass  # it ages out like all others

    # -- damage ------------------------------------------------------------------------------------------------

    def drop_damaged(self, model: ModelEntry, segment: Segment, block: int, record: Record) -> None:
        """A block's checksum is wrong, or it cannot be read: remove it and what follows it in the segment."""
        try:
            with self.directory.locked(), self.directory.taken(segment.path) as file:
                if not self._is_still(segment, file, record):
                    mended = self._mend_taken(model, segment.path, file)
                    self._replace(model, segment.path, mended)
                    if mended is None or mended.count <= block or mended.place(block).record != record:
                        return
                    segment = mended
                self.count("damaged")
                self._shorten(model, segment, block, file)
        except FileNotFoundError:
            self._forget(model, segment, 0)
        except OSError as error:
            log.debug("%s is damaged and cannot be shortened: %s", segment.path, error)
            self._forget(model, segment, block)

    def _is_still(self, segment: Segment, file: int, record: Record) -> bool:
        """Whether the file is as we know it. Otherwise it was shortened or replaced, or its headers are damaged."""
        if self.files.status(file).st_size != segment.size:
            return False
        try:
            return read_record(self.files, file, segment.header, record.offset) == record
        except DamagedError:
            return False

    def forget(self, model: ModelEntry, segment: Segment) -> None:
        """Its file cannot be read: leave it alone."""
        self._forget(model, segment, 0)

    def _forget(self, model: ModelEntry, segment: Segment, block: int) -> None:
        """Forget blocks in memory only; what remains is not appended to, because its file has another length."""
        with self.lock:
            if model.index.segments.get(segment.path) is segment and block < segment.count:
                model.index.cut(segment, block, segment.size)

    def _shorten(self, model: ModelEntry, segment: Segment, block: int, file: int) -> int:
        """Truncate a locked segment before this block, or remove it; returns the bytes freed."""
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
            if model.index.segments.get(segment.path) is segment:
                model.index.cut(segment, block if size else 0, size)
        return before - size

    # -- eviction ----------------------------------------------------------------------------------------------

    def keep_to_limit(self) -> None:
        """Evict down to the limit, which may have been lowered."""
        if self.bytes > self.limit:
            with self.directory.locked() as tally:
                self.make_room(0, {}, tally)

    def make_room(self, needed: int, protected: Mapping[str, int], tally: Tally) -> bool:
        """Make room for `needed` bytes below the limit; the directory is locked. The least recently used go first,
        except the first blocks of `protected` segments. False: too much is being written, or protected."""
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
        self.bytes = total + needed if fits else total  # it is reserved at once
        if fits:
            tally.write(self.bytes)
        return fits

    def _evict(self, files: list[SegmentFile], excess: int, protected: Mapping[str, int]) -> None:
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

    def _pieces(self, found: SegmentFile) -> list[Piece]:
        known = self._known(found)
        if known is None or known[1].size != found.size:
            return [Piece(found.modified_ns, 0)]
        segment = known[1]
        with self.lock:
            if segment.modified_ns < found.modified_ns:
                segment.use(segment.count, found.modified_ns)
                segment.modified_ns = found.modified_ns
            return segment.pieces()

    def _known(self, found: SegmentFile) -> tuple[ModelEntry, Segment] | None:
        model = self.models.get(found.folder)
        segment = model.index.segments.get(found.path) if model is not None else None
        return (model, segment) if model is not None and segment is not None else None

    def _evict_piece(self, found: SegmentFile, first: int, excess: int) -> int:
        """Cut enough off the end of a segment, but nothing before block `first`; returns the bytes freed."""
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
                model, segment = known
                block = self._cut_for(segment, first, excess)
                freed = self._shorten(model, segment, block, file)
                self.count("evicted_bytes", freed)
                return freed
        except FileNotFoundError:
            if known is not None:
                self._forget(*known, 0)
            return found.size
        except OSError as error:  # being written to, or cannot be removed: others go instead
            log.debug("%s cannot be evicted: %s", found.path, error)
            return 0

    def _cut_for(self, segment: Segment, first: int, excess: int) -> int:
        block = segment.count
        while block > first and (block == segment.count or segment.size - segment.offset(block) < excess):
            block -= 1
        return block

    def supersede(self, model: ModelEntry, segment: Segment) -> None:
        """Remove a segment that another one covers."""
        try:
            with self.directory.locked(), self.directory.taken(segment.path) as file:
                self._shorten(model, segment, 0, file)
        except OSError as error:  # it will be evicted later
            log.debug("%s cannot be removed: %s", segment.path, error)

    # -- use ---------------------------------------------------------------------------------------------------

    def touch(self, model: ModelEntry, name: bytes) -> None:
        """Mark the chain up to this block as used now. Its beginning is always newer than its end."""
        with self.lock:
            path = list(model.index.path(name))
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
        except OSError as error:  # it is gone, or will be evicted a little early
            log.debug("cannot update the modification time of %s: %s", segment.path, error)
