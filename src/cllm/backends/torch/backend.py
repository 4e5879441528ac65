"""The backend over torch: chunks become tensors, the model runs over them, and tokens are chosen on the device.

On a GPU a step is queued, and its result fetched later: while one runs, the next is planned and queued behind it
(`depth` 2). Everything is on one stream, so steps and memory operations take effect in the order they are asked for.
On a CPU nothing would run meanwhile: there a step is computed at once, and the host chooses (`depth` 1).

K and V lie in one tensor of blocks on the device. A GPU's is taken whole when it is allocated, a CPU's as it is used;
no part of it goes back, so `release_pages` and `prepare_pages` have nothing to do here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cllm.backends.base import BackendTraits, Chunk, StepResult, asks_more
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import ROW_NUMBERS, Bounds, HostBatch, Tables, batch_on, read_chunks, spread
from cllm.backends.torch.blocks import Blocks
from cllm.backends.torch.device import (
    choose_device,
    choose_dtype,
    choose_operations,
    choose_sampler,
    device_name,
    dtype_name,
    is_out_of_memory,
    unsupported_heads,
)
from cllm.backends.torch.graphs import DecodeGraphs, Ran
from cllm.backends.torch.memory import Memory
from cllm.backends.torch.model import Model, Weights
from cllm.backends.torch.padded_step import PaddedStep
from cllm.backends.torch.profiling import draws_of_all_kinds, kept_bytes, peak_bytes, whole_prompts
from cllm.backends.torch.prompt_outputs import Queued, fetch, read_states
from cllm.backends.torch.sampling import Chosen, HostDraws, Sampler, choose, chosen_already, read_draws
from cllm.backends.torch.sources import decoder_of, open_source, unsupported
from cllm.backends.torch.staging import upload
from cllm.backends.torch.weights import Loader, Progress, weight_bytes
from cllm.errors import BackendError, CLLMError, ConfigError, ModelError, StepAbortedError
from cllm.kv.ops import BlockGeometry, Geometry
from cllm.machine import MemoryLimit
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel

log = logging.getLogger("cllm.torch")

GPU_STEP_TOKENS = 8192
"""A GPU is fast only with many tokens at a time, and computes this many in a fraction of a second."""
_SPARE = 1.2
"""What a profiled step took, times this, is kept free for the largest one."""
_GRAPHS_BYTES = 512 << 20
"""Kept free on a GPU for what libraries and graphs take later."""
_TRIED_BLOCK = 16
_MOST_SPREAD = 1 << 15
"""Positions that rows made of chunks attend to, in all: each reads them by itself."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A step under way, or why it is not."""

    chosen: Chosen | None = None
    done: torch.cuda.Event | None = None
    error: BackendError | None = None
    queued: Queued = field(default_factory=dict)


class TorchBackend(Blocks):
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
        progress: Progress | None = None,
    ) -> None:
        """`rows`: the most sequences that will be computed at once."""
        self.shape = model.shape
        self._label = str(model.path)
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        self._kv_type = kv_type
        self._invariant = invariant
        if isinstance(model, GGUFModel):
            self.traits = replace(self.traits, pooling=model.pooling)
        if self.on_gpu:
            self.traits = replace(self.traits, depth=2, preferred_step_tokens=GPU_STEP_TOKENS)
        self._operations = choose_operations(self._device)
        self._sampler: Sampler = choose_sampler(self._device)
        self._threads = threads
        self._rows = rows
        self._aborted = threading.Event()
        self._geometry: BlockGeometry | None = None
        self._memory: Memory | None = None
        reason = unsupported(model) or unsupported_heads(self.shape.head_dim_k, self._device)
        if reason is not None:
            raise ModelError(f"{self._label}: the torch backend cannot run this model: {reason}")
        self._decoder = decoder_of(model)
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        self._weights: Weights | None = self._load(model, progress)

    def _load(self, model: GGUFModel | HFModel, progress: Progress | None) -> Weights:
        try:
            with open_source(model) as source, self._here():
                return Loader(source, self._dtype, self._device, progress).load(self._decoder)
        except CLLMError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = weight_bytes(self._decoder, self._dtype) >> 20
            raise ModelError(
                f"{self._label}: its weights take {size} MiB as {dtype_name(self._dtype)}, and {self._device} has no "
                "room for them; use a smaller model, a smaller backend.torch.dtype, or another backend.torch.device"
            ) from error

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _here(self) -> AbstractContextManager[object]:
        """Kernels and graphs are for the thread's current device, and every thread has its own."""
        return torch.cuda.device(self._device) if self.on_gpu else nullcontext()

    @property
    def spare_blocks(self) -> int:
        """Blocks besides those of the pool: padded rows of graphs write there."""
        return int(self.on_gpu)

    def room(self, step_tokens: int, rows: int) -> MemoryLimit:
        """GPU memory left for K and V after the weights and a step of that size."""
        try:
            with self._here(), torch.inference_mode():
                torch.cuda.empty_cache()
                step, graphs = self._try_out(step_tokens, rows)
        except CLLMError:
            raise
        except Exception as error:
            raise self._failure(error, f"a first step of {step_tokens} tokens") from error
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        left = free - int((step + graphs) * _SPARE) - _GRAPHS_BYTES
        return MemoryLimit(f"the memory of {self._device}", total, max(0, left), hard=True)

    def _try_out(self, tokens: int, rows: int) -> tuple[int, int]:
        """Bytes that the largest step takes at once, and those that graphs keep."""
        chunks = whole_prompts(tokens, self.shape.context_length, _TRIED_BLOCK)
        memory = self._reserve(BlockGeometry(len(chunks[0].blocks), _TRIED_BLOCK))
        assert memory.graphs is not None
        forward = peak_bytes(self._device, lambda: self._forward(memory, self._read(memory, chunks), None))
        drawing = peak_bytes(self._device, lambda: self._draw_everything(memory, rows))
        graphs = kept_bytes(self._device, memory.graphs.make_largest)
        # Logits of all rows come as the weights' type and as float32.
        return max(forward + rows * self.shape.n_vocab * 6, drawing), graphs

    def _draw_everything(self, memory: Memory, rows: int) -> None:
        """Choose with all parameters at once, from nothing: what that takes, and its kernels compiled."""
        draws = draws_of_all_kinds(rows, self.shape.n_vocab)
        logits = torch.zeros((rows, self.shape.n_vocab), device=self._device)
        choose(logits, draws, upload(draws.parts(), self._device), self._sampler, memory.last)

    def allocate(self, geometry: Geometry) -> None:
        if not isinstance(geometry, BlockGeometry):
            raise BackendError("the torch backend keeps its K/V in blocks, not in slots")
        self._open()
        self._end_copies()
        self._memory = None
        self._memory = memory = self._reserve(geometry)
        self._geometry = geometry
        if memory.graphs is not None:
            self._make_graphs(memory, memory.graphs)

    def _make_graphs(self, memory: Memory, graphs: DecodeGraphs) -> None:
        """Make graphs now, not while a request waits for the first step of a size."""
        started = time.monotonic()
        try:
            with self._here(), torch.inference_mode():
                self._draw_everything(memory, 1)
                graphs.make_all()
        except Exception as error:
            if not is_out_of_memory(error):
                raise self._failure(error, "making CUDA graphs") from error
            raise ConfigError(
                f"{self._device} has no room for CUDA graphs beside {memory.geometry.tokens} tokens of K/V; "
                "lower resources.kv_cache_max_memory_mb"
            ) from error
        seconds = time.monotonic() - started
        log.info("%d CUDA graphs for decode steps of up to %d rows made in %.1f s", len(graphs), self._rows, seconds)

    def _reserve(self, geometry: BlockGeometry) -> Memory:
        decoder, shape = self._decoder, self.shape
        size = geometry.block_size
        positions = min(shape.context_length, geometry.tokens)
        try:
            with self._here():
                arena = Arena(decoder, geometry, self._kv_type, self._device, self.spare_blocks)
                model = Model(decoder, self._open(), self._operations, positions, invariant=self._invariant)
                last = torch.zeros(ROW_NUMBERS, dtype=torch.int32, device=self._device)
                graphs = self._graphs_over(model, arena, last, -(-positions // size)) if self.on_gpu else None
        except Exception as error:
            if isinstance(error, CLLMError) or not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self._device} has no room for {geometry.tokens} tokens of K/V beside the weights; "
                "lower resources.kv_cache_max_memory_mb"
            ) from error
        bounds = Bounds(shape.n_vocab, positions, geometry.blocks)
        return Memory(geometry, arena, model, graphs, bounds, last, Tables(-(-positions // size)))

    def _graphs_over(self, model: Model, arena: Arena, last: torch.Tensor, blocks_per_row: int) -> DecodeGraphs:
        sizes = {"blocks_per_row": blocks_per_row, "rows": self._rows}
        return DecodeGraphs(PaddedStep(model, arena, last, self._sampler, **sizes), self._rows)

    @property
    def ops(self) -> TorchBackend:
        self._ready()
        return self

    # -- steps -------------------------------------------------------------------------------------------------

    def submit(self, chunks: Sequence[Chunk]) -> _Ticket | Sequence[Chunk]:
        if self.traits.depth == 1:
            return chunks
        memory = self._ready()
        try:
            with self._computing(chunks):
                host, draws = self._read_spread(memory, chunks), read_draws(chunks, self.shape.n_vocab)
                ran, queued = self._run(memory, host, draws, chunks)
                if ran.tokens is not None:
                    chosen = chosen_already(draws, ran.tokens)
                else:
                    chosen = choose(ran.logits, draws, ran.moved, self._sampler, memory.last)
                return _Ticket(chosen, self._mark(), queued=queued)
        except StepAbortedError as error:
            # It is the step's result; those before it are not collected yet.
            return _Ticket(error=error)

    def collect(self, ticket: _Ticket | Sequence[Chunk]) -> StepResult:
        if not isinstance(ticket, _Ticket):
            return self._compute(ticket)
        if ticket.chosen is None:
            assert ticket.error is not None
            raise ticket.error
        try:
            if ticket.done is not None:
                ticket.done.synchronize()
            return StepResult(None, ticket.chosen.read(), fetch(ticket.queued))
        except Exception as error:
            raise self._failure(error, f"a step of {len(ticket.chosen.counts)} rows") from error

    def _compute(self, chunks: Sequence[Chunk]) -> StepResult:
        """A step whose tokens the host samples."""
        memory = self._ready()
        if not chunks:
            return StepResult(np.empty((0, self.shape.n_vocab), np.float32))
        with self._computing(chunks):
            ran, queued = self._run(memory, self._read(memory, chunks), None, chunks)
            return StepResult(ran.logits.cpu().numpy(), None, fetch(queued))

    @contextmanager
    def _computing(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        self._aborted.clear()
        try:
            with self._here(), torch.inference_mode():
                yield
        except BackendError:
            raise
        except Exception as error:
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            raise self._failure(error, f"a step of {tokens} tokens") from error

    def _read(self, memory: Memory, chunks: Sequence[Chunk]) -> HostBatch:
        return read_chunks(chunks, memory.geometry.block_size, memory.bounds, memory.tables)

    def _read_spread(self, memory: Memory, chunks: Sequence[Chunk]) -> HostBatch:
        """With short chunks as rows of their own, if a graph can compute them: hundreds of launches take longer."""
        if memory.graphs is None or asks_more(chunks):
            return self._read(memory, chunks)
        return self._read(memory, spread(chunks, memory.graphs.most_rows, _MOST_SPREAD))

    def _forward(self, memory: Memory, host: HostBatch, draws: HostDraws | None) -> Ran:
        if memory.graphs is not None and memory.graphs.fits(host):
            return memory.graphs.run(host, draws)
        beside = [] if draws is None else draws.parts()
        batch, moved = batch_on(host, self._device, memory.last, self._sampler.prepare, beside)
        return Ran(memory.model.forward(batch, memory.arena, self._raise_if_aborted), None, moved)

    def _run(
        self, memory: Memory, host: HostBatch, draws: HostDraws | None, chunks: Sequence[Chunk]
    ) -> tuple[Ran, Queued]:
        """Like `_forward`, with what the chunks ask for besides logits."""
        if not asks_more(chunks):
            return self._forward(memory, host, draws), {}
        beside = [] if draws is None else draws.parts()
        batch, moved = batch_on(host, self._device, memory.last, self._sampler.prepare, beside)
        states = memory.model.states(batch, memory.arena, self._raise_if_aborted)
        queued = read_states(memory.model, states, chunks)
        return Ran(memory.model.logits(states[batch.wanted.long()]), None, moved), queued

    def _mark(self) -> torch.cuda.Event | None:
        """An event that fires when all work queued so far is done."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _raise_if_aborted(self) -> None:
        if self._aborted.is_set():
            raise StepAbortedError("the step was aborted")

    def _failure(self, error: Exception, doing: str) -> BackendError:
        """A lack of memory is one request's trouble; after anything else, nothing on the device is certain."""
        if is_out_of_memory(error):
            if self.on_gpu:
                torch.cuda.empty_cache()
            return BackendError(f"{self._device} has no memory for {doing}; lower resources.kv_cache_max_memory_mb")
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return BackendError(f"torch failed at {doing} on {self._device}: {reason}", fatal=True)

    def abort(self) -> None:
        """Heard before the next layer; a decode step on a GPU is over before that matters."""
        self._aborted.set()

    # -- life --------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        if self._geometry is None or self._weights is None:
            raise _no_memory()
        self._end_copies()
        self._memory = None  # the old one first: there is no room for both
        try:
            self._memory = self._reserve(self._geometry)
        except CLLMError:
            raise
        except Exception as error:
            raise self._failure(error, "rebuilding its context") from error

    def close(self) -> None:
        self._close_host_rows()
        self._memory = None
        self._weights = None
        if self.on_gpu:
            torch.cuda.empty_cache()

    def describe(self) -> str:
        version = str(torch.__version__).partition("+")[0]
        threads = "" if self.on_gpu else ", 1 thread" if self._threads == 1 else f", {self._threads} threads"
        types = f"weights {dtype_name(self._dtype)}, K/V {self._kv_type}"
        return f"torch {version} ({device_name(self._device)}, {types}{threads})"

    def _open(self) -> Weights:
        if self._weights is None:
            raise BackendError("the torch backend is closed", fatal=True)
        return self._weights

    @property
    def kv_identity(self) -> dict[str, str | int]:
        return {
            "torch": str(torch.__version__),
            "device": device_name(self._device),
            "weights": dtype_name(self._dtype),
            "invariant": int(self._invariant),
        }

    def _arena(self) -> Arena:
        return self._ready().arena

    def _block_count(self) -> int:
        return self._ready().geometry.blocks

    def _ready(self) -> Memory:
        if self._memory is None:
            raise _no_memory()
        return self._memory


def _no_memory() -> BackendError:
    return BackendError("the torch backend has no memory: allocate() was not called, or close() was", fatal=True)
