"""The backend over the C++ engine: chunks become three arrays, and one call computes them.

    chunks ──► tokens   5 9 2 8 4 7 …     of all chunks, one after another
               rows     4 0 1 2 0 0       a chunk each: tokens, first position, wanted logits, blocks, dropped, kept;
                                          first block and blocks of local layers that have their own, and how far
                                          the others are known; cells that states are read from and written to
               table    7 3 9 4 0 …       all block tables, one after another

The engine checks what it is given against its own geometry, so a wrong block or position is an error here, never a
write outside the arena.
"""

from __future__ import annotations

import hashlib
import logging
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cllm._native import Engine, instruction_sets
from cllm.backends.base import (
    NO_WINDOW_OF_STATES,
    Backend,
    BackendTraits,
    Chunk,
    Hidden,
    Logits,
    Pooling,
    PromptScores,
    Scoring,
    StepResult,
    asks_more,
)
from cllm.backends.native.loader import load_engine, unsupported
from cllm.errors import BackendError, ConfigError, ModelError, StepAbortedError
from cllm.kv.ops import BlockGeometry, Geometry, Move
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec
from cllm.models.load_progress import LoadProgress

log = logging.getLogger("cllm")

_NO_WINDOW = (
    "some layers of this model have a sliding window of their own; use --backend llama_cpp and set kv.window.recent"
)
_POOLING = {"last": 1, "mean": 2, "cls": 3}
_SCORE_COLUMNS = 90
"""What going over a row of logits to score it costs, as columns of the head's weights."""


class NativeBackend(Backend):
    traits = BackendTraits("native", most_drafts=64, rebuilds_windows=True)

    def __init__(
        self,
        model: GGUFModel,
        *,
        threads: int,
        instruction_set: str,
        kv_type_k: str,
        kv_type_v: str,
        large_pages: bool = True,
        context: int | None = None,
    ) -> None:
        """`context`: the longest text, if that is less than the model was trained for."""
        _check_instruction_set(instruction_set)
        if (reason := unsupported(model)) is not None:
            raise ModelError(f"{model.path}: the native engine cannot run this model: {reason}")
        self.spec = decoder_spec(model, context)
        self.traits = replace(self.traits, pooling=model.pooling, score_weight=1 + _head_share(model))
        if any(attention.window for attention in self.spec.attentions):
            self.traits = replace(self.traits, no_window=_NO_WINDOW)
        if self.spec.recurrent:
            self.traits = replace(self.traits, most_drafts=0, no_window=NO_WINDOW_OF_STATES)
        self._kv_types = kv_type_k, kv_type_v
        self._large_pages = large_pages
        self._geometry: BlockGeometry | None = None
        self._logits = self._room_for_logits(1)
        self._memory: NDArray[np.uint8] | None = None
        """All blocks as bytes, from the first time they are needed."""
        with LoadProgress(model.path.name) as progress:
            self._engine: Engine | None = load_engine(
                model, threads=threads, spec=self.spec, instruction_set=instruction_set, progress=progress
            )
        if instruction_set == "auto" and self._engine.instruction_set != (best := instruction_sets()[0]):
            log.warning(
                "this CPU has %s, but the system does not let this process use it; using %s",
                *(best, self._engine.instruction_set),
            )

    def allocate(self, geometry: Geometry) -> None:
        if not isinstance(geometry, BlockGeometry):
            raise BackendError("the native engine keeps its K/V in blocks, not in slots")
        self._reserve(geometry)
        self._geometry = geometry

    @property
    def kv_bytes(self) -> int:
        return self._ready().kv_bytes

    @property
    def ops(self) -> NativeBackend:
        self._ready()
        return self

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._memory_work("copy blocks") as engine:
            engine.copy_blocks(np.array(pairs, np.int32).reshape(-1, 2))

    def move_blocks(self, moves: Sequence[Move]) -> None:
        with self._memory_work("move blocks") as engine:
            engine.move_blocks(np.array(moves, np.int32).reshape(-1, 3))

    def release_pages(self, first: int, count: int) -> None:
        with self._memory_work("give memory back") as engine:
            engine.release_pages(first, count)

    def prepare_pages(self, first: int, count: int) -> None:
        with self._memory_work("take memory ahead") as engine:
            engine.prepare_pages(first, count)

    def resident_bytes(self) -> int:
        with self._memory_work("say what is in memory") as engine:
            return engine.resident_bytes()

    reads_wait = False

    @property
    def block_bytes(self) -> int:
        assert self._geometry is not None
        return self.kv_bytes // self._geometry.blocks

    def read_blocks(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Where they lie: nothing is copied."""
        if self._memory is None:
            with self._memory_work("show its memory") as engine:
                self._memory = engine.memory()
        try:
            return [self._memory[block] for block in blocks]
        except IndexError as error:
            raise BackendError(f"no such block, the native engine has {len(self._memory)}: {error}") from error

    def landing(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The blocks themselves: no step writes to unused blocks."""
        return self.read_blocks(blocks)

    def land(self, blocks: Sequence[int], content: Sequence[NDArray[np.uint8]]) -> None:
        """They lie there already."""

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        return self._read_prompts(chunks) if asks_more(chunks) else StepResult(self._step(chunks))

    def _step(self, chunks: Sequence[Chunk]) -> Logits:
        """The rows lie in one buffer that every step uses again."""
        engine = self._ready()
        if not chunks:
            return self._logits[:0]
        with _refusals(chunks):
            tokens, rows, table = _as_arrays(chunks)
            logits = self._rows_for(rows)
            finished = engine.step(tokens, rows, table, logits)
        if not finished:
            raise StepAbortedError("the step was aborted")
        return logits

    def _read_prompts(self, chunks: Sequence[Chunk]) -> StepResult:
        engine, outputs = self._ready(), _Outputs(chunks, self.spec.n_embd)
        with _refusals(chunks):
            tokens, rows, table = _as_arrays(chunks)
            logits = self._rows_for(rows)
            finished = engine.read_prompts(
                tokens, rows, table, logits, outputs.wants, outputs.targets, *outputs.scores, outputs.hidden
            )
        if not finished:
            raise StepAbortedError("the step was aborted")
        return StepResult(logits, None, outputs.by_chunk(chunks))

    def _rows_for(self, rows: NDArray[np.int32]) -> Logits:
        wanted = int(rows[:, 2].sum())
        if wanted > len(self._logits):
            self._logits = self._room_for_logits(2 * wanted)  # pages that no row reaches are never touched
        return self._logits[:wanted]

    def abort(self) -> None:
        engine = self._engine  # read once: another thread may be closing
        if engine is not None:
            engine.abort()

    def rebuild(self) -> None:
        self._ready()
        assert self._geometry is not None
        self._reserve(self._geometry)

    def close(self) -> None:
        self._engine = self._memory = None

    @property
    def kv_identity(self) -> dict[str, str | int]:
        spec = hashlib.sha256(repr(self.spec).encode()).hexdigest()  # LongRoPE turns keys by how long texts may be
        own = {"layout": "tiles of 16", "instructions": self._open().instruction_set, "build": _build()}
        return {**own, "spec": spec[:16]}

    def describe(self) -> str:
        engine = self._open()
        threads = "1 thread" if engine.threads == 1 else f"{engine.threads} threads"
        return f"native ({engine.instruction_set}), {threads}"

    def _open(self) -> Engine:
        if self._engine is None:
            raise BackendError("the native engine is closed", fatal=True)
        return self._engine

    def _ready(self) -> Engine:
        if self._engine is None or self._geometry is None:
            raise BackendError("the native engine has no memory: allocate() was not called, or close() was", fatal=True)
        return self._engine

    @contextmanager
    def _memory_work(self, what: str) -> Iterator[Engine]:
        """Whatever the engine or the OS refuses is an error of this call, not the end of the engine."""
        try:
            yield self._ready()
        except (ValueError, OverflowError, MemoryError, RuntimeError) as error:
            raise BackendError(f"the native engine could not {what}: {str(error) or 'out of memory'}") from error

    def _reserve(self, geometry: BlockGeometry) -> None:
        self._memory, layout = None, geometry.layout
        states = None if layout is None else layout.states
        try:
            self._open().allocate(
                cells=geometry.blocks,
                block_size=geometry.block_size,
                type_k=self._kv_types[0],
                type_v=self._kv_types[1],
                large_pages=self._large_pages,
                cell_bytes=0 if layout is None else layout.cell_bytes,
                groups=() if layout is None else [(group.layers, group.cells) for group in layout.groups],
                state_cells=0 if states is None else states.cells,
                states=() if states is None else list(zip(states.layers, states.places, strict=True)),
            )
        except ValueError as error:
            raise ConfigError(f"the native engine cannot keep K/V as configured: {error}") from error
        except MemoryError as error:
            raise ConfigError(
                f"not enough address space for {geometry.tokens} tokens of K/V; lower resources.kv_cache_max_memory_mb"
            ) from error

    def _room_for_logits(self, rows: int) -> Logits:
        return np.empty((rows, self.spec.n_vocab), np.float32)


class _Outputs:
    """Buffers for what chunks ask for besides logits."""

    def __init__(self, chunks: Sequence[Chunk], n_embd: int) -> None:
        wants: list[int] = []
        before: list[Hidden | None] = []
        targets: array[int] = array("i")
        top = 0
        for chunk in chunks:
            asks = chunk.asks
            if isinstance(asks, Scoring):
                targets += asks.targets
                top = max(top, asks.top)
            elif isinstance(asks, Pooling):
                before.append(asks.before)
            wants += (
                len(asks.targets) if isinstance(asks, Scoring) else 0,
                _POOLING[asks.kind] if isinstance(asks, Pooling) else 0,
            )
        count = len(targets)
        self.wants = np.array(wants, np.int32).reshape(-1, 2)
        self.targets: NDArray[np.int32] = np.frombuffer(targets, np.int32) if count else np.empty(0, np.int32)
        self.scores = PromptScores(
            np.empty(count), np.empty(count, np.int32), np.empty((count, top), np.int32), np.empty((count, top))
        )
        self.hidden = np.zeros((len(before), n_embd))
        for row, known in zip(self.hidden, before, strict=True):
            if known is not None:
                row += known

    def by_chunk(self, chunks: Sequence[Chunk]) -> dict[int, PromptScores | Hidden]:
        read: dict[int, PromptScores | Hidden] = {}
        scored = pooled = 0
        for index, chunk in enumerate(chunks):
            asks = chunk.asks
            if isinstance(asks, Scoring):
                rows = slice(scored, scored + len(asks.targets))
                logprobs, ranks, ids, tops = self.scores
                read[index] = PromptScores(logprobs[rows], ranks[rows], ids[rows, : asks.top], tops[rows, : asks.top])
                scored = rows.stop
            elif asks is not None:
                read[index] = self.hidden[pooled]
                pooled += 1
        return read


@contextmanager
def _refusals(chunks: Sequence[Chunk]) -> Iterator[None]:
    try:
        yield
    except (ValueError, MemoryError) as error:
        reason, count = str(error) or "out of memory", sum(len(chunk.tokens) for chunk in chunks)
        raise BackendError(f"the native engine refused a step of {count} tokens: {reason}") from error


def _head_share(model: GGUFModel) -> float:
    """The cost of a token's logits, relative to that of its layers."""
    layers = sum(math.prod(info.shape) for name, info in model.tensors.items() if name.startswith("blk."))
    return (model.spec.n_embd + _SCORE_COLUMNS) * model.spec.n_vocab / max(layers, 1)


@cache
def _build() -> str:
    """What was compiled: other kernels may round otherwise."""
    from cllm import _native

    assert _native.__file__ is not None
    return hashlib.blake2b(Path(_native.__file__).read_bytes(), digest_size=16).hexdigest()


def _as_arrays(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    # In every step, for every block of every sequence: one call of C per chunk and list, nothing per item.
    tokens: array[int] = array("i")
    table: array[int] = array("i")
    rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.tokens
        table.fromlist(chunk.blocks)
        rows += (len(chunk.tokens), chunk.start, chunk.wanted_logits, len(chunk.blocks), chunk.dropped, chunk.kept)
        if chunk.local is not None:
            table.fromlist(chunk.local.cells)
            rows += (chunk.local.first, len(chunk.local.blocks), chunk.known)
        if chunk.state is not None:
            read, write = chunk.state.read, chunk.state.write
            table.fromlist(read)
            table.fromlist(write)
            rows += (len(read), len(write))
    return (
        np.frombuffer(tokens, np.int32),
        np.array(rows, np.int32).reshape(len(chunks), -1),
        np.frombuffer(table, np.int32),
    )


def _check_instruction_set(asked: str) -> None:
    available = instruction_sets()
    if asked != "auto" and asked not in available:
        raise ConfigError(
            f"backend.native.instruction_set is {asked}, but this CPU and build have {', '.join(available)}; use auto"
        )
