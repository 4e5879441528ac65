"""How much GPU memory a step takes, found by running one."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import torch

from cllm.backends.base import Bias, Chunk, Draw, Seen
from cllm.backends.torch.batch import HostBatch, read_chunks
from cllm.backends.torch.sampling import HostDraws, read_draws
from cllm.kv.groups import KVLayout, LocalBlock, StateTable


def whole_prompts(tokens: int, context: int, layout: KVLayout) -> HostBatch:
    """`tokens` tokens in chunks as long as the context, all in the same blocks. Each begins a state of its own."""
    most = min(tokens, context)
    blocks = list(range(-(-most // layout.block_size)))
    chunks = []
    for number, first in enumerate(range(0, tokens, most)):
        size, state = min(most, tokens - first), None
        if layout.states is not None:
            cells, state = layout.states.cells, StateTable()
            begin = len(blocks) + number * cells
            state.next = LocalBlock(list(range(begin, begin + cells)))
        chunks.append(Chunk(array("i", bytes(4 * size)), 0, True, blocks=blocks, state=state))
    return read_chunks(chunks, layout.block_size, layout=layout)


def draws_of_all_kinds(rows: int, vocab_size: int) -> HostDraws:
    """Everything that choosing a token may take memory for, for each of `rows`."""
    none = np.zeros(0, np.int32)
    bias, seen = Bias(none, np.zeros(0)), Seen(none, none, 1.0, 0.0, 0.0)
    draw = Draw(1.0, 5, 0.9, 0.1, 0.5, 5, bias, seen, None)
    return read_draws([Chunk(array("i", [0]), 0, True, draws=(draw,))] * rows, vocab_size)


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """The most that `compute` has at once."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def kept_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """What the device has less afterwards."""
    before, _ = torch.cuda.mem_get_info(device)
    compute()
    after, _ = torch.cuda.mem_get_info(device)
    return int(max(0, before - after))
