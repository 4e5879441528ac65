"""What the KV managers need of a backend's memory, and the geometry they give it.

Two layouts exist. *Slots*: the backend keeps whole sequences by number and moves them itself (llama.cpp). *Blocks*: the
manager owns an arena of equal blocks and hands block tables to every step (native, torch, fake).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    slots: int
    """Slots at most."""
    slot_tokens: int
    """Positions each slot has room for."""
    at_start: int | None = None
    """Slots whose memory is taken at the start, the others when they are needed (None: all at the start)."""

    @property
    def tokens(self) -> int:
        return self.slots * self.slot_tokens

    @property
    def first(self) -> int:
        """Slots that there are in the beginning, and after a rebuild."""
        return self.slots if self.at_start is None else self.at_start


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    blocks: int
    block_size: int
    """Tokens a block holds."""

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


Geometry = SlotGeometry | BlockGeometry
SavedKV = NDArray[np.uint8]


@runtime_checkable
class SlotOps(Protocol):
    """Operations on numbered sequences. Ranges are half-open, [start, end); `end=None` means to the end."""

    @property
    def no_shift(self) -> str | None:
        """Why positions cannot be shifted; None: they can."""

    def length(self, slot: int) -> int:
        """Positions the backend itself believes the slot holds: its highest position + 1, or 0."""

    def remove(self, slot: int, start: int, end: int | None = None) -> None: ...

    def copy(self, source: int, target: int) -> None:
        """Make `target`, which must be empty, hold all that `source` holds."""

    def save(self, slot: int) -> SavedKV:
        """The slot's whole content as bytes of our own, sized by what is used, not by the slot."""

    def load(self, slot: int, saved: SavedKV) -> None:
        """Make `slot`, which must be empty, hold what `save` gave."""

    def shift(self, slot: int, start: int, end: int | None, delta: int) -> None:
        """Add `delta` to the positions in the range (RoPE is re-rotated by the backend)."""

    def no_room(self, slots: int) -> str | None:
        """Why the machine has no memory for so many slots instead of those that there are; None: it has, as far as can
        be said before it is taken."""

    def resize(self, slots: int) -> None:
        """Give the memory of all slots back, then take it for so many, all of them empty.

        There are never two memories at once. After a call that fails, slots hold nothing that is to be relied on, until
        one with another number succeeds. Logits of a step are not to be read any more.
        """


class Move(NamedTuple):
    """`blocks` adjacent blocks, from `source` on, go to `target` on. The two ranges may overlap."""

    source: int
    target: int
    blocks: int


@runtime_checkable
class BlockOps(Protocol):
    """Operations on the arena of blocks."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each; no target is the source of another pair."""

    def move_blocks(self, moves: Sequence[Move]) -> None:
        """Carry out the moves one after another, each as if through a copy of its source.

        A call that fails may have done any number of them, but leaves every source that no later or failed move of
        the call overwrites as it was.
        """

    def release_pages(self, first: int, count: int) -> None:
        """The content of these blocks is not needed: give the memory that lies wholly within them back to the OS."""

    def prepare_pages(self, first: int, count: int) -> None:
        """Take the memory of these blocks, whose content is not needed, from the OS now, not at the first write."""

    def resident_bytes(self) -> int:
        """How much of the arena is in memory, as the OS says."""


@runtime_checkable
class BlockBytes(Protocol):
    """The content of blocks as bytes, for who keeps it outside the arena. A backend may have it beside `BlockOps`."""

    @property
    def block_bytes(self) -> int:
        """Of one block, all that it holds."""

    @property
    def reads_wait(self) -> bool:
        """Whether reading waits for the steps under way, so that it is better done while there are none."""

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """What these blocks hold, to be copied before anything else is asked of the backend."""

    def landing(self, blocks: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """Memory to write what these blocks, which nobody uses, are to hold; another thread does that while steps are
        computed. It is there as long as somebody has it, also after the backend's memory was renewed."""

    def land(self, blocks: Sequence[int], content: Sequence[NDArray[np.uint8]]) -> None:
        """What `landing` gave for these blocks is written: from now on they hold it."""


class Copying(Protocol):
    """Copies between blocks and rows that were asked for together."""

    @property
    def done(self) -> bool:
        """Raises `BackendError` if they failed."""

    @property
    def seconds(self) -> float:
        """What they took, once they are done."""


class HostRows(Protocol):
    """Memory of the host beside the arena, in rows of the size of a block. Copies between the two go on beside the
    steps. When the backend's memory is renewed, none is under way any more."""

    @property
    def row_bytes(self) -> int: ...

    @property
    def most_rows(self) -> int:
        """The limit."""

    @property
    def rows(self) -> int:
        """That are there by now. They stay, with what they hold, when the backend's memory is renewed."""

    def want_more(self, count: int) -> None:
        """Have so many rows more, or some more than that, within the limit. They need not be there at once."""

    def copy_out(self, blocks: Sequence[int], rows: Sequence[int]) -> Copying:
        """Copy what the blocks hold when all that was asked for before is done. Whoever has the blocks overwritten
        before the copies are done asks for `wait_for` first."""

    def copy_in(self, rows: Sequence[int], blocks: Sequence[int], after: Sequence[Copying]) -> Copying:
        """Copy rows into blocks, when all that was asked for before is done, and `after`. Whoever has the blocks read
        asks for `wait_for` first."""

    def wait_for(self, copying: Copying) -> None:
        """What is asked of the backend from now on takes effect after these copies."""

    def row(self, number: int) -> NDArray[np.uint8]:
        """A row's bytes."""
