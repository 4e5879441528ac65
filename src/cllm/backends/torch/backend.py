"""The backend over torch: chunks become host batches, and a worker runs the model over them on the device.

On a GPU a step is queued, and its result fetched later: while one runs, the next is planned and queued behind it
(`depth` 2), and tokens are chosen on the device. On a CPU nothing would run meanwhile: there a step is computed when it
is collected, and the host chooses (`depth` 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch

from cllm.backends.base import NO_WINDOW_OF_STATES, Backend, BackendTraits, Chunk, StepResult, asks_more
from cllm.backends.torch.batch import Bounds, HostBatch, Tables, read_chunks, spread
from cllm.backends.torch.block_memory import BlockMemory, no_memory
from cllm.backends.torch.device import choose_device, choose_dtype, device_name, dtype_name, unsupported_heads
from cllm.backends.torch.faults import DeviceFaults, if_no_room
from cllm.backends.torch.host_rows import Rows
from cllm.backends.torch.prompt_outputs import read_asks
from cllm.backends.torch.sampling import read_draws
from cllm.backends.torch.sources import open_source, spec_of, unsupported
from cllm.backends.torch.weights import Loader, weight_bytes
from cllm.backends.torch.worker import DeviceWorker, Launched, Setup
from cllm.errors import BackendError, ModelError, StepAbortedError
from cllm.kv.ops import BlockGeometry, Geometry
from cllm.machine import MemoryLimit
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.models.load_progress import ByteProgress

GPU_STEP_TOKENS = 8192
"""A GPU is fast only with many tokens at a time, and computes this many in a fraction of a second."""
_SPARE = 1.2
"""What a profiled step took, times this, is kept free for the largest one."""
_GRAPHS_BYTES = 512 << 20
"""Kept free on a GPU for what libraries and graphs take later."""
_MOST_SPREAD = 1 << 15
"""Positions that rows made of chunks attend to, in all: each reads them by itself."""


@dataclass(frozen=True, slots=True)
class _Allocated:
    """What host batches are read with."""

    geometry: BlockGeometry
    bounds: Bounds
    tables: Tables


class TorchBackend(Backend):
    traits = BackendTraits(
        "torch",
        gives_memory_back=False,
        no_window="torch cannot drop tokens from the middle of a sequence; use --backend native or llama_cpp",
    )

    def __init__(
        self,
        model: GGUFModel | HFModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_type: str = "f16",
        invariant: bool = False,
        threads: int = 1,
        rows: int = 256,
        progress: ByteProgress | None = None,
    ) -> None:
        """`rows`: the most sequences that will be computed at once."""
        self._label = str(model.path)
        on = choose_device(device)
        self._setup = Setup(on, choose_dtype(dtype, on), kv_type, invariant, rows)
        self._faults = DeviceFaults(on)
        self._threads = threads
        self._allocated: _Allocated | None = None
        if isinstance(model, GGUFModel):
            self.traits = replace(self.traits, pooling=model.pooling)
        reason = unsupported(model)
        if reason is None:
            self.spec = spec_of(model)
            if self.spec.recurrent:
                self.traits = replace(self.traits, no_window=NO_WINDOW_OF_STATES)
            if self.on_gpu:
                # A state is only known to be right once the step that made it has counted. Blocks behind windows stay:
                # graphs have one table of blocks for each row, and what is freed could not go to the host's memory.
                depth = 1 if self.spec.recurrent else 2
                self.traits = replace(
                    self.traits, depth=depth, preferred_step_tokens=GPU_STEP_TOKENS, frees_windows=False
                )
            reason = unsupported_heads(self.spec, on, kv_type)
        if reason is not None:
            raise ModelError(f"{self._label}: the torch backend cannot run this model: {reason}")
        if on.type == "cpu":
            torch.set_num_threads(threads)
        self._worker = self._load(model, progress)

    def _load(self, model: GGUFModel | HFModel, progress: ByteProgress | None) -> DeviceWorker:
        setup, spec = self._setup, self.spec
        size = weight_bytes(spec, setup.dtype) >> 20
        no_room = ModelError(
            f"{self._label}: its weights take {size} MiB as {dtype_name(setup.dtype)}, and {setup.device} has no "
            "room for them; use a smaller model, a smaller backend.torch.dtype, or another backend.torch.device"
        )
        with if_no_room(no_room), open_source(model) as source, setup.here():
            weights = Loader(source, setup.dtype, setup.device, progress).load(spec)
        return DeviceWorker(setup, spec, weights, self._faults)

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        return self._setup.on_gpu

    @property
    def spare_blocks(self) -> int:
        return self._setup.spare_blocks

    def room(self, step_tokens: int, rows: int) -> MemoryLimit:
        """GPU memory left for K and V after the weights and a step of that size."""
        device = self._setup.device
        with self._faults.at(f"a first step of {step_tokens} tokens"):
            torch.cuda.empty_cache()
            step, graphs = self._worker.try_out(step_tokens, rows)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        left = free - int((step + graphs) * _SPARE) - _GRAPHS_BYTES
        return MemoryLimit(f"the memory of {device}", total, max(0, left), hard=True)

    def allocate(self, geometry: Geometry) -> None:
        if not isinstance(geometry, BlockGeometry):
            raise BackendError("the torch backend keeps its K/V in blocks, not in slots")
        self._reserve(geometry)
        self._worker.make_graphs()

    def rebuild(self) -> None:
        if self._allocated is None or self._worker.is_closed:
            raise no_memory()
        with self._faults.at("rebuilding its context"):
            self._reserve(self._allocated.geometry)

    def _reserve(self, geometry: BlockGeometry) -> None:
        if self.spec.recurrent and (geometry.layout is None or geometry.layout.states is None):
            raise BackendError("the torch backend keeps states in cells, but there is no layout of them")
        self._worker.allocate(geometry)
        positions = min(self.spec.context_length, geometry.tokens)
        bounds = Bounds(self.spec.n_vocab, positions, geometry.blocks)
        self._allocated = _Allocated(geometry, bounds, Tables(-(-positions // geometry.block_size)))

    @property
    def kv_bytes(self) -> int:
        return self._worker.memory.kv_bytes

    @property
    def ops(self) -> BlockMemory:
        return self._worker.memory

    def open_host_rows(self, limit: int) -> Rows:
        return self._worker.memory.open_host_rows(limit)

    # -- steps -------------------------------------------------------------------------------------------------

    def submit(self, chunks: Sequence[Chunk]) -> Launched | StepAbortedError | Sequence[Chunk]:
        """What an abort ends is under way like the others: those before it are not collected yet."""
        if self.traits.depth == 1:
            return chunks
        try:
            with self._computing(chunks):
                draws = read_draws(chunks, self.spec.n_vocab)
                return self._worker.launch(self._read(chunks, spreads=True), draws, read_asks(chunks))
        except StepAbortedError as error:
            return error

    def collect(self, ticket: Launched | StepAbortedError | Sequence[Chunk]) -> StepResult:
        if isinstance(ticket, StepAbortedError):
            raise ticket
        if not isinstance(ticket, Launched):
            return self._compute(ticket)
        try:
            return ticket.result()
        except Exception as error:
            raise self._faults.error(error, f"a step of {len(ticket.chosen.counts)} rows") from error

    def _compute(self, chunks: Sequence[Chunk]) -> StepResult:
        """A step whose tokens the host samples."""
        with self._computing(chunks):
            if chunks:
                return self._worker.compute(self._read(chunks), read_asks(chunks))
            return StepResult(np.empty((0, self.spec.n_vocab), np.float32))

    def _computing(self, chunks: Sequence[Chunk]) -> AbstractContextManager[None]:
        self._worker.aborted.clear()
        return self._faults.at(lambda: f"a step of {sum(len(chunk.tokens) for chunk in chunks)} tokens")

    def _read(self, chunks: Sequence[Chunk], *, spreads: bool = False) -> HostBatch:
        """`spreads`: with short chunks as rows of their own, if a graph can compute them: hundreds of launches take
        longer."""
        allocated = self._allocated
        if allocated is None:
            raise no_memory()
        if spreads and self.on_gpu and not asks_more(chunks):
            chunks = spread(chunks, self._setup.rows, _MOST_SPREAD)
        geometry = allocated.geometry
        return read_chunks(chunks, geometry.block_size, allocated.bounds, allocated.tables, geometry.layout)

    def abort(self) -> None:
        self._worker.aborted.set()

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._worker.close()

    def describe(self) -> str:
        setup, version = self._setup, str(torch.__version__).partition("+")[0]
        threads = "" if self.on_gpu else ", 1 thread" if self._threads == 1 else f", {self._threads} threads"
        types = f"weights {dtype_name(setup.dtype)}, K/V {setup.kv_type}"
        return f"torch {version} ({device_name(setup.device)}, {types}{threads})"

    @property
    def kv_identity(self) -> dict[str, str | int]:
        return {
            "torch": str(torch.__version__),
            "device": device_name(self._setup.device),
            "weights": dtype_name(self._setup.dtype),
            "invariant": int(self._setup.invariant),
        }
