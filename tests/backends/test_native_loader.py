"""GGUF files into the native engine: what it cannot run is named, what is damaged is refused, nothing crashes."""

from __future__ import annotations

import errno
import io
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm._native import Engine
from cllm.backends.native import loader
from cllm.backends.native.loader import load_engine, unsupported
from cllm.errors import ModelError
from cllm.models.architectures import ARCHITECTURES as ARCHITECTURES_READ
from cllm.models.gguf import GGUFModel, TensorFile
from cllm.models.registry import resolve
from loading_kit import LoadingProcess, next_logits
from native_kit import ARCHITECTURES, WEIGHT_TYPES, Tensor, TinyModel, build_model, float_tensor, write_model
from thorough import sampled


def opened(model: TinyModel, tmp_path: Path) -> GGUFModel:
    return GGUFModel.open(model.write(tmp_path / "m.gguf"))


def load(model: TinyModel, tmp_path: Path) -> Engine:
    return load_engine(opened(model, tmp_path), threads=1)


def refusal(model: TinyModel, tmp_path: Path) -> str:
    header = opened(model, tmp_path)
    assert unsupported(header) is None
    with pytest.raises(ModelError) as caught:
        load_engine(header, threads=1)
    message = str(caught.value)
    assert message.startswith(f"{header.path}: ")
    assert "\n" not in message
    return message


# --- what loads ---


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_every_architecture_and_type_loads(tmp_path: Path, arch: str, weight_type: str) -> None:
    model = build_model(arch=arch, weight_type=weight_type, n_embd=256, n_ff=256, n_layers=1)
    header = opened(model, tmp_path)
    assert unsupported(header) is None
    engine = load_engine(header, threads=2)
    assert engine.threads == 2
    assert engine.weight_bytes >= 0.9 * sum(t.raw.nbytes for t in model.tensors.values() if t.raw.ndim == 2)
    assert np.isfinite(next_logits(engine, 320, [5, 6, 7])).all()


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"biases": True},
        {"rope_scaling": "linear"},
        {"rope_scaling": "llama3"},
        {"head_dim": 24, "n_embd": 40, "n_ff": 56, "n_vocab": 301},
        {"n_heads": 8, "n_kv_heads": 1},
        {"weight_type": "q4_k", "types": {"output": "q6_k", "attn_v": "f16", "token_embd": "q8_0"}, "n_embd": 256},
    ],
)
def test_variants_load(tmp_path: Path, options: dict[str, Any]) -> None:
    engine = load(build_model(**options), tmp_path)
    assert np.isfinite(next_logits(engine, options.get("n_vocab", 320), [5, 6, 7])).all()


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, True),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 1.0}, True),
        ({"rope__scaling__factor": 0.0}, True),
        ({"rope__freq_base": None}, True),  # 10,000 is the default, and what the model has
        ({"rope__dimension_count": None}, True),
        ({"attention__sliding_window": 4096, "attention__scale": 0.0, "expert_count": 0}, True),
        ({"feed_forward_length": [128, 128]}, True),
        ({"rope__scaling__factor": 4.0}, False),
        ({"rope__scale_linear": 4.0}, False),
        ({"rope__freq_base": 500000.0}, False),
        ({"rope__dimension_count": 8}, False),
        ({"attention__layer_norm_rms_epsilon": 0.01}, False),
    ],
)
def test_metadata_means_what_it_says(tmp_path: Path, changes: dict[str, Any], same: bool) -> None:
    model = build_model()
    plain = next_logits(load(model, tmp_path), 320, [5, 6, 7])
    changed = next_logits(load(model.with_metadata(**changes), tmp_path), 320, [5, 6, 7])
    assert np.array_equal(plain, changed) is same


def test_the_two_ways_to_write_a_linear_factor_agree(tmp_path: Path) -> None:
    model = build_model()
    answers = [
        next_logits(load(model.with_metadata(**{key: 4.0}), tmp_path), 320, [5, 6, 7])
        for key in ("rope__scaling__factor", "rope__scale_linear")
    ]
    np.testing.assert_array_equal(*answers)


@pytest.mark.model
def test_the_file_does_not_stay_in_memory() -> None:
    header = GGUFModel.open(resolve("smollm2"))
    engine = load_engine(header, threads=1)
    mapped = [entry for entry in psutil.Process().memory_maps(grouped=False) if entry.path == str(header.path)]
    assert mapped == []
    assert engine.weight_bytes > 0.9 * header.size_bytes


# --- what the engine cannot run ---


def with_keys(**changes: Any) -> Callable[[TinyModel], TinyModel]:
    return lambda model: model.with_metadata(**changes)


def with_tensor(name: str, tensor: Tensor | None) -> Callable[[TinyModel], TinyModel]:
    return lambda model: model.with_tensors({name: tensor})


UNSUPPORTED: list[tuple[Callable[[TinyModel], TinyModel], str]] = [
    (with_keys(expert_count=8), "mixture of experts"),
    (with_tensor("blk.0.ffn_up_exps.weight", float_tensor(np.ones((2, 4, 8)))), "mixture of experts"),
    (with_keys(attention__sliding_window=512), "sliding window of 512 tokens"),
    (with_keys(attention__scale=0.5), "attention.scale is 0.5"),
    (with_keys(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
    (with_keys(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
    (with_keys(logit_scale=0.25), "logit_scale is 0.25"),
    (with_keys(attention__causal=False), "its attention is not causal"),
    (with_keys(rope__dimension_sections=[4, 4, 0, 0]), "rope.dimension_sections is [4, 4, 0, 0]"),
    (with_keys(rope__scaling__type="ntk"), "RoPE scaling is ntk"),
    (with_keys(rope__scaling__yarn_ext_factor=0.5), "rope.scaling.yarn_ext_factor is 0.5"),
    (with_keys(rope__dimension_count=32), "RoPE rotates 32 of 16 dimensions of a head"),
    (with_keys(rope__dimension_count=7), "RoPE rotates 7 of 16 dimensions"),
    (with_keys(rope__dimension_count=0), "RoPE rotates 0 of 16 dimensions"),
    (with_keys(attention__value_length=8), "its keys have 16 dimensions and its values 8"),
    (with_keys(attention__key_length=20, attention__value_length=20), "its head size is 20"),
    (with_keys(attention__key_length=1024, attention__value_length=1024), "its head size is 1024"),
    (with_keys(attention__head_count_kv=3), "its 4 heads cannot be divided among 3 KV heads"),
    (with_tensor("blk.0.attn_q_a.weight", float_tensor(np.ones((8, 64)))), "the tensor blk.0.attn_q_a.weight"),
    (with_tensor("blk.1.attn_sinks.weight", float_tensor(np.ones(4))), "the tensor blk.1.attn_sinks.weight"),
    (with_tensor("blk.0.attn_qkv.weight", float_tensor(np.ones((128, 64)))), "the tensor blk.0.attn_qkv.weight"),
    (with_tensor("blk.0.ffn_down.bias", float_tensor(np.ones(64))), "the tensor blk.0.ffn_down.bias"),
    (with_tensor("blk.2.attn_norm.weight", float_tensor(np.ones(64))), "the tensor blk.2.attn_norm.weight"),
    (with_tensor("blk.00.attn_norm.weight", float_tensor(np.ones(64))), "the tensor blk.00.attn_norm.weight"),
    (with_tensor("output.bias", float_tensor(np.ones(320))), "the tensor output.bias"),
    (with_tensor("a\nb", float_tensor(np.ones(3))), r"the tensor 'a\nb'"),
    (with_tensor("output.weight", Tensor(Type.IQ1_M, np.zeros((320, 56), np.uint8))), "output.weight is of type IQ1_M"),
    (with_tensor("output_norm.weight", Tensor(Type.F64, np.zeros(512, np.uint8))), "norm.weight is of type F64"),
    (with_tensor("rope_freqs.weight", Tensor(Type.F16, np.ones(16, np.uint8))), "rope_freqs.weight is of type F16"),
]


@pytest.mark.parametrize(("change", "said"), UNSUPPORTED, ids=[said for _, said in UNSUPPORTED])
def test_what_cannot_run_is_named(tmp_path: Path, change: Callable[[TinyModel], TinyModel], said: str) -> None:
    header = opened(change(build_model()), tmp_path)
    reason = unsupported(header)
    assert reason is not None
    assert said in reason
    assert "\n" not in reason
    with pytest.raises(ModelError, match="the native engine cannot run this model: "):
        load_engine(header, threads=1)


def test_other_architectures_are_named(tmp_path: Path) -> None:
    model = opened(build_model(arch="starcoder2"), tmp_path)
    assert unsupported(model) == f"its architecture is starcoder2, not one of {', '.join(ARCHITECTURES_READ)}"


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_frequency_factors_belong_to_llama(tmp_path: Path, arch: str) -> None:
    assert "rope_freqs.weight" in (unsupported(opened(build_model(arch=arch, rope_scaling="llama3"), tmp_path)) or "")


# --- what is damaged ---


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tensor_is_missed_by_name_and_checked_for_its_shape(tmp_path: Path, arch: str) -> None:
    model = build_model(arch=arch, n_layers=1, rope_scaling="llama3" if arch == "llama" else None)
    optional = {"output.weight", "rope_freqs.weight"} | {name for name in model.tensors if name.endswith(".bias")}
    for name, tensor in model.tensors.items():
        without = model.with_tensors({name: None})
        if name in optional:
            load(without, tmp_path)
        else:
            assert f"the tensor {name} is missing" in refusal(without, tmp_path)
        has, *rest = reversed(tensor.shape)
        asked = " x ".join(map(str, (has, *rest)))
        for other, shown in wrong_shapes(tensor):
            assert f"the tensor {name} is {shown}, but should be {asked}" in refusal(
                model.with_tensors({name: other}), tmp_path
            )


def wrong_shapes(tensor: Tensor) -> Iterator[tuple[Tensor, str]]:
    """The tensor with a number too few and too many in each direction, turned round, and as a list of matrices."""
    values = tensor.values()
    shapes = [(*tensor.shape[:-1], tensor.shape[-1] + more) for more in (-1, 1)]
    if len(tensor.shape) == 2:
        rows, cols = tensor.shape
        shapes += [(rows - 1, cols), (rows + 1, cols), (1, rows, cols), (2, rows, cols), (rows * cols,)]
        shapes += [(cols, rows)] if rows != cols else []
        shapes.remove((1, rows, cols))
    else:
        shapes += [(2, *tensor.shape), (tensor.shape[0], 1)]
    for shape in shapes:
        yield float_tensor(np.resize(values, shape)), " x ".join(map(str, reversed(shape)))


def test_a_vector_may_be_written_with_more_dimensions(tmp_path: Path) -> None:
    load(build_model().with_tensors({"output_norm.weight": float_tensor(np.ones((1, 64)))}), tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feed_forward_length": None}, "llama.feed_forward_length is missing"),
        ({"feed_forward_length": [128, 64, 32]}, "llama.feed_forward_length is [128, 64, 32]"),
        ({"feed_forward_length": 0}, "llama.feed_forward_length is 0"),
        ({"feed_forward_length": 2**31}, "llama.feed_forward_length is 2147483648"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"attention__layer_norm_rms_epsilon": -1e-5}, "layer_norm_rms_epsilon is -"),
        ({"rope__freq_base": 0.0}, "llama.rope.freq_base is 0.0"),
        ({"rope__freq_base": float("inf")}, "llama.rope.freq_base is inf"),
        ({"rope__scaling__factor": -2.0}, "llama.rope.scaling.factor is -2.0"),
        ({"rope__scaling__factor": float("nan")}, "llama.rope.scaling.factor is nan"),
        ({"block_count": 10**9}, "the tensor blk.2.attn_norm.weight is missing"),
        ({"block_count": 2**31 - 1}, "the tensor blk.2.attn_norm.weight is missing"),
        ({"embedding_length": 2**31 - 1}, "the tensor token_embd.weight is 64 x 320, but should be 2147483647 x 320"),
        (
            {"attention__head_count": 2**31 - 2},
            f"blk.0.attn_q.weight is 64 x 64, but should be 64 x {16 * (2**31 - 2)}",
        ),
        (
            {"tokenizer.ggml.tokens": None, "vocab_size": 2**31 - 1},
            "the tensor token_embd.weight is 64 x 320, but should be 64 x 2147483647",
        ),
    ],
)
def test_absurd_numbers_are_refused_before_memory_is_taken(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    before = psutil.Process().memory_info().vms
    assert said in refusal(build_model().with_metadata(**changes), tmp_path)
    assert psutil.Process().memory_info().vms - before < 64 << 20


@pytest.mark.parametrize(
    ("key", "value"), [("rope.freq_base", "high"), ("expert_count", "many"), ("rope.scaling.type", 1)]
)
def test_values_of_another_type_are_refused_by_key(tmp_path: Path, key: str, value: object) -> None:
    model = opened(build_model().with_metadata(**{key: value}), tmp_path)
    with pytest.raises(ModelError, match=f"the metadata key llama.{key} is a "):
        load_engine(model, threads=1)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_values_that_are_not_finite_are_refused_by_tensor(tmp_path: Path, weight_type: str) -> None:
    model = build_model(weight_type=weight_type, n_embd=256, n_ff=256, n_layers=1)
    for name in ("token_embd.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight"):
        tensor = model.tensors[name]
        raw = tensor.raw.copy().reshape(-1)
        raw[:4] = 0xFF  # a NaN of every type of number
        if tensor.type in (Type.Q6_K, Type.Q3_K, Type.Q2_K):  # which have a scale or minimum at the end
            raw[-2:] = 0xFF
        broken = model.with_tensors({name: Tensor(tensor.type, raw.reshape(tensor.raw.shape))})
        message = refusal(broken, tmp_path)
        assert f"the tensor {name} cannot be used: " in message
        assert "not finite" in message


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_frequency_factors_are_positive_numbers(tmp_path: Path, factor: float) -> None:
    factors = np.ones(8)
    factors[5] = factor
    message = refusal(build_model().with_tensors({"rope_freqs.weight": float_tensor(factors)}), tmp_path)
    assert "the tensor rope_freqs.weight" in message


def test_a_file_that_changed_after_its_header_was_read(tmp_path: Path) -> None:
    model = opened(build_model(), tmp_path)
    content = model.path.read_bytes()
    model.path.write_bytes(content[:-1000])
    said = rf"changed while it was being loaded \(it had {len(content)} bytes and has {len(content) - 1000}\)"
    with pytest.raises(ModelError, match=said):
        load_engine(model, threads=1)
    model.path.write_bytes(content)
    os.utime(model.path, ns=(0, 0))
    with pytest.raises(ModelError, match="changed while it was being loaded; start again"):
        load_engine(model, threads=1)
    model.path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load_engine(model, threads=1)


class LoadingStopped:
    """An engine that lets the test do something to the file between two tensors."""

    def __init__(self, meanwhile: Callable[[], object], after: int) -> None:
        self._meanwhile = meanwhile
        self._left = after

    def __call__(self, **_: Any) -> LoadingStopped:
        return self

    def load(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._meanwhile()

    def seal(self) -> None:
        pass


@pytest.mark.parametrize("after", [1, 10, 21])  # of 21: at the last one, all has been read
def test_a_file_cut_short_between_two_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    model = opened(build_model(), tmp_path)
    assert len(model.tensors) == 21
    engine = LoadingStopped(lambda: os.truncate(model.path, 1000), after)
    monkeypatch.setattr(loader, "Engine", engine)
    with pytest.raises(ModelError) as caught:
        load_engine(model, threads=1)
    assert f"{model.path}: changed while it was being loaded (it had " in str(caught.value)


def test_a_file_written_to_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(build_model(), tmp_path)

    def write() -> None:
        with model.path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(bytes(8))
        os.utime(model.path, ns=(1, 1))  # some file systems count time in seconds

    monkeypatch.setattr(loader, "Engine", LoadingStopped(write, 3))
    with pytest.raises(ModelError, match="changed while it was being loaded; start again"):
        load_engine(model, threads=1)


def test_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(build_model(), tmp_path)

    class FailingFile(io.FileIO):
        def readinto(self, _: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "open", lambda self, *_, **__: FailingFile(str(self)))
    with pytest.raises(ModelError, match=r"cannot be read \(Input/output error\)"):
        load_engine(model, threads=1)


def test_a_file_replaced_by_a_whole_one_does_not_disturb(tmp_path: Path) -> None:
    """Atomic replacement is how files should be written: what is open stays what it was."""
    model = opened(build_model(), tmp_path)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"another file")
    with TensorFile(model) as file:
        before = file.read("output_norm.weight").copy()
        other.replace(model.path)
        np.testing.assert_array_equal(file.read("output_norm.weight"), before)


def test_the_number_of_threads_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="threads is 0"):
        load_engine(opened(build_model(), tmp_path), threads=0)


# --- what is damaged at random, in a process that may die of it ---


@pytest.fixture(scope="module")
def loading() -> Iterator[LoadingProcess]:
    process = LoadingProcess()
    yield process
    process.close()


@dataclass(frozen=True)
class ValidFile:
    content: bytes = field(repr=False)
    weights_at: int


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[ValidFile]:
    options: list[dict[str, Any]] = [
        {"weight_type": "q4_1", "rope_scaling": "llama3"},
        {"arch": "qwen2", "weight_type": "q8_0", "tied": True},
        {"arch": "qwen3", "weight_type": "q4_k", "n_embd": 256, "n_ff": 256},
        {"weight_type": "q6_k", "n_embd": 256, "n_ff": 256, "types": {"output": "f16", "attn_v": "q5_k"}},
    ]
    path = tmp_path_factory.mktemp("valid") / "valid.gguf"
    found = []
    for each in options:
        model = GGUFModel.open(write_model(path, n_layers=1, n_vocab=40, **each))
        found.append(ValidFile(path.read_bytes(), min(info.offset for info in model.tensors.values())))
    return found


PATCHES = st.sampled_from([
    b"\xff", b"\0", b"\x7f", b"\x80", b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**31), struct.pack("<Q", 2**63),
    struct.pack("<I", 2**31 - 1), struct.pack("<f", np.inf), struct.pack("<f", np.nan),
]) | st.binary(min_size=1, max_size=9)  # fmt: skip


@settings(max_examples=sampled(400), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_files_load_or_are_refused(
    tmp_path: Path, loading: LoadingProcess, files: list[ValidFile], data: st.DataObject
) -> None:
    valid = data.draw(st.sampled_from(files))
    mutated, weights_at = bytearray(valid.content), valid.weights_at
    for _ in range(data.draw(st.integers(1, 4))):
        # Most of a file is weights, but most of what can go wrong is in the header, and most of that near tensors.
        low = data.draw(st.sampled_from([0, weights_at // 2, weights_at]))
        at = data.draw(st.integers(low, (weights_at if low < weights_at else len(mutated)) - 1))
        patch = data.draw(PATCHES)
        inserted = data.draw(st.integers(0, 9)) == 0
        mutated[at : at if inserted else at + len(patch)] = patch
    end = len(mutated) if data.draw(st.integers(0, 3)) else data.draw(st.integers(len(mutated) // 2, len(mutated) + 9))
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutated[:end])
    outcome = loading.outcome(path)
    assert outcome.startswith(("loaded", "refused: ")), outcome
    assert "\n" not in outcome


@settings(max_examples=sampled(200), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_changed_numbers_load_or_are_refused(tmp_path: Path, loading: LoadingProcess, data: st.DataObject) -> None:
    """Sound files with other numbers: what bytes changed at random seldom reach."""
    model = build_model(arch=data.draw(st.sampled_from(ARCHITECTURES)), n_layers=1, n_vocab=40)
    numbers = st.integers(0, 300) | st.sampled_from([2**16, 2**31 - 1, 2**32 - 1])
    floats = st.floats(width=32)
    keys = {
        "block_count": numbers, "embedding_length": numbers, "feed_forward_length": numbers, "context_length": numbers,
        "attention.head_count": numbers, "attention.head_count_kv": numbers, "attention.key_length": numbers,
        "attention.value_length": numbers, "rope.dimension_count": numbers, "rope.freq_base": floats,
        "attention.layer_norm_rms_epsilon": floats, "rope.scaling.factor": floats, "expert_count": numbers,
    }  # fmt: skip
    for key in data.draw(st.lists(st.sampled_from(sorted(keys)), max_size=3)):
        model = model.with_metadata(**{key: data.draw(keys[key])})
    for name in data.draw(st.lists(st.sampled_from(sorted(model.tensors)), max_size=2)):
        shape = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
        model = model.with_tensors({name: float_tensor(np.full(shape, data.draw(floats)))})
    outcome = loading.outcome(model.write(tmp_path / "changed.gguf"))
    assert outcome.startswith(("loaded", "refused: ")), outcome
    assert "\n" not in outcome


MANY_THREADS = """
import resource, sys
from pathlib import Path
from cllm.backends.native.loader import load_engine
from cllm.errors import ConfigError
from cllm.models.gguf import GGUFModel
model = GGUFModel.open(Path(sys.argv[1]))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 256 * 2**20,) * 2)
try:
    load_engine(model, threads=1000)
except ConfigError as error:
    print(error)
load_engine(model, threads=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does it")
def test_more_threads_than_the_system_gives_is_a_line_that_says_so(tmp_path: Path) -> None:
    path = opened(build_model(), tmp_path).path
    done = subprocess.run([sys.executable, "-c", MANY_THREADS, str(path)], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"the system refused to start thread \d+ of 1000: .*; lower backend.threads, or raise the limit .*\n",
        done.stdout,
    )
