"""Rows of the host's memory for blocks, and copies between them and the arena (`cllm.kv.ops.HostRows`).

On a GPU rows are pinned, so that the device copies by itself, on streams of its own: one outwards, one inwards. Both
begin when what was queued on the stream of the steps is done, and the steps wait for a copy only where they are told
to. Pinning takes a second for some GB, so rows are added in pieces, by a thread, as they are needed. On a CPU a copy is
done when it was asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.faults import DeviceFaults
from cllm.kv.ops import Copying

log = logging.getLogger("cllm.torch")

PIECE_BYTES = 256 << 20

Run = tuple[int, int, int]
"""A first block, a first row, and how many follow each other in both."""


@dataclass(frozen=True, slots=True)
class Done:
    """On a CPU."""

    seconds: float
    done: bool = True


class Queued:
    """On a GPU."""

    def __init__(self, begun: torch.cuda.Event, ended: torch.cuda.Event, faults: DeviceFaults) -> None:
        self.ended = ended
        self._begun = begun
        self._faults = faults

    @property
    def done(self) -> bool:
        with self._faults.at("copying blocks"):
            return bool(self.ended.query())

    @property
    def seconds(self) -> float:
        return float(self._begun.elapsed_time(self.ended)) / 1e3


class Rows:
    def __init__(self, arena: Callable[[], Arena], limit: int, faults: DeviceFaults) -> None:
        """`limit` in bytes; `arena` is asked each time, for a rebuilt backend has another."""
        self._arena = arena
        self._faults = faults
        self._device = arena().device
        self.row_bytes = arena().block_bytes
        self.most_rows = limit // self.row_bytes
        self._piece_rows = max(1, PIECE_BYTES // self.row_bytes)
        self._pieces: list[Tensor] = []
        self._growing: threading.Thread | None = None
        self._closed = False
        self.rows = self._wanted = 0
        self._on_gpu = self._device.type == "cuda"
        self._outwards, self._inwards = (torch.cuda.Stream(self._device) if self._on_gpu else None for _ in range(2))

    # -- memory ------------------------------------------------------------------------------------------------

    def want_more(self, count: int) -> None:
        self._wanted = min(max(self._wanted, self.rows + count), self.most_rows)
        if self._closed or self.rows >= self._wanted:
            return
        if not self._on_gpu:
            self._grow()
        elif self._growing is None or not self._growing.is_alive():
            self._growing = threading.Thread(target=self._grow, name="cllm-kv-pin", daemon=True)
            self._growing.start()

    def _grow(self) -> None:
        try:
            while self.rows < self._wanted and not self._closed:
                self._add_piece()
        except Exception as error:
            log.warning("host memory for K/V stays at %d MiB: %s", self.rows * self.row_bytes >> 20, error)
            self.most_rows = self.rows

    def _add_piece(self) -> None:
        count = min(self._piece_rows, self.most_rows - self.rows)
        memory = np.empty((count, self.row_bytes), np.uint8)
        piece = torch.from_numpy(memory)
        if self._on_gpu:
            memory[:] = 0  # the system gives the pages now, not while the driver holds its locks
            with torch.cuda.device(self._device):
                _check(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
        self._pieces.append(piece)
        self.rows += count

    def drain(self) -> None:
        """Nothing is under way afterwards, whatever became of it."""
        try:
            for stream in (self._outwards, self._inwards):
                if stream is not None:
                    stream.synchronize()
        except Exception as error:  # then none of them goes on
            log.debug("copies failed: %s", error)

    def close(self) -> None:
        self._closed = True
        if self._growing is not None:
            self._growing.join()
        self.drain()
        pieces, self._pieces, self.rows, self.most_rows = self._pieces, [], 0, 0
        if self._on_gpu:
            for piece in pieces:
                torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())

    def row(self, number: int) -> NDArray[np.uint8]:
        row: NDArray[np.uint8] = self._pieces[number // self._piece_rows][number % self._piece_rows].numpy()
        return row

    # -- copies ------------------------------------------------------------------------------------------------

    def copy_out(self, blocks: Sequence[int], rows: Sequence[int]) -> Copying:
        arena = self._arena()
        with self._faults.at(f"copying {len(blocks)} blocks to the host's memory"):
            both = self._both(arena, blocks, rows)
            return self._start(self._outwards, (), ((row, block) for block, row in both))

    def copy_in(self, rows: Sequence[int], blocks: Sequence[int], after: Sequence[Copying]) -> Copying:
        arena = self._arena()
        with self._faults.at(f"copying {len(blocks)} blocks from the host's memory"):
            return self._start(self._inwards, after, self._both(arena, blocks, rows))

    def wait_for(self, copying: Copying) -> None:
        if isinstance(copying, Queued):
            with self._faults.at("waiting for copies of blocks"):
                torch.cuda.current_stream(self._device).wait_event(copying.ended)

    def _start(
        self, stream: torch.cuda.Stream | None, after: Sequence[Copying], pairs: Iterator[tuple[Tensor, Tensor]]
    ) -> Copying:
        """Copy to the first of each pair from the second."""
        if stream is None:
            started = time.perf_counter()
            for target, source in pairs:
                target.copy_(source)
            return Done(time.perf_counter() - started)
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for each in after:
                assert isinstance(each, Queued)
                stream.wait_event(each.ended)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begun.record(stream)
                try:
                    for target, source in pairs:
                        target.copy_(source, non_blocking=True)
                finally:
                    ended.record(stream)
            return Queued(begun, ended, self._faults)

    def _both(self, arena: Arena, blocks: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks and rows as bytes that each lie in one piece, as many together as possible."""
        parts = arena.parts
        together = len(parts) == 1  # else a row has the parts of one block behind each other
        for block, row, count in runs(blocks, rows, self._piece_rows if together else 1):
            piece, first = self._pieces[row // self._piece_rows], row % self._piece_rows
            target, start = piece[first : first + count].view(-1), 0
            for part in parts:
                source = part[block : block + count].view(-1)
                yield source, target[start : start + len(source)]
                start += len(source)


def runs(blocks: Sequence[int], rows: Sequence[int], piece: int) -> Iterator[Run]:
    """Blocks and rows that follow each other, taken together, but for rows of different pieces."""
    start = 0
    for at in range(1, len(blocks) + 1):
        joins = at < len(blocks) and blocks[at] == blocks[at - 1] + 1 and rows[at] == rows[at - 1] + 1
        if not joins or rows[at] % piece == 0:
            yield blocks[start], rows[start], at - start
            start = at


def _check(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise MemoryError(f"cannot pin memory (CUDA error {int(code)})")  # type: ignore[call-overload]
