"""Blocks in host memory, between a GPU's arena and the disk.

    arena ──copy_out──► rows by block name, least recently used go first ──copy_in──► arena
            before a block is evicted or reused                         for a waiting sequence

Blocks have the same names as in the prefix tree. A block that was loaded back stays here, too, so that it need not be
copied when it is evicted again. Copies overlap with steps: a row that a copy reads or writes is *busy* and not reused,
and the device waits for the copy before it overwrites a block that is still being copied.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.errors import BackendError, describe
from cllm.kv.block_names import TOKEN_BYTES, chain
from cllm.kv.ops import Copying, HostRows
from cllm.kv.throughput import GUESS_BYTES, Throughput
from cllm.kv.tiers.tier import LEAST_TOKENS, Tier
from cllm.kv.usage import HostNumbers

log = logging.getLogger("cllm.kv")

LATENCY_S = 0.002
"""Added to every load: another turn of the engine, steps that are queued."""

COPIED_AT_ONCE_BYTES = 64 << 20
"""Copied ahead of what is written to disk."""

FIRST_GUESS = 10e9
"""Bytes per second, before anything was copied."""


class HostTransfer:
    """A batch of copies, as `Load` sees it."""

    __slots__ = ("blocks", "copying", "done", "loaded", "names", "outwards", "rows")

    def __init__(
        self, copying: Copying, names: Sequence[bytes], blocks: Sequence[int], rows: Sequence[int], *, outwards: bool
    ) -> None:
        self.copying = copying
        self.names = list(names)
        self.blocks = list(blocks)
        self.rows = list(rows)
        self.outwards = outwards
        self.done = False
        self.loaded = 0

    def cancel(self) -> None:
        """Nothing to do: it ends sooner than it could be interrupted."""


class HostTier(Tier):
    place = "host memory"

    def __init__(self, rows: HostRows, *, block_tokens: int, least_tokens: int = LEAST_TOKENS) -> None:
        super().__init__(block_tokens, rows.row_bytes, least_tokens)
        self.inwards, self.outwards = Throughput(FIRST_GUESS), Throughput(FIRST_GUESS)
        self._rows = rows
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        """What is held, or will be when its copy is done; least recently used first, the end of a chain before its
        beginning."""
        self._free: list[int] = []
        self._seen = 0
        """Rows that are held or free; more may have been allocated since."""
        self._busy: Counter[int] = Counter()
        self._leaving: dict[int, Copying] = {}
        """Blocks being copied out that the device does not wait for yet."""
        self._under_way: list[HostTransfer] = []
        rows.want_more(1)

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._row_of

    @property
    def usable(self) -> bool:
        return self.working and self._rows.most_rows > 0

    @property
    def copied_blocks(self) -> int:
        """Blocks that copies read or write now: they must not move."""
        return sum(len(moved.blocks) for moved in self._under_way)

    # -- copying out -------------------------------------------------------------------------------------------

    def keep(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy those of these consecutive blocks of a chain that are not here yet."""
        for name in reversed(names):
            if name in self._row_of:
                self._row_of.move_to_end(name)
        new = [(name, block) for name, block in zip(names, blocks, strict=True) if name not in self._row_of]
        if not new or not self.usable or not self.pays:
            return
        rows = self._take(len(new))
        new = new[: len(rows)]
        if not rows:
            return
        names, blocks = [name for name, _ in new], [block for _, block in new]
        try:
            copying = self._rows.copy_out(blocks, rows)
        except Exception as error:
            self._free += rows
            self.fault("copying blocks to host memory", error)
            return
        for name, row in zip(reversed(names), reversed(rows), strict=True):
            self._row_of[name] = row
        self._leaving.update(dict.fromkeys(blocks, copying))
        self._begin(HostTransfer(copying, names, blocks, rows, outwards=True))

    def _take(self, count: int) -> list[int]:
        """`count` rows in order, or as many as there are."""
        missing = count + self._copied_at_once - len(self._free)
        if missing > 0 and self._seen < self._rows.most_rows:
            self._rows.want_more(missing)
        there = self._rows.rows
        self._free[:0] = range(there - 1, self._seen - 1, -1)
        self._seen = there
        if len(self._free) < count:
            oldest = (name for name, row in self._row_of.items() if row not in self._busy)
            for name in [name for name, _ in zip(oldest, range(count - len(self._free)), strict=False)]:
                self._free.append(self._row_of.pop(name))
        taken = self._free[-count:]
        del self._free[-count:]
        return sorted(taken)

    def reuse(self, blocks: Iterable[int]) -> None:
        """These blocks will be overwritten: have the device wait for copies that still read them."""
        if not self._leaving:
            return
        waiting = {id(copying): copying for block in blocks if (copying := self._leaving.pop(block, None))}
        for copying in waiting.values():
            self._wait_for(copying)

    # -- copying in --------------------------------------------------------------------------------------------

    def find(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """The names of the blocks held here for the tokens that follow the block `parent`."""
        names: list[bytes] = []
        step = self.block_tokens * TOKEN_BYTES
        for start in range(0, len(tokens) // step * step, step):
            (parent,) = chain(parent, tokens[start : start + step], self.block_tokens)
            if parent not in self._row_of:
                break
            names.append(parent)
        return names

    def wait_limit(self, blocks: int) -> float | None:
        """How long to wait for `blocks` blocks instead of computing them. None: compute them."""
        queued = sum(len(moved.blocks) for moved in self._under_way if not moved.outwards)
        expected = self.inwards.seconds((queued + blocks) * self._rows.row_bytes) + LATENCY_S
        return self._wait_limit(blocks, expected) if self.usable else None

    @property
    def measured(self) -> bool:
        return self.inwards.total >= GUESS_BYTES

    @property
    def _block_load_s(self) -> float:
        return self.inwards.seconds(self.block_bytes)

    @contextmanager
    def busy(self, names: Sequence[bytes]) -> Iterator[None]:
        """Keep these rows from being reused meanwhile."""
        rows = [self._row_of[name] for name in names]
        self._busy.update(rows)
        try:
            yield
        finally:
            self._busy -= Counter(rows)

    def load(self, names: Sequence[bytes], blocks: Sequence[int]) -> HostTransfer:
        """Start copying rows into unused blocks."""
        rows = [self._row_of[name] for name in names]
        for name in reversed(names):
            self._row_of.move_to_end(name)
        wanted = set(rows)
        after = [moved.copying for moved in self._under_way if moved.outwards and not wanted.isdisjoint(moved.rows)]
        return self._begin(HostTransfer(self._rows.copy_in(rows, blocks, after), names, blocks, rows, outwards=False))

    def land(self, moved: HostTransfer) -> None:
        """Steps submitted from now on read the blocks."""
        self._wait_for(moved.copying)

    def _wait_for(self, copying: Copying) -> None:
        """If the device cannot be made to wait, its memory cannot be trusted."""
        try:
            self._rows.wait_for(copying)
        except Exception as error:
            raise BackendError(f"waiting for block copies failed: {describe(error)}", fatal=True) from error

    # -- copies under way --------------------------------------------------------------------------------------

    def _begin(self, moved: HostTransfer) -> HostTransfer:
        self._busy.update(moved.rows)
        self._under_way.append(moved)
        return moved

    def settle(self) -> None:
        """Finish copies that are done."""
        for moved in list(self._under_way):
            try:
                if not moved.copying.done:
                    continue
            except Exception as error:
                self._end(moved)
                self._forget(moved)
                self.fault("copying blocks between host memory and the device", error)
            else:
                self._end(moved)
                moved.loaded = len(moved.blocks)
                speed = self.outwards if moved.outwards else self.inwards
                speed.add(len(moved.blocks) * self._rows.row_bytes, moved.copying.seconds)
                self.worked()

    def _end(self, moved: HostTransfer) -> None:
        moved.done = True
        self._under_way.remove(moved)
        self._busy -= Counter(moved.rows)
        for block in moved.blocks:
            if self._leaving.get(block) is moved.copying:
                del self._leaving[block]

    def _forget(self, moved: HostTransfer) -> None:
        """Its copies failed: the content of its rows is undefined."""
        for name in moved.names:
            if name in self._row_of:
                self._free.append(self._row_of.pop(name))

    @property
    def _copied_at_once(self) -> int:
        return max(1, COPIED_AT_ONCE_BYTES // self._rows.row_bytes)

    def restart(self) -> None:
        """The arena is new, and no copy is under way any more. Completed copies stay."""
        for moved in list(self._under_way):
            try:
                whole = moved.copying.done
            except Exception:
                whole = False
            self._end(moved)
            if not whole and moved.outwards:
                self._forget(moved)
        self._leaving.clear()

    # -- reading and reporting ---------------------------------------------------------------------------------

    def contents(self, names: Sequence[bytes], blocks: Sequence[int], most: int) -> list[NDArray[np.uint8]] | None:
        """The content of up to `most` consecutive blocks, valid until the next call. The first of them may still be in
        the arena, as `blocks`: they are then copied here first. None: that is under way, or waits for rows."""
        coming = {row for moved in self._under_way if moved.outwards for row in moved.rows}
        found: list[NDArray[np.uint8]] = []
        for name in names[:most]:
            row = self._row_of.get(name)
            if row is None or row in coming:
                break
            found.append(self._rows.row(row))
        if found or not names:
            return found
        if names[0] not in self._row_of:
            ahead = min(len(blocks), max(most, self._copied_at_once))
            self.keep(names[:ahead], blocks[:ahead])
        return None if names[0] in self._row_of or (blocks and self.pays) else []

    def numbers(self) -> HostNumbers:
        size = self._rows.row_bytes
        return HostNumbers(
            self._rows.most_rows * size,
            len(self._row_of) * size,
            self.loads,
            self.loaded_tokens,
            self.failed_loads,
            self.outwards.total,
            self.inwards.total,
        )

    def details(self) -> dict[str, Any]:
        size = self._rows.row_bytes
        return {
            "limit_bytes": self._rows.most_rows * size,
            "taken_bytes": self._rows.rows * size,
            "bytes": len(self._row_of) * size,
            "blocks": len(self._row_of),
            "copying": self.copied_blocks,
            "out_bytes_per_s": round(self.outwards.bytes_per_s),
            "in_bytes_per_s": round(self.inwards.bytes_per_s),
            "used": self.usable,
        }

    def check(self) -> None:
        """Raise AssertionError if a row is held twice, or lost."""
        rows = [*self._free, *self._row_of.values()]
        if sorted(rows) != list(range(self._seen)):
            raise AssertionError("rows of host memory are held twice, or lost")
        if self._seen > self._rows.most_rows:
            raise AssertionError("there are more rows in the host's memory than may be")
        under_way = Counter(row for moved in self._under_way for row in moved.rows)
        if under_way != self._busy:
            raise AssertionError("rows that are copied are counted wrong")
