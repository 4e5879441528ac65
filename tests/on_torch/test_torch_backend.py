"""The torch backend step by step, on the CPU: rows, blocks, bounds, memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cllm.backends.base import Chunk, Logits
from cllm.backends.torch import block_memory
from cllm.backends.torch.backend import TorchBackend
from cllm.backends.torch.device import DTYPES
from cllm.backends.torch.linear import FP8
from cllm.backends.torch.sources import open_source, spec_of
from cllm.backends.torch.weights import Loader, weight_bytes
from cllm.errors import BackendError, ConfigError, ModelError, StepAbortedError
from cllm.kv.ops import BlockBytes, BlockGeometry, BlockOps, Move, SlotGeometry
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from hf_kit import header_of, tensors, write_directory, write_safetensors
from native_kit import write_model
from step_of import rows_of
from torch_kit import BLOCK, N_VOCAB, build, chunk, greedy, open_backend, random_tokens, save, table

BLOCKS = 64
TOKENS = random_tokens(400, seed=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def backend(directory: Path) -> Iterator[TorchBackend]:
    with open_backend(directory, blocks=BLOCKS) as opened:
        assert isinstance(opened, TorchBackend)
        yield opened


def part(start: int, end: int, blocks: list[int], *, wants: bool = True) -> Chunk:
    return chunk(TOKENS[start:end], start, blocks, wants=wants)


def row(backend: TorchBackend, *chunks: Chunk) -> Logits:
    return rows_of(backend, chunks)[-1].copy()


def assert_same(found: Any, expected: Any) -> None:
    """Sums are taken in another order when other rows are computed beside: the last digits may differ."""
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-4


# -- steps ---------------------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_the_chunks_that_want_them(backend: TorchBackend) -> None:
    first = row(backend, part(0, 40, table(40)))
    second = row(backend, part(0, 7, table(7, 3)))
    third = row(backend, part(0, 100, table(100, 4)))
    single = row(backend, part(0, 1, [60]))
    rows = rows_of(
        backend,
        [
            part(0, 100, table(100, 20)),
            part(0, 23, table(23, 30), wants=False),
            part(0, 1, [61]),
            part(0, 7, table(7, 40)),
            part(0, 40, table(40, 50)),
        ],
    )
    assert rows.dtype == np.float32 and rows.shape == (4, N_VOCAB)
    assert_same(rows, [third, single, second, first])


@pytest.mark.parametrize("size", [1, 5, 16, 33])
def test_chunks_of_any_size_give_the_same_row(backend: TorchBackend, size: int) -> None:
    whole = row(backend, part(0, 70, table(70)))
    blocks = table(70, 50)[::-1]
    for start in range(0, 70, size):
        end = min(start + size, 70)
        rows = rows_of(backend, [part(start, end, blocks, wants=end == 70)])
    assert_same(rows[0], whole)


def test_a_table_may_be_longer_than_its_tokens_need(backend: TorchBackend) -> None:
    short = row(backend, part(0, 20, table(20)))
    assert_same(row(backend, part(0, 20, [*table(20, 10), 40, 41, 42])), short)


def test_steps_without_rows_and_without_chunks(backend: TorchBackend) -> None:
    assert rows_of(backend, []).shape == (0, N_VOCAB)
    assert rows_of(backend, [part(0, 5, [0], wants=False)]).shape == (0, N_VOCAB)


def test_what_is_computed_is_kept_and_shared(backend: TorchBackend) -> None:
    shared = table(64)
    row(backend, part(0, 64, shared))
    expected = row(backend, part(0, 100, table(100, 20)))
    rows = rows_of(backend, [part(64, 100, [*shared, 50, 51, 52]), part(64, 100, [*shared, 53, 54, 55])])
    assert_same(rows, [expected, expected])


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_copied_block_goes_on_like_its_source(backend: TorchBackend) -> None:
    row(backend, part(0, 24, [5, 6]))
    ops = backend.ops
    assert isinstance(ops, BlockOps)
    ops.copy_blocks([(5, 40), (6, 41)])
    expected = row(backend, part(24, 30, [5, 6]))
    row(backend, part(0, 24, [6, 5]))  # the source is written over
    assert_same(row(backend, part(24, 30, [40, 41])), expected)
    ops.copy_blocks([])


def test_a_block_that_comes_back_goes_on_like_before(backend: TorchBackend) -> None:
    row(backend, part(0, 24, [5, 6]))
    assert isinstance(backend.ops, BlockBytes)
    kept = [content.copy() for content in backend.ops.read_blocks([5, 6])]
    assert [content.nbytes for content in kept] == 2 * [backend.ops.block_bytes]
    expected = row(backend, part(24, 30, [5, 6]))
    row(backend, part(0, 24, [6, 5]))  # the source is written over
    places = backend.ops.landing([41, 40])
    for place, content in zip(places, kept, strict=True):
        place[:] = content
    backend.ops.land([41, 40], places)
    assert_same(row(backend, part(24, 30, [41, 40])), expected)
    with pytest.raises(BackendError, match=f"block {BLOCKS} does not exist"):
        backend.ops.read_blocks([BLOCKS])


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_what_has_landed_is_not_copied_again(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a copy of all")

    monkeypatch.setattr(block_memory, "LANDED_AT_ONCE_BYTES", at_once)
    places = backend.ops.landing([41, 40, 7])
    for number, place in enumerate(places):
        place[:] = number + 1
    with monkeypatch.context() as patch:
        patch.setattr(np, "stack", refuse)
        backend.ops.land([41, 40], places[:2])
    assert [int(content.max()) for content in backend.ops.read_blocks([41, 40])] == [1, 2]
    backend.ops.land([41, 40], [places[2], places[0]])
    assert [int(content.min()) for content in backend.ops.read_blocks([41, 40])] == [3, 1]


@pytest.mark.parametrize("together", [1, 3, 1000])
@pytest.mark.parametrize(
    "moves",
    [
        [Move(0, 30, 20)],
        [Move(10, 7, 20)],
        [Move(7, 10, 20)],
        [Move(5, 4, 50), Move(4, 5, 50), Move(0, 1, 63)],
        [Move(0, 10, 5), Move(10, 20, 5), Move(8, 12, 9)],
        [],
    ],
)
def test_moves_are_those_of_a_list(
    backend: TorchBackend, moves: list[Move], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = backend._worker.context.arena.data
    monkeypatch.setattr("cllm.backends.torch.arena._MOVED_BYTES", together * kv[0].nbytes)
    kv.copy_(torch.arange(BLOCKS, dtype=kv.dtype).view(-1, 1).expand_as(kv))
    expected = list(range(BLOCKS))
    for source, target, count in moves:
        expected[target : target + count] = expected[source : source + count]
    backend.ops.move_blocks(moves)
    assert kv[:, 0].tolist() == expected == kv[:, -1].tolist()


def test_answers_before_and_after_a_move(backend: TorchBackend) -> None:
    expected = greedy(backend, TOKENS[:50], 30)
    blocks = [9, 3, 17, 30, 31, 32]
    rows_of(backend, [part(0, 50, blocks)])
    backend.ops.move_blocks([Move(9, 0, 1), Move(3, 1, 1), Move(17, 2, 1), Move(30, 3, 3)])
    tokens = list(TOKENS[:50])
    for at in range(50, 80):  # on the last prompt token again, whose K and V are there
        (found,) = rows_of(backend, [chunk([tokens[at - 1]], at - 1, table(80))])
        tokens.append(int(found.argmax()))
    assert tokens[50:] == expected


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ops: ops.copy_blocks([(0, BLOCKS)]),
        lambda ops: ops.copy_blocks([(-1, 0)]),
        lambda ops: ops.move_blocks([Move(0, 60, 5)]),
        lambda ops: ops.move_blocks([Move(0, 1, 1), Move(-1, 1, 3)]),
    ],
)
def test_blocks_that_are_not_there(backend: TorchBackend, wrong: Any) -> None:
    before = backend._worker.context.arena.data.clone()
    with pytest.raises(BackendError, match="does not exist") as caught:
        wrong(backend.ops)
    assert not caught.value.fatal and torch.equal(backend._worker.context.arena.data, before)


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32", "fp8", "int8"])
def test_the_arena_takes_the_bytes_that_are_planned(directory: Path, kv_type: str) -> None:
    with open_backend(directory, blocks=10, kv_type=kv_type) as backend:
        token = backend.spec.kv_bytes_per_token(kv_type, kv_type)
        assert isinstance(backend, TorchBackend)
        assert backend.kv_bytes == backend.ops.resident_bytes() == 10 * BLOCK * token
        backend.ops.release_pages(0, 10)
        backend.ops.prepare_pages(0, 10)
        assert backend.ops.resident_bytes() == backend.kv_bytes


def test_a_rebuilt_context_computes_the_same(backend: TorchBackend) -> None:
    ops = backend.ops
    expected = row(backend, part(0, 50, table(50)))
    taken = backend.kv_bytes
    backend.rebuild()
    assert backend.kv_bytes == taken
    assert_same(row(backend, part(0, 50, table(50, 7))), expected)
    ops.copy_blocks([(7, 20)])
    assert_same(row(backend, part(16, 50, [20, 8, 9, 10])), expected)


PEAK = """
import re, sys, torch
from pathlib import Path
from cllm.backends.torch.backend import TorchBackend
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
path = Path(sys.argv[1])
model = HFModel.open(path) if path.is_dir() else GGUFModel.open(path)
torch.ones(8, 8) @ torch.ones(8, 8)
def memory(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
before = memory("VmRSS")
backend = TorchBackend(model, device="cpu", dtype=sys.argv[2])
taken = memory("VmHWM") - before
weights = backend._worker._weights
found = [getattr(part, name) for part in [weights, *weights.layers] for name in part.__slots__]
found += [scale for layer in weights.layers for scale in (layer.scales or {}).values()]
held = {tensor.data_ptr(): tensor.nbytes for tensor in found if isinstance(tensor, torch.Tensor)}
print(taken, sum(held.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="says nothing of its peak")
@pytest.mark.parametrize("kind", ["directory", "gguf"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_loading_takes_the_weights_and_little_beside_them(kind: str, dtype: str, tmp_path: Path) -> None:
    if kind == "gguf":
        sizes = {"n_embd": 1024, "n_heads": 16, "n_kv_heads": 8, "n_ff": 2048, "n_vocab": 40_000, "n_layers": 1}
        path = write_model(tmp_path / "model.gguf", weight_type="f16", **sizes)
    else:
        wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 40_000}
        widths = {32: 1024, 16: 512, 48: 4096, 300: 40_000}
        shapes = {name: tuple(widths[size] for size in shape) for name, shape in tensors().items()}
        path = write_directory(tmp_path, config=wide, shapes=shapes, dtype="BF16")
    ran = subprocess.run([sys.executable, "-c", PEAK, str(path), dtype], capture_output=True, text=True, check=True)
    taken, weights = map(int, ran.stdout.split())
    # The embedding alone takes 80 MiB in the files; as float32, 160 or more.
    assert 0.9 * weights < taken < weights + (96 << 20), (taken >> 20, weights >> 20)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_loading_says_how_far_it_is(kind: str, dtype: str, tmp_path: Path) -> None:
    model: Any
    if kind == "gguf":
        model = GGUFModel.open(write_model(tmp_path / "model.gguf"))
    else:
        model = HFModel.open(write_directory(tmp_path))
    seen: list[tuple[int, int]] = []
    with TorchBackend(model, device="cpu", dtype=dtype, progress=lambda *numbers: seen.append(numbers)):
        pass
    size = weight_bytes(spec_of(model), DTYPES[dtype])
    assert seen == sorted(seen) and len(seen) > 10
    assert seen[-1] == (size, size) and {total for _, total in seen} == {size}


def test_weights_in_fp8_have_a_scale_for_every_row(directory: Path) -> None:
    model = HFModel.open(directory)
    with open_source(model) as source:
        exact = Loader(source, torch.float32, torch.device("cpu"), None).load(spec_of(model))
        small = Loader(source, FP8, torch.device("cpu"), None).load(spec_of(model))
    pairs = [(small.head, small.head_scales, exact.head)]
    for layer, wide in zip(small.layers, exact.layers, strict=True):
        assert layer.scales is not None and layer.scales.keys() == {"qkv", "output", "gate_up", "down"}
        pairs += [(getattr(layer, name), scales, getattr(wide, name)) for name, scales in layer.scales.items()]
        assert layer.attention_norm.dtype == torch.bfloat16
    for matrix, scales, wide in pairs:
        assert matrix.dtype == FP8 and scales is not None and scales.shape == wide.shape[:1]
        found = matrix.float() * scales[:, None]
        assert ((found - wide).abs() <= wide.abs() / 16 + scales[:, None] / 500).all()  # half of the last bit
    assert small.embedding.dtype == torch.bfloat16 and exact.layers[0].scales is None


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        Chunk(array("i"), 0, True, blocks=[0]),
        Chunk(array("i", [N_VOCAB]), 0, True, blocks=[0]),
        Chunk(array("i", [-1]), 0, True, blocks=[0]),
        Chunk(array("i", [1]), -1, True, blocks=[0]),
        Chunk(array("i", [1]), 0, True, blocks=[]),
        Chunk(array("i", [1]), 0, True, blocks=[BLOCKS]),
        Chunk(array("i", [1]), 0, True, blocks=[-1]),
        Chunk(array("i", range(17)), 0, True, blocks=[0]),
        Chunk(array("i", [1]), 16, True, blocks=[0]),
        Chunk(array("i", [1]), 512, True, blocks=list(range(33))),
    ],
    ids=["no tokens", "token too large", "token negative", "before 0", "no blocks", "block too large", "block negative",
         "too few blocks", "past the table", "past the context"],
)  # fmt: skip
def test_impossible_chunks_are_errors_and_harm_nothing(backend: TorchBackend, wrong: Chunk) -> None:
    expected = row(backend, part(0, 20, [30, 31]))
    for chunks in ([wrong], [part(0, 20, [40, 41]), wrong]):
        with pytest.raises(BackendError) as caught:
            rows_of(backend, chunks)
        assert not caught.value.fatal and "\n" not in str(caught.value)
    assert_same(row(backend, part(0, 20, [30, 31])), expected)


def test_an_abort_ends_the_step_and_no_other(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = row(backend, part(0, 300, table(300)))
    model, layers = backend._worker.context.model, []
    original = model._attend

    def attention(*arguments: Any) -> Any:
        layers.append(arguments)
        other = threading.Thread(target=backend.abort)
        other.start()
        other.join()
        return original(*arguments)

    monkeypatch.setattr(model, "_attend", attention)
    with pytest.raises(StepAbortedError):
        rows_of(backend, [part(0, 300, table(300, 40))])
    assert len(layers) == 1
    monkeypatch.undo()
    backend.abort()  # between steps: nothing to end
    assert_same(row(backend, part(0, 300, table(300, 40))), expected)


def failing(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes."), False),
        (MemoryError(), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), True),
    ],
)
def test_no_memory_is_one_requests_trouble_and_all_else_everybodys(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, error: Exception, fatal: bool
) -> None:
    monkeypatch.setattr(backend._worker.context.model, "_attend", failing(error))
    with pytest.raises(BackendError) as caught:
        rows_of(backend, [part(0, 20, [0, 1])])
    assert caught.value.fatal == fatal and "\n" not in str(caught.value) and "a step of 20 tokens" in str(caught.value)


def test_more_than_there_is_is_one_line(backend: TorchBackend, directory: Path) -> None:
    with (
        open_backend(directory, blocks=2) as other,
        pytest.raises(ConfigError, match=r"cpu has no room for \d+ tokens of K/V .*kv_cache_max_memory_mb") as caught,
    ):
        other.allocate(BlockGeometry(2**40, BLOCK))
    assert "\n" not in str(caught.value)


def test_it_needs_blocks_and_memory(directory: Path) -> None:
    backend = TorchBackend(HFModel.open(directory), device="cpu", kv_type="f32")
    with pytest.raises(BackendError, match="allocate"):
        rows_of(backend, [part(0, 1, [0])])
    with pytest.raises(BackendError, match="blocks"):
        backend.allocate(SlotGeometry(4, 256))


def test_close_is_final_and_may_be_repeated(directory: Path) -> None:
    backend = open_backend(directory, blocks=8)
    ops = backend.ops
    backend.close()
    backend.close()
    backend.abort()
    uses = (backend.rebuild, lambda: rows_of(backend, [part(0, 1, [0])]), lambda: ops.copy_blocks([(0, 1)]),
            lambda: backend.allocate(BlockGeometry(8, 16)))  # fmt: skip
    for use in uses:
        with pytest.raises(BackendError) as caught:
            use()
        assert caught.value.fatal


def test_it_says_what_it_is(backend: TorchBackend) -> None:
    version = torch.__version__.partition("+")[0]
    assert backend.describe() == f"torch {version} (cpu, weights f32, K/V f32, 1 thread)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend\.torch\.device is cuda:1, but .*; use auto or cpu"):
        TorchBackend(HFModel.open(directory), device="cuda:1")


# -- weights that do not fit their configuration -------------------------------------------------------------------


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        TorchBackend(HFModel.open(write_directory(path, **options)), device="cpu")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_tensors_that_are_missing_wrong_or_unknown(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: shape for key, shape in tensors().items() if key != name}
    assert f"the tensor {name} is missing" in refused(tmp_path, shapes=without)
    assert f"the tensor {name} is 32 x 48, but should be 48 x 32" in refused(
        tmp_path, shapes=tensors() | {name: (32, 48)}
    )
    more = {"model.layers.0.mlp.up_proj.bias": (48,)}
    assert "the tensor model.layers.0.mlp.up_proj.bias is unknown" in refused(tmp_path, shapes=tensors() | more)
    assert "is of type F64" in refused(tmp_path, dtype="F64")
    assert "model.layers.2.input_layernorm.weight is missing" in refused(tmp_path, config={"num_hidden_layers": 2**30})


def test_what_a_tied_model_need_not_have_is_not_looked_at(tmp_path: Path) -> None:
    path = write_directory(tmp_path, config={"tie_word_embeddings": True})
    with TorchBackend(HFModel.open(path), device="cpu") as backend:
        assert isinstance(backend, TorchBackend) and (weights := backend._worker._weights) is not None
        assert weights.head is weights.embedding


def test_weights_that_are_cut_short_while_they_are_loaded(tmp_path: Path) -> None:
    model = HFModel.open(write_directory(tmp_path))
    write_safetensors(tmp_path / "model.safetensors", header_of(tensors()), 100)
    with pytest.raises(ModelError, match="changed while it was being loaded"):
        TorchBackend(model, device="cpu")


def test_a_gguf_file_that_torch_cannot_run(tmp_path: Path) -> None:
    model = GGUFModel.open(write_model(tmp_path / "odd.gguf", arch="qwen2", rope_scaling="llama3"))
    with pytest.raises(ModelError, match=r"the torch backend cannot run this model: it has the tensor rope_freqs"):
        TorchBackend(model, device="cpu")
