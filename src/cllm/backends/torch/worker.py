"""What computes on one device: weights, K/V memory and CUDA graphs, and the steps through them.

It is handed whole batches and knows nothing of chunks and requests. Everything is on one stream, so steps and memory
operations take effect in the order they are asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from cllm.backends.base import StepResult
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import ROW_NUMBERS, HostBatch, batch_on
from cllm.backends.torch.block_memory import BlockMemory, no_memory
from cllm.backends.torch.device import choose_operations, choose_sampler
from cllm.backends.torch.faults import DeviceFaults, if_no_room
from cllm.backends.torch.graphs import DecodeGraphs, Ran
from cllm.backends.torch.model import Model, Weights
from cllm.backends.torch.padded_step import PaddedStep
from cllm.backends.torch.profiling import draws_of_all_kinds, kept_bytes, peak_bytes, whole_prompts
from cllm.backends.torch.prompt_outputs import Asked, Queued, fetch, read_states
from cllm.backends.torch.sampling import Chosen, HostDraws, choose, chosen_already
from cllm.backends.torch.staging import upload
from cllm.errors import BackendError, ConfigError, StepAbortedError
from cllm.kv.ops import BlockGeometry
from cllm.models.spec import ModelSpec

log = logging.getLogger("cllm.torch")

_TRIED_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """How a worker computes."""

    device: torch.device
    dtype: torch.dtype
    kv_type: str
    invariant: bool
    rows: int
    """The most sequences that are computed at once."""

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def spare_blocks(self) -> int:
        """Blocks besides those of the pool: padded rows of graphs write there."""
        return int(self.on_gpu)

    def here(self) -> AbstractContextManager[object]:
        """Kernels and graphs are for the thread's current device, and every thread has its own."""
        return torch.cuda.device(self.device) if self.on_gpu else nullcontext()


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """What there is once memory is allocated."""

    arena: Arena
    model: Model
    last: Tensor
    """The token that each row number drew last, int32."""
    graphs: DecodeGraphs | None


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose results are on their way to the host."""

    chosen: Chosen
    done: torch.cuda.Event | None
    """Fires when all of the step is done; None on a CPU, where it is."""
    queued: Queued

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        return StepResult(None, self.chosen.read(), fetch(self.queued))


class DeviceWorker:
    def __init__(self, setup: Setup, spec: ModelSpec, weights: Weights, faults: DeviceFaults) -> None:
        self.aborted = threading.Event()
        """Heard before the next layer; a decode step on a GPU is over before that matters."""
        self.memory = BlockMemory(faults)
        self.sampler = choose_sampler(setup.device)
        self._operations = choose_operations(setup.device)
        self._setup = setup
        self._spec = spec
        self._weights: Weights | None = weights
        self._context: DeviceContext | None = None
        self._faults = faults

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def context(self) -> DeviceContext:
        if self._context is None:
            raise no_memory()
        return self._context

    @property
    def is_closed(self) -> bool:
        return self._weights is None

    def allocate(self, geometry: BlockGeometry) -> None:
        """The memory that there was goes first: there is no room for both."""
        if self._weights is None:
            raise BackendError("the torch backend is closed", fatal=True)
        self.memory.free()
        self._context = None
        self._context = self._reserve(geometry, self._weights)
        self.memory.use(self._context.arena)

    def make_graphs(self) -> None:
        """Make graphs now, not while a request waits for the first step of a size."""
        context, device = self.context, self._setup.device
        if context.graphs is None:
            return
        no_room = ConfigError(
            f"{device} has no room for CUDA graphs beside {context.arena.blocks * context.arena.block_size} tokens of "
            "K/V; lower resources.kv_cache_max_memory_mb"
        )
        started = time.monotonic()
        with self._faults.at("making CUDA graphs"), if_no_room(no_room), self._setup.here(), torch.inference_mode():
            self._draw_everything(context, 1)
            context.graphs.make_all()
        seconds, rows = time.monotonic() - started, self._setup.rows
        log.info("%d CUDA graphs for decode steps of up to %d rows made in %.1f s", len(context.graphs), rows, seconds)

    def try_out(self, tokens: int, rows: int) -> tuple[int, int]:
        """Bytes that the largest step takes at once, and those that graphs keep."""
        assert self._weights is not None
        device, n_vocab = self._setup.device, self._spec.n_vocab
        with self._setup.here(), torch.inference_mode():
            kv_type = self._setup.kv_type
            layout = self._spec.kv_layout(kv_type, kv_type, _TRIED_BLOCK, apart=False)
            prompts = whole_prompts(tokens, self._spec.context_length, layout)
            cells = int(prompts.firsts[1])
            if prompts.states is not None:
                cells = int(prompts.states.writes.max()) + 1
            context = self._reserve(BlockGeometry(cells, _TRIED_BLOCK, layout), self._weights)
            forward = peak_bytes(device, lambda: self._forward(context, prompts, None))
            drawing = peak_bytes(device, lambda: self._draw_everything(context, rows))
            graphs = 0 if context.graphs is None else kept_bytes(device, context.graphs.make_largest)
            # Logits of all rows come as the weights' type and as float32.
            return max(forward + rows * n_vocab * 6, drawing), graphs

    def _reserve(self, geometry: BlockGeometry, weights: Weights) -> DeviceContext:
        setup, spec, size = self._setup, self._spec, geometry.block_size
        positions = min(spec.context_length, geometry.tokens)
        no_room = ConfigError(
            f"{setup.device} has no room for {geometry.tokens} tokens of K/V beside the weights; "
            "lower resources.kv_cache_max_memory_mb"
        )
        with if_no_room(no_room), setup.here():
            arena = Arena(spec, geometry, setup.kv_type, setup.device, setup.spare_blocks)
            model = Model(spec, weights, self._operations, positions, invariant=setup.invariant)
            last = torch.zeros(ROW_NUMBERS, dtype=torch.int32, device=setup.device)
            if not setup.on_gpu or spec.recurrent:  # rows of graphs that nobody uses have no states to write
                return DeviceContext(arena, model, last, None)
            step = PaddedStep(model, arena, last, self.sampler, blocks_per_row=-(-positions // size), rows=setup.rows)
            return DeviceContext(arena, model, last, DecodeGraphs(step, setup.rows))

    def _draw_everything(self, context: DeviceContext, rows: int) -> None:
        """Choose with all parameters at once, from nothing: what that takes, and its kernels compiled."""
        device, n_vocab = self._setup.device, self._spec.n_vocab
        draws = draws_of_all_kinds(rows, n_vocab)
        logits = torch.zeros((rows, n_vocab), device=device)
        choose(logits, draws, upload(draws.parts(), device), self.sampler, context.last)

    def close(self) -> None:
        self.memory.close()
        self._context = self._weights = None
        if self._setup.on_gpu:
            torch.cuda.empty_cache()

    # -- steps -------------------------------------------------------------------------------------------------

    def compute(self, host: HostBatch, asked: Sequence[Asked]) -> StepResult:
        """A step whose tokens the host samples."""
        with self._setup.here(), torch.inference_mode():
            ran, queued = self._run(self.context, host, None, asked)
            return StepResult(ran.logits.cpu().numpy(), None, fetch(queued))

    def launch(self, host: HostBatch, draws: HostDraws, asked: Sequence[Asked]) -> Launched:
        with self._setup.here(), torch.inference_mode():
            context = self.context
            ran, queued = self._run(context, host, draws, asked)
            if ran.tokens is not None:
                chosen = chosen_already(draws, ran.tokens)
            else:
                chosen = choose(ran.logits, draws, ran.moved, self.sampler, context.last)
            return Launched(chosen, self._mark(), queued)

    def _run(
        self, context: DeviceContext, host: HostBatch, draws: HostDraws | None, asked: Sequence[Asked]
    ) -> tuple[Ran, Queued]:
        if not asked:
            return self._forward(context, host, draws), {}
        model, parts = context.model, [] if draws is None else draws.parts()
        batch, moved = batch_on(host, self._setup.device, context.last, self.sampler.prepare, parts)
        states = model.states(batch, context.arena, self._raise_if_aborted)
        queued = read_states(model, states, asked)
        return Ran(model.logits(states[batch.wanted.long()]), None, moved), queued

    def _forward(self, context: DeviceContext, host: HostBatch, draws: HostDraws | None) -> Ran:
        if context.graphs is not None and context.graphs.fits(host):
            return context.graphs.run(host, draws)
        parts = [] if draws is None else draws.parts()
        batch, moved = batch_on(host, self._setup.device, context.last, self.sampler.prepare, parts)
        return Ran(context.model.forward(batch, context.arena, self._raise_if_aborted), None, moved)

    def _mark(self) -> torch.cuda.Event | None:
        """An event that fires when all work queued so far is done."""
        if not self._setup.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _raise_if_aborted(self) -> None:
        if self.aborted.is_set():
            raise StepAbortedError("the step was aborted")
