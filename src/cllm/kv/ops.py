"""What the KV managers need from a backend's memory, and the geometry they give it.

There are two layouts. *Slots*: the backend keeps whole sequences in numbered slots and copies them itself (llama.cpp).
*Blocks*: the manager owns an arena of equal blocks and passes block tables to every step (native, torch, fake).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cllm.kv.groups import KVLayout


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    slots: int
    """Most slots."""
    slot_tokens: int
    """Positions per slot."""
    at_start: int | None = None
    """Slots allocated at the start; the others when they are needed. None: all at the start."""

    @property
    def tokens(self) -> int:
        return self.slots * self.slot_tokens

    @property
    def first(self) -> int:
        """Slots at the start, and after a rebuild."""
        return self.slots if self.at_start is None else self.at_start


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    blocks: int
    block_size: int
    """Tokens per block."""
    layout: KVLayout | None = None
    """With layers that have a window and memory of their own: what a block takes. None: one block of all layers."""

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


Geometry = SlotGeometry | BlockGeometry
SavedKV = NDArray[np.uint8]


@runtime_checkable
class SlotOps(Protocol):
    """Operations on slots. Ranges are half-open, [start, end); `end=None` means to the end."""

    @property
    def no_shift(self) -> str | None:
        """Why positions cannot be shifted; None: they can."""

    @property
    def carries_state(self) -> bool:
        """Whether layers carry a state from token to token: the end of a sequence cannot be removed, it can only go on
        from where it ends, or from where a snapshot of its state was taken."""

    def length(self, slot: int) -> int:
        """Positions in the slot according to the backend: its highest position + 1, or 0."""

    def shortest(self, slot: int, *, moved: bool = False) -> int:
        """How many of its first positions must stay when the rest is removed, for a sequence to go on behind them; 0:
        any number. More where layers with a sliding window have dropped what is out of it. `moved`: of what is copied
        or saved."""

    def shortest_saved(self, saved: SavedKV) -> int:
        """What `shortest` says, for what `save` returned."""

    def remove(self, slot: int, start: int, end: int | None = None) -> None: ...

    def copy(self, source: int, target: int) -> None:
        """Copy all of `source` to `target`, which must be empty."""

    def save(self, slot: int) -> SavedKV:
        """The slot's content as bytes, as large as what is used, not as the slot."""

    def load(self, slot: int, saved: SavedKV) -> None:
        """Restore what `save` returned into `slot`, which must be empty."""

    def snapshot(self, slot: int) -> SavedKV:
        """The state of the slot, without the K/V of its positions."""

    def restore(self, slot: int, snapshot: SavedKV, length: int) -> None:
        """Cut the slot back to `length` positions, where `snapshot` was taken, of it or of one that begins with the
        same tokens."""

    def shift(self, slot: int, start: int, end: int | None, delta: int) -> None:
        """Add `delta` to the positions in the range (RoPE is re-rotated by the backend)."""

    def no_room(self, slots: int) -> str | None:
        """Why there is not enough memory to have `slots` slots instead of the current ones; None: there is, as far as
        can be known before it is allocated."""

    def resize(self, slots: int) -> None:
        """Free all slots, then allocate `slots` empty ones.

        The old memory is freed before the new one is allocated. After a failed call the slots' contents are undefined,
        until a call succeeds. Logits of earlier steps become invalid.
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
    """Blocks as bytes, for keeping them outside the arena. Optional beside `BlockOps`."""

    @property
    def block_bytes(self) -> int:
        """Size of a block's whole content."""

    @property
    def reads_wait(self) -> bool:
        """Whether reading waits for the steps under way; it is then better done while nothing runs."""

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """The blocks' content, valid until the next call to the backend."""

    def landing(self, blocks: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """Buffers for the content of unused blocks, which another thread fills while steps run. They stay valid while
        referenced, even after the backend's memory is rebuilt."""

    def land(self, blocks: Sequence[int], content: Sequence[NDArray[np.uint8]]) -> None:
        """The buffers from `landing` are filled: make them the blocks' content."""


class Copying(Protocol):
    """A batch of copies between blocks and rows."""

    @property
    def done(self) -> bool:
        """Raises `BackendError` if they failed."""

    @property
    def seconds(self) -> float:
        """How long they took, once done."""


class HostRows(Protocol):
    """Host memory beside a GPU's arena, in rows the size of a block. Copies overlap with steps. When the backend's
    memory is rebuilt, no copy is under way any more."""

    @property
    def row_bytes(self) -> int: ...

    @property
    def most_rows(self) -> int:
        """The limit."""

    @property
    def rows(self) -> int:
        """Allocated so far. They survive, with their content, when the backend's memory is rebuilt."""

    def want_more(self, count: int) -> None:
        """Allocate at least `count` more rows, within the limit, possibly in the background."""

    def copy_out(self, blocks: Sequence[int], rows: Sequence[int]) -> Copying:
        """Copy blocks to rows after everything submitted so far. Call `wait_for` before overwriting the blocks while
        the copies are under way."""

    def copy_in(self, rows: Sequence[int], blocks: Sequence[int], after: Sequence[Copying]) -> Copying:
        """Copy rows to blocks after everything submitted so far, and `after`. Call `wait_for` before reading the
        blocks."""

    def wait_for(self, copying: Copying) -> None:
        """Order everything submitted from now on after these copies."""

    def row(self, number: int) -> NDArray[np.uint8]:
        """A row's bytes."""
