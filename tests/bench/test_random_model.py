"""Random GGUF files of real shapes: the same bytes each time, mixed as llama.cpp mixes, of a sane size."""

from __future__ import annotations

from array import array
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from cllm.models.gguf import GGUFModel
from cllm.text.tokenizer import load_tokenizer
from cllm_bench import random_model
from cllm_bench.errors import BenchError
from cllm_bench.kernels import shapes
from cllm_bench.kernels.shapes import MIXES, SHAPES, Mix, Shape, matrices, weight_bytes
from cllm_bench.random_blocks import BLOCK_TYPES, fitting
from cllm_bench.random_model import random_file, write
from cllm_bench.random_vocabulary import SILENT
from layered_kit import N_VOCAB, TINY_SHAPES

TINY = Shape(n_layers=8, n_embd=256, n_heads=4, n_kv_heads=2, head_dim=64, n_ff=512, n_vocab=333).layered


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return tmp_path / "bench"


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_what_gguf_reads_and_of_the_wanted_spread(name: str) -> None:
    kind = BLOCK_TYPES[name]
    raw = kind.draw(np.random.default_rng(1), 40_000 // kind.weights, 0.05)
    assert raw.shape == (40_000 // kind.weights, kind.bytes)
    values = raw.view(np.float32) if name == "f32" else dequantize(raw, GGMLQuantizationType(kind.number))
    assert values.std() == pytest.approx(0.05, rel=0.1)
    assert abs(values.mean()) < 0.002


@pytest.mark.parametrize("mix", MIXES)
def test_a_file_holds_what_its_shape_and_type_say(mix: str, cache: Path) -> None:
    file = random_file("tiny", mix)
    model = GGUFModel.open(file)
    spec, attention = model.spec, model.spec.layers[0].attention
    assert (spec.n_layers, spec.n_embd, attention.n_heads, attention.n_kv_heads) == (8, 256, 4, 2)
    assert (attention.head_dim_k, spec.n_vocab) == (64, 333)
    planned = {matrix.name: matrix for matrix in matrices(TINY, MIXES[mix])}
    found = {name: info for name, info in model.tensors.items() if len(info.shape) > 1}
    assert {name: info.type for name, info in found.items()} == {n: m.type.number for n, m in planned.items()}
    assert sum(info.size for info in found.values()) == weight_bytes(TINY, MIXES[mix])


def test_q4_k_m_has_more_bits_for_half_of_the_value_and_down_matrices() -> None:
    """Of 32 layers, llama.cpp gives them to the first and the last four and to every third between."""
    kinds = Counter((m.role, m.type.number) for m in matrices(SHAPES["8B"], MIXES["q4_k_m"]))
    q4_k, q6_k = BLOCK_TYPES["q4_k"].number, BLOCK_TYPES["q6_k"].number
    for role in ("attn_v", "ffn_down"):
        assert (kinds[role, q4_k], kinds[role, q6_k]) == (16, 16)
    assert kinds["attn_q", q4_k] == kinds["ffn_up", q4_k] == 32
    assert kinds["token_embd", q6_k] == 1


def test_rows_that_are_no_whole_blocks_get_the_type_that_llama_cpp_gives_them() -> None:
    assert [fitting(name, 576) for name in ("q4_k", "q5_k", "q6_k", "q4_0")] == ["q5_0", "q5_1", "q8_0", "q4_0"]
    assert [fitting(name, 100) for name in ("q4_k", "q8_0", "bf16")] == ["f16", "f16", "bf16"]


def test_files_are_always_the_same_so_that_old_ones_can_be_used_again(tmp_path: Path) -> None:
    """A change of the bytes needs another number in the files' names."""
    files = [write(tmp_path / f"{mix}.gguf", TINY, MIXES[mix], "x") for mix in ("q4_k_m", "q8_0")]
    digests = [sha256(file.read_bytes()).hexdigest() for file in files]
    assert random_model._MADE == 2
    assert digests == [
        "12c6758112a0d9af8bea39f3ab6745cd7926c13ed9ff00aa595cf228fdb8fd5b",
        "1582cfb1612b245e679b024b59d470153ad1c7067956bfc603bd9b11ed556dfc",
    ]


def test_matrices_are_written_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_PIECE_BYTES", 1)
    assert len(list(next(iter(matrices(TINY, MIXES["q6_k"]))).pieces())) == TINY.n_vocab


def test_what_a_killed_writer_left_is_written_over(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "random-tiny-q4_0-2.part").write_bytes(b"half")
    assert list(cache.iterdir()) != [random_file("tiny", "q4_0")] == list(cache.iterdir())


def test_a_file_is_written_once_with_progress_and_under_its_name_only_when_it_is_whole(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    file = random_file("tiny", "q4_0", lines.append)
    assert lines[-1].startswith("writing random tiny q4_0: 100% of") and list(cache.iterdir()) == [file]
    assert 5 <= len(lines) <= 10
    assert random_file("tiny", "q4_0", lambda line: pytest.fail(line)) == file

    def fail(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(random_model, "write", fail)
    with pytest.raises(BenchError, match=r"cannot write .*random-tiny-q8_0.*: No space left"):
        random_file("tiny", "q8_0")
    assert list(cache.iterdir()) == [file]


def test_a_disk_that_is_too_small_is_known_before(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(BenchError, match=r"tiny as q4_0 takes .* has 1 MiB left"):
        random_file("tiny", "q4_0")
    assert not list(cache.iterdir())


def test_activations_keep_their_size_through_many_layers(tmp_path: Path) -> None:
    pytest.importorskip("cllm._native", reason="the extension is not built")
    from step_kit import Rig, random_tokens

    deep = Shape(n_layers=40, n_embd=256, n_heads=4, n_kv_heads=2, head_dim=64, n_ff=512, n_vocab=999).layered
    rig = Rig(write(tmp_path / "deep.gguf", deep, Mix("q4_k", "q6_k", "q6_k"), "deep"))
    logits = rig.all_logits(random_tokens(999, 20), rig.table(20))
    assert 0.5 < logits[:, SILENT:].std() < 2


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_llama_cpp_loads_files_of_every_architecture_and_answers_with_words(name: str, tmp_path: Path) -> None:
    """It refuses a file that lacks a tensor, has one too many or one of another size."""
    llama = pytest.importorskip("cllm_bench.quality.llama", reason="xllamacpp is not installed")
    file = write(tmp_path / f"{name}.gguf", TINY_SHAPES[name], MIXES["q4_k_m"], name)
    with llama.LlamaReference(file, context=256, threads=1) as engine:
        logits = engine.logits(list(range(SILENT, SILENT + 60)))
    assert np.isfinite(logits).all() and logits.std() > 0.1
    assert (logits[:, :SILENT] == 0).all() and (logits.argmax(axis=1) >= SILENT).all()


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_our_engine_loads_them_and_agrees_step_by_step(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cllm._native", reason="the extension is not built")
    llama = pytest.importorskip("cllm_bench.quality.llama", reason="xllamacpp is not installed")
    from cllm_bench.kernels.native import NativeEngine

    file = write(tmp_path / f"{name}.gguf", TINY_SHAPES[name], MIXES["q4_k_m"], name)
    tokens = array("i", range(SILENT, SILENT + 60))
    streams = NativeEngine(model=str(file), threads=1, instruction_set="auto")._open(2, 64)
    streams.prompt(tokens[:40])
    streams.share()
    for position in range(40, 60):
        streams.decode(array("i", [tokens[position]] * 2), position)
    with llama.LlamaReference(file, context=256, threads=1) as engine:
        theirs = engine.logits(tokens.tolist())[-1]
    for ours in streams._logits[:2]:
        assert np.corrcoef(ours, theirs)[0, 1] > 0.95


def test_what_a_file_with_random_weights_answers_is_the_same_tokens_when_it_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", TINY_SHAPES["gemma3"], MIXES["q4_k_m"], "x")
    tokenizer = load_tokenizer(GGUFModel.open(file))
    answer = list(range(SILENT, N_VOCAB, 7))
    assert tokenizer.encode(tokenizer.decode(answer)) == answer
