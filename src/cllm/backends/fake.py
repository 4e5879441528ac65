"""A backend without a model, for tests of the scheduler and the cache, and for trying the server without a download.

The logits of a row are a hash of what its memory really holds at positions [0, n): a wrong block, a stale slot or a
shifted position changes the output. Latency and faults come on demand.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import (
    NO_WINDOW_OF_STATES,
    Backend,
    BackendTraits,
    Chunk,
    Hidden,
    Layout,
    Logits,
    Pooling,
    PromptScores,
    Scoring,
    StepResult,
)
from cllm.backends.scoring import pool_rows, score_rows
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.ops import BlockGeometry, BlockOps, Geometry, Move, SavedKV, SlotGeometry, SlotOps
from cllm.models.spec import AttentionSpec, LayerSpec, ModelSpec, ShortConvSpec

CONTEXT = 4096
"""Without a longer one being asked for."""
_POSITIONS = 1 << 16
END_TOKEN = 257
_INEXACT = -7
"""What a local layer has of a token for which the layer below lacked a part of its window."""
_LOCAL = 1_000_000
"""What a local layer adds to tokens, once for each."""
_STATE_PART = 32
"""Values of a part of a state: it takes as much as a block of 16 tokens."""
_STEP = 0x9E3779B97F4A7C15
"""A state is the hash of all tokens in their order: with each it is multiplied by this."""
_PRINTABLE = [*range(97, 123), 32]


@dataclass(slots=True)
class InjectedFaults:
    """What goes wrong, set by tests. `before_step` may raise, or corrupt memory, with the step's chunks in hand."""

    before_step: Callable[[Sequence[Chunk]], None] | None = None
    steps_to_fail: int = 0
    fatal: bool = False
    rebuilds: int = field(default=0, init=False)


class FakeBackend(Backend):
    traits = BackendTraits("fake", most_drafts=64, rebuilds_windows=True)

    def __init__(
        self,
        *,
        vocab_size: int = 320,
        latency_s: float = 0.0,
        context_length: int = CONTEXT,
        layout: Layout = "blocks",
        window: int = 0,
        local_layers: int = 2,
        states: int = 0,
    ) -> None:
        """It imitates either layout: the memory that it is given decides, `layout` says which to give it. `window`: it
        has so many layers that attend to the last `window` tokens, and keeps a block of each in a cell. `states`: it
        carries a state of about so many blocks' bytes."""
        self.traits = replace(self.traits, layout=layout)
        if states:
            self.traits = replace(self.traits, most_drafts=0, no_window=NO_WINDOW_OF_STATES)
        local = (LayerSpec(AttentionSpec(1, 1, 2, 2, window=window)),) * (local_layers if window else 0)
        if states:
            local += (LayerSpec(None, recurrence=ShortConvSpec(_STATE_PART, states + 1)),)
        self.spec = ModelSpec("fake", 8, vocab_size, context_length, (LayerSpec(AttentionSpec(1, 1, 2, 2)), *local))
        self.faults = InjectedFaults()
        self.latency_s = latency_s
        self.computed_tokens = 0
        self._weights, self._vocab_hash = _hashes(vocab_size, context_length)
        self._boost = np.zeros(vocab_size, dtype=np.float32)
        self._boost[_PRINTABLE] = 4.0
        self._boost[END_TOKEN] = 4.0
        self._aborted = threading.Event()
        self._memory: _FakeSlots | FakeBlocks | None = None
        self._geometry: Geometry | None = None

    @property
    def resizes_slots(self) -> bool:
        return True

    @property
    def kv_identity(self) -> dict[str, str | int]:
        return {"vocabulary": self.spec.n_vocab}

    def allocate(self, geometry: Geometry) -> None:
        self._geometry = geometry
        slots = isinstance(geometry, SlotGeometry)
        self.traits = replace(self.traits, layout="slots" if slots else "blocks")
        self._memory = (
            _FakeSlots(geometry)
            if isinstance(geometry, SlotGeometry)
            else FakeBlocks(geometry, self.spec.attentions[-1].window)
        )

    @property
    def memory(self) -> _FakeSlots | FakeBlocks:
        if self._memory is None:
            raise BackendError("the fake backend has no memory: call allocate first")
        return self._memory

    @property
    def kv_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def ops(self) -> SlotOps | BlockOps:
        return self.memory

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        self._aborted.clear()
        if self.faults.before_step is not None:
            self.faults.before_step(chunks)
        if self.faults.steps_to_fail > 0:
            self.faults.steps_to_fail -= 1
            raise BackendError("injected fault", fatal=self.faults.fatal)
        if self.latency_s and self._aborted.wait(self.latency_s):
            raise StepAbortedError("the step was aborted")
        wanted = [row for chunk in chunks for row in self._compute(chunk)]
        logits = np.stack(wanted) if wanted else np.empty((0, self.spec.n_vocab), dtype=np.float32)
        return StepResult(logits, None, {i: self._read(chunk) for i, chunk in enumerate(chunks) if chunk.asks})

    def _read(self, chunk: Chunk) -> PromptScores | Hidden:
        rows = [self._row(chunk, chunk.start + count) for count in range(1, len(chunk.tokens) + 1)]
        if isinstance(chunk.asks, Scoring):
            scored = np.stack(rows)[: len(chunk.asks.targets)]
            return score_rows(scored, chunk.asks.targets, chunk.asks.top)
        assert isinstance(chunk.asks, Pooling)
        return pool_rows(np.stack(rows)[:, : self.spec.n_embd], chunk, chunk.asks)

    def _compute(self, chunk: Chunk) -> list[Logits]:
        tokens = np.asarray(chunk.tokens, dtype=np.int32)
        self.memory.write(chunk, tokens)
        self.computed_tokens += len(tokens)
        end = chunk.start + len(tokens)
        return [self._row(chunk, length) for length in range(end - chunk.wanted_logits + 1, end + 1)]

    def _row(self, chunk: Chunk, length: int) -> Logits:
        """The logits of the last of these positions."""
        context = self.memory.read(chunk, length).astype(np.uint64) + np.uint64(1)
        context += self.memory.dropped_before(chunk, length).astype(np.uint64) << np.uint64(20)
        mixed = int((context * self._weights[: len(context)]).sum(dtype=np.uint64))
        mixed ^= chunk.dropped * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF
        if chunk.local is not None:
            mixed ^= self.memory.local_differences(chunk, length, self.spec.attentions[-1].window)
        return self._logits(mixed)

    def _logits(self, mixed: int) -> Logits:
        hashed = (self._vocab_hash ^ np.uint64(mixed)) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(29)
        hashed *= np.uint64(0xBF58476D1CE4E5B9)
        spread = (hashed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)
        logits: Logits = spread + self._boost
        return logits

    def abort(self) -> None:
        self._aborted.set()

    def rebuild(self) -> None:
        self.faults.rebuilds += 1
        assert self._geometry is not None
        # The managers keep the operations object, so the memory is emptied in place.
        self.memory.wipe()

    def close(self) -> None:
        self._memory = None


@cache
def _hashes(vocab_size: int, context: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """A random number for every position, and for every token of the vocabulary; always the same ones."""
    random = np.random.default_rng(7)
    positions = random.integers(1, 1 << 62, _POSITIONS, dtype=np.uint64)
    vocabulary = random.integers(1, 1 << 62, vocab_size, dtype=np.uint64)
    more = random.integers(1, 1 << 62, max(context - _POSITIONS, 0), dtype=np.uint64)
    return np.concatenate((positions, more)), vocabulary


def state_after(tokens: NDArray[np.int32] | array[int], state: int = 0) -> int:
    """The state after these tokens, which come behind those of another state."""
    powers = np.full(len(tokens) + 1, _STEP, np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    added = (np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * powers[:-1][::-1]
    return (state * int(powers[-1]) + int(added.sum(dtype=np.uint64))) & 0xFFFF_FFFF_FFFF_FFFF


class FakeBlocks:
    """An arena of blocks of tokens, and of how many tokens had been dropped when each was computed: that is what K and
    V of a real model depend on, too."""

    def __init__(self, geometry: BlockGeometry, window: int) -> None:
        self.window = window
        self._size = geometry.block_size
        self._geometry = geometry
        self.wipe()

    @property
    def nbytes(self) -> int:
        return int(self._arena.nbytes)

    def write(self, chunk: Chunk, tokens: NDArray[np.int32]) -> None:
        table = np.asarray(chunk.blocks, dtype=np.int64)
        new = np.arange(max(chunk.start, chunk.known), chunk.start + len(tokens))
        written = table[new // self._size]
        self._arena[written, new % self._size] = tokens[new - chunk.start]
        self._dropped[written, new % self._size] = chunk.dropped
        self._resident[written] = True
        positions = np.arange(chunk.start, chunk.start + len(tokens))
        exact = np.ones(len(tokens), np.bool_)
        for number, cells in enumerate(self._local_cells(chunk), start=1):
            written = cells[positions // self._size]
            assert (written >= 0).all(), "a local block is written that the table does not have"
            self._arena[written, positions % self._size] = np.where(exact, tokens + number * _LOCAL, _INEXACT)
            self._resident[written] = True
            if chunk.start < chunk.known:
                exact &= self._sees_all(chunk, cells, number, positions)

        if chunk.state is not None:
            self._write_state(chunk, tokens)

    def _sees_all(
        self, chunk: Chunk, cells: NDArray[np.int64], number: int, positions: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether a local layer has all of the window of these positions, and right."""
        end = int(positions[-1]) + 1
        every = np.arange(end)
        there = np.where(
            cells[every // self._size] >= 0, self._arena[cells[every // self._size], every % self._size], -1
        )
        wrong = np.concatenate(([0], np.cumsum(there != self.read(chunk, end) + number * _LOCAL)))
        right: NDArray[np.bool_] = wrong[positions + 1] == wrong[np.maximum(positions + 1 - self.window, 0)]
        return right

    def _write_state(self, chunk: Chunk, tokens: NDArray[np.int32]) -> None:
        """Every cell of the state holds the hash, each turned into something of its own."""
        state = chunk.state
        assert state is not None and state.write, "there is nowhere to write the state"
        assert not set(state.read) & set(state.write), "a state is written over itself"
        hashed = state_after(tokens, self.state_in(state.read))
        for number, cell in enumerate(state.write):
            self._cells[cell].reshape(-1).view(np.uint64)[:] = hashed ^ number
            self._resident[cell] = True

    def state_in(self, cells: Sequence[int]) -> int:
        """The hash in these cells, or something else if they do not agree; 0 in none."""
        words = [self._cells[cell].reshape(-1).view(np.uint64) ^ np.uint64(i) for i, cell in enumerate(cells)]
        found = np.unique(words).tolist() if words else [0]
        return int(found[0]) if len(found) == 1 else len(found)

    def state_differences(self, chunk: Chunk, length: int) -> int:
        """0 if the state that the chunk began with, and its tokens since then, make the state after all tokens."""
        assert chunk.state is not None
        tokens = self.read(chunk, length)
        return state_after(tokens[chunk.start :], self.state_in(chunk.state.read)) ^ state_after(tokens)

    def _local_cells(self, chunk: Chunk) -> list[NDArray[np.int64]]:
        """For each local layer the cells of all blocks up to the table's end; -1: not in the table."""
        table = chunk.local
        if table is None or not table.blocks:
            return []
        cells = np.asarray(table.cells, dtype=np.int64).reshape(len(table.blocks), -1)
        before = np.full((table.first, cells.shape[1]), -1)
        return list(np.concatenate((before, cells)).T)

    def local_differences(self, chunk: Chunk, length: int, window: int) -> int:
        """0 if the local layers' memory holds the same tokens inside the window as the full one's."""
        positions = np.arange(max(0, length - window), length)
        tokens = self.read(chunk, length)[positions]
        different = 0
        for number, cells in enumerate(self._local_cells(chunk), start=1):
            there = self._arena[cells[positions // self._size], positions % self._size] - number * _LOCAL
            different += int(np.abs(there.astype(np.int64) - tokens).sum())
        return different

    def read(self, chunk: Chunk, length: int) -> NDArray[np.int32]:
        table = np.asarray(chunk.blocks[: -(-length // self._size)], dtype=np.int64)
        cells: NDArray[np.int32] = self._arena[table].reshape(-1)[:length]
        return cells

    def dropped_before(self, chunk: Chunk, length: int) -> NDArray[np.int32]:
        table = np.asarray(chunk.blocks[: -(-length // self._size)], dtype=np.int64)
        cells: NDArray[np.int32] = self._dropped[table].reshape(-1)[:length]
        return cells

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._arena[target] = self._arena[source]
            self._dropped[target] = self._dropped[source]
            self._resident[target] = True

    def move_blocks(self, moves: Sequence[Move]) -> None:
        for source, target, count in moves:
            self._check_run(source, count)
            self._check_run(target, count)
        for source, target, count in moves:
            self._arena[target : target + count] = self._arena[source : source + count].copy()
            self._dropped[target : target + count] = self._dropped[source : source + count].copy()
            self._resident[target : target + count] = True

    def release_pages(self, first: int, count: int) -> None:
        self._check_run(first, count)
        self._arena[first : first + count] = -1
        self._resident[first : first + count] = False

    def prepare_pages(self, first: int, count: int) -> None:
        self._check_run(first, count)
        self._arena[first : first + count] = -1
        self._resident[first : first + count] = True

    def resident_bytes(self) -> int:
        return int(self._resident.sum()) * self._arena.itemsize * self._size

    def _check_run(self, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > len(self._arena):
            raise BackendError(f"there are not {count} blocks from {first} on: the arena has {len(self._arena)}")

    def wipe(self) -> None:
        """With new memory: a loader may still write to the old one."""
        self._cells = np.zeros((self._geometry.blocks, 2, self._size), np.int32)
        self._arena, self._dropped = self._cells[:, 0], self._cells[:, 1]
        self._arena.fill(-1)
        self._resident = np.zeros(self._geometry.blocks, np.bool_)

    reads_wait = False

    @property
    def block_bytes(self) -> int:
        return int(self._cells[0].nbytes)

    def read_blocks(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        return [self._cells[block].reshape(-1).view(np.uint8) for block in blocks]

    def landing(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        self._resident[list(blocks)] = True
        return self.read_blocks(blocks)

    def land(self, blocks: Sequence[int], content: Sequence[NDArray[np.uint8]]) -> None:
        """They lie there already."""


class _FakeSlots:
    """Numbered sequences of tokens, each with its own positions, as llama.cpp keeps them."""

    no_shift: str | None = None
    carries_state = False

    def __init__(self, geometry: SlotGeometry) -> None:
        self._first = geometry.first
        self._capacity = geometry.slot_tokens
        self._cells: list[dict[int, int]] = []
        self.wipe()

    @property
    def nbytes(self) -> int:
        return len(self._cells) * self._capacity * 4

    def write(self, chunk: Chunk, tokens: NDArray[np.int32]) -> None:
        cells = self._cells[chunk.slot]
        if len(cells) + len(tokens) > self._capacity:
            raise BackendError(f"slot {chunk.slot} has no room for {len(tokens)} more tokens")
        for offset, token in enumerate(tokens.tolist()):
            cells[chunk.start + offset] = token

    def read(self, chunk: Chunk, length: int) -> NDArray[np.int32]:
        cells = self._cells[chunk.slot]
        return np.array([cells.get(position, -1) for position in range(length)], dtype=np.int32)

    def dropped_before(self, chunk: Chunk, length: int) -> NDArray[np.int32]:
        return np.zeros(length, np.int32)

    def local_differences(self, chunk: Chunk, length: int, window: int) -> int:
        return 0

    def state_differences(self, chunk: Chunk, length: int) -> int:
        return 0

    def length(self, slot: int) -> int:
        return max(self._cells[slot], default=-1) + 1

    def remove(self, slot: int, start: int, end: int | None = None) -> None:
        stop = sys.maxsize if end is None else end
        self._cells[slot] = {p: t for p, t in self._cells[slot].items() if not start <= p < stop}

    def copy(self, source: int, target: int) -> None:
        self.load(target, self.save(source))

    def save(self, slot: int) -> SavedKV:
        cells = self._cells[slot]
        return np.array([*cells.keys(), *cells.values()], dtype=np.int32).view(np.uint8)

    def load(self, slot: int, saved: SavedKV) -> None:
        if self._cells[slot]:
            raise BackendError(f"slot {slot} is not empty")
        positions, tokens = saved.view(np.int32).reshape(2, -1).tolist()
        self._cells[slot] = dict(zip(positions, tokens, strict=True))

    def shift(self, slot: int, start: int, end: int | None, delta: int) -> None:
        stop = sys.maxsize if end is None else end
        moved = {(p + delta if start <= p < stop else p): t for p, t in self._cells[slot].items()}
        if len(moved) != len(self._cells[slot]) or any(position < 0 for position in moved):
            raise BackendError(f"shifting slot {slot} by {delta} would put two tokens at one position")
        self._cells[slot] = moved

    def snapshot(self, slot: int) -> SavedKV:
        raise BackendError("the fake backend's slots have no state")

    def restore(self, slot: int, snapshot: SavedKV, length: int) -> None:
        raise BackendError("the fake backend's slots have no state")

    def shortest(self, slot: int, *, moved: bool = False) -> int:
        return 0

    def shortest_saved(self, saved: SavedKV) -> int:
        return 0

    def no_room(self, slots: int) -> str | None:
        return None

    def resize(self, slots: int) -> None:
        self._cells = [{} for _ in range(slots)]

    def wipe(self) -> None:
        self.resize(self._first)
