"""The native engine computes every architecture of GGUF files as the plain model does, with the memory of local layers
in one table with the others or in one of their own."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from architecture_kit import TINY, WITHOUT_STATES, write_tiny
from cllm.backends.base import Chunk
from cllm.backends.native import NativeBackend
from cllm.kv.groups import LocalBlock, LocalTable, StateTable
from cllm.kv.ops import BlockGeometry
from cllm.models.gguf import GGUFModel
from cllm_bench.quality.llama import LlamaReference
from plain_model import PlainModel
from step_kit import Floats, Rig, assert_same, spans

LENGTH, BLOCK, CELLS = 80, 16, 300
LIMIT = 2e-3
"""RMS of the differences, in standard deviations of the logits; K and V are f16 in the engine."""


@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_the_logits_of_the_plain_model(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", TINY[name])
    tokens = np.random.default_rng(1).integers(0, 97, LENGTH).tolist()
    expected = PlainModel(GGUFModel.open(path)).logits(tokens)
    rig = Rig(path)
    found = rig.all_logits(tokens, rig.table(LENGTH), together=33)
    print(name, distance(found, expected))
    assert distance(found, expected) < LIMIT


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", [name for name in TINY if name not in WITHOUT_STATES])
def test_layers_with_states(name: str, kind: str, tmp_path: Path) -> None:
    """As far from the plain model as llama.cpp, or nearer; the same bits in chunks, and in cells used before."""
    path = write_tiny(tmp_path / "tiny.gguf", TINY[name], GGMLQuantizationType[kind])
    model = GGUFModel.open(path)
    tokens = np.random.default_rng(1).integers(0, 97, LENGTH).tolist()
    expected = PlainModel(model).logits(tokens)
    with LlamaReference(path, context=256, threads=1, kv_type="f16") as llama:
        others = distance(llama.logits(tokens), expected)
    found = logits_of(model, "f16", tokens, [], apart=False)
    print(name, kind, distance(found, expected), others)
    assert distance(found, expected) < max(LIMIT, 1.1 * others)
    assert_same(logits_of(model, "f16", tokens, [7, 40, 41, 42, 70], apart=False), found)


def distance(found: Floats, expected: Floats) -> float:
    """RMS of the differences, in standard deviations."""
    return float(np.sqrt(np.mean(np.square(found - expected))) / expected.std())


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4", "gemma4 E2B", "olmo3", "exaone4"])
def test_local_layers_apart(name: str, kv_type: str, tmp_path: Path) -> None:
    """The same bits, and nothing of what is behind the windows."""
    model = GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY[name]))
    if kv_type != "f16" and any(layer.attention.head_dim_k % 32 for layer in model.spec.layers):
        pytest.skip("its heads only fit f16")
    tokens = np.random.default_rng(2).integers(0, 97, LENGTH).tolist()
    cuts = [7, 40, 41, 42, 70]
    assert_same(logits_of(model, kv_type, tokens, cuts, apart=True), logits_of(model, kv_type, tokens, [], apart=False))


def logits_of(model: GGUFModel, kv_type: str, tokens: list[int], cuts: list[int], *, apart: bool) -> Floats:
    """Of every position."""
    with NativeBackend(
        model, threads=2, instruction_set="auto", kv_type_k=kv_type, kv_type_v=kv_type, context=LENGTH
    ) as backend:
        layout = backend.spec.kv_layout(kv_type, kv_type, BLOCK, apart=apart)
        assert (layout.local is not None) == apart
        states = layout.states
        backend.allocate(BlockGeometry(CELLS, BLOCK, layout if apart or states else None))
        for content in backend.read_blocks(range(CELLS)):
            content[:] = 255
        assert backend.block_bytes == layout.cell_bytes
        free = list(map(int, np.random.default_rng(3).permutation(CELLS)))
        blocks = [free.pop() for _ in range(-(-LENGTH // BLOCK))]
        local, state = LocalTable(0) if apart else None, StateTable() if states else None
        rows = []
        for begin, end in spans(LENGTH, cuts):
            if local is not None and layout.local is not None:
                while local.end * BLOCK < end:
                    local.append(LocalBlock([free.pop() for _ in range(layout.local.cells)]))
                gone = max(0, (begin - layout.local.window + 1) // BLOCK) - local.first
                for block in local.blocks[:gone]:
                    for content in backend.read_blocks(block.cells):
                        content[:] = 255
                del local.blocks[:gone]
                local.first += gone
                local.refresh()
            if state is not None and states is not None:
                state.next = LocalBlock([free.pop() for _ in range(states.cells)])
            chunk = Chunk(array("i", tokens[begin:end]), begin, end - begin, blocks=blocks, local=local, state=state)
            rows.append(np.array(backend.collect([chunk]).logits))
            if state is not None:
                state.current = state.next
        return np.concatenate(rows)
