"""Reading GGUF headers: right numbers from good files, one clear line from all others."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.models.spec import AttentionSpec, LayerSpec, ModelSpec
from gguf_kit import LLAMA_KEYS, tiny_model, write_gguf
from native_kit import write_model
from thorough import sampled


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GGUFModel.open(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.mark.model
def test_the_default_model_has_the_documented_shape() -> None:
    model = GGUFModel.open(resolve("smollm2"))
    assert model.spec == ModelSpec("llama", 576, 49152, 8192, (LayerSpec(AttentionSpec(9, 3, 64, 64)),) * 30, tied=True)
    assert model.size_bytes == 98_362_432
    assert model.name.startswith("Smollm2")


def test_metadata_comes_back_as_written(tiny: Path) -> None:
    model = GGUFModel.open(tiny)
    assert (model.path, model.name, model.size_bytes) == (tiny, "tiny", tiny.stat().st_size)
    assert model.get("llama.block_count", 0) == 2
    assert model.get("llama.attention.layer_norm_rms_epsilon", 0.0) == pytest.approx(1e-5)
    assert model.get("tokenizer.ggml.tokens", [""]) == ["a", "b", "ä"]
    assert model.get("tokenizer.ggml.scores", [0.0]) == [0.5, -1.0, 2.0]
    assert model.get("general.missing", "default") == "default"


def test_the_tensor_directory_leads_to_the_data(tmp_path: Path) -> None:
    tensors = {"one.weight": np.arange(96, dtype=np.float32).reshape(3, 32), "two.bias": np.arange(5, dtype=np.float32)}
    model = GGUFModel.open(
        write_gguf(tmp_path / "t.gguf", LLAMA_KEYS | {"llama.vocab_size": 5, "general.alignment": 64}, tensors=tensors)
    )
    content = model.path.read_bytes()
    assert {name: (info.type, info.shape) for name, info in model.tensors.items()} == {
        "one.weight": (0, (32, 3)),
        "two.bias": (0, (5,)),
    }
    for name, info in model.tensors.items():
        assert content[info.offset : info.offset + info.size] == tensors[name].tobytes()


def test_a_value_of_another_type_than_the_default_is_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny\.gguf: the metadata key general\.name is a str, not a int"):
        GGUFModel.open(tiny).get("general.name", 1)


def test_the_name_falls_back_to_the_file(tmp_path: Path) -> None:
    assert (
        GGUFModel.open(write_gguf(tmp_path / "nameless.gguf", LLAMA_KEYS | {"llama.vocab_size": 5})).name == "nameless"
    )


def test_shape_with_its_own_head_size(tmp_path: Path) -> None:
    keys = {key.replace("llama", "qwen3"): value for key, value in LLAMA_KEYS.items()}
    keys |= {"qwen3.attention.key_length": 128, "qwen3.attention.value_length": 96, "qwen3.vocab_size": 100}
    spec = GGUFModel.open(write_gguf(tmp_path / "q.gguf", keys, architecture="qwen3")).spec
    assert spec == ModelSpec("qwen3", 64, 100, 128, (LayerSpec(AttentionSpec(4, 2, 128, 96)),) * 2, tied=True)


def test_shape_defaults_and_per_layer_lists(tmp_path: Path) -> None:
    keys = LLAMA_KEYS | {"llama.vocab_size": 7, "llama.attention.head_count": [4, 4]}
    del keys["llama.attention.head_count_kv"]
    spec = GGUFModel.open(write_gguf(tmp_path / "l.gguf", keys)).spec
    assert spec.layers == (LayerSpec(AttentionSpec(4, 4, 16, 16)),) * 2


MAMBA = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.group_count": 2}


@pytest.mark.parametrize(
    ("architecture", "change", "attends", "state"),
    [
        ("lfm2", {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}, "_x", 2 * 64),
        ("granitehybrid", MAMBA | {"attention.head_count_kv": [0, 2]}, "_x", 3 * (128 + 64) + 16 * 128),
        ("qwen35", MAMBA | {"full_attention_interval": 2}, "_x", 3 * (128 + 64) + 16 * 128),
        (
            "qwen35",
            MAMBA | {"block_count": 3, "nextn_predict_layers": 1, "attention.recurrent_layers": [1, 0, 0]},
            "_x",
            3 * (128 + 64) + 16 * 128,
        ),
        ("falcon-h1", MAMBA, "xx", 2 * (3 * (128 + 64) + 16 * 128)),
        ("mamba", MAMBA | {"attention.head_count": 0, "ssm.group_count": 0}, "__", 2 * (3 * 128 + 16 * 128)),
        ("rwkv7", {"wkv.head_size": 32, "attention.head_count": 0}, "__", 2 * 64 * (2 + 32)),
        ("kimi-linear", {"kda.head_dim": 16, "attention.head_count_kv": [0, 1]}, "_x", 4 * 16 * (9 + 16)),
    ],
)
def test_sizes_of_layers_that_carry_a_state(
    tmp_path: Path, architecture: str, change: dict[str, object], attends: str, state: int
) -> None:
    keys = {key.replace("llama", architecture): value for key, value in LLAMA_KEYS.items()}
    keys |= {f"{architecture}.{key}": value for key, value in change.items()} | {f"{architecture}.vocab_size": 7}
    spec = GGUFModel.open(write_gguf(tmp_path / "h.gguf", keys, architecture=architecture)).spec
    assert "".join("_" if layer.attention is None else "x" for layer in spec.layers) == attends
    assert spec.state_bytes == 4 * state and spec.recurrent
    per_layer = 2 * 2 * 16 * (1 if architecture == "kimi-linear" else 2)
    assert spec.kv_bytes_per_token("f16", "f16") == per_layer * attends.count("x")


def test_layers_that_neither_attend_nor_carry_a_state_are_refused(tmp_path: Path) -> None:
    changes = {"llama.attention.head_count_kv": [0, 2], "llama.shortconv.l_cache": 0, "llama.vocab_size": 5}
    named = "no metadata key says how large the state of the others is (one of llama.ssm.conv_kernel, "
    assert named in refusal(write_gguf(tmp_path / "d.gguf", LLAMA_KEYS | changes))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": "many"}, "llama.block_count is 'many'"),
        ({"llama.attention.head_count_kv": [2, 3, 4]}, "llama.attention.head_count_kv is [2, 3, 4]"),
        ({"llama.attention.head_count": 65}, "llama.attention.key_length is 0"),
        ({"llama.context_length": 2**32 - 1}, "llama.context_length is 4294967295"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"general.alignment": 0}, "general.alignment is 0"),
    ],
)
def test_unusable_metadata_is_refused_by_key(tmp_path: Path, change: dict[str, object], named: str) -> None:
    keys = {key: value for key, value in (LLAMA_KEYS | {"llama.vocab_size": 5} | change).items() if value is not None}
    assert named in refusal(write_gguf(tmp_path / "m.gguf", keys))


def test_an_architecture_that_is_no_name_is_refused(tmp_path: Path) -> None:
    assert r"general.architecture is 'a\nb'" in refusal(write_gguf(tmp_path / "m.gguf", architecture="a\nb"))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf")
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "only 0 bytes"),
        (b"GGUF", "only 4 bytes"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "not a GGUF file (it begins with b'<!DO'"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "has version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63), f"claims {2**63} metadata entries"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**64 - 1, 0), "claims 18446744073709551615 tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "general.architecture is missing"),
        (struct.pack("<4sIQQQ40x", b"GGUF", 3, 0, 1, 2**40), "a string in its header ends at byte"),
        (struct.pack("<4sIQQQ1sI40x", b"GGUF", 3, 0, 1, 1, b"k", 99), "'k' has the unknown type 99"),
        (struct.pack("<4sIQQQ1sIIQ40x", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1), "elements of the unknown type 9"),
        (struct.pack("<4sIQQQ1sIIQ40x", b"GGUF", 3, 0, 1, 1, b"k", 9, 4, 2**62), f"claims {2**62} numbers in 'k'"),
        (struct.pack("<4sIQQQ1sIIQ40x", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**62), f"claims {2**62} strings in 'k'"),
        (struct.pack("<4sIQQQ1sIBQ1sIB9x", b"GGUF", 3, 0, 2, 1, b"k", 7, 1, 1, b"k", 7, 1), "'k' occurs twice"),
        (struct.pack("<4sIQQQ1sI40x", b"GGUF", 3, 1, 0, 1, b"t", 5), "tensor 't' has 5 dimensions"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 32, 999, 0), "'t', of the unknown type 999"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 33, 2, 0), "rows of 33, not whole blocks of 32"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 2**63, 0, 0), "tensor 't' ends at byte"),
        (struct.pack("<4sIQQQ1sIQQIQ", b"GGUF", 3, 1, 0, 1, b"t", 2, 2**63, 2**63, 0, 0), "tensor 't' ends at byte"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 1, 0, 2**64 - 1), "tensor 't' ends at byte"),
        (struct.pack("<4sIQQQ1sIQQIQ", b"GGUF", 3, 1, 0, 1, b"t", 2, 2**63, 0, 0, 0), "'t' has a dimension of 0"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 1, 0, 1, b"t", 0, 2, 0), "rows of 1, not whole blocks of 32"),
        (
            struct.pack("<4sIQQ" + "Q1sIQIQ" * 2 + "64x", b"GGUF", 3, 2, 0, *(1, b"t", 1, 1, 0, 0) * 2),
            "the tensor 't' occurs twice",
        ),
    ],
)
def test_foreign_and_damaged_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert said in refusal(path)


def test_a_tensor_past_the_end_is_named_with_both_sizes(tiny: Path) -> None:
    whole = tiny.read_bytes()
    tiny.write_bytes(whole[:-1])
    assert f"tensor 'two.weight' ends at byte {len(whole)}, the file has {len(whole) - 1}" in refusal(tiny)


def test_tensors_that_share_their_bytes_are_refused(tiny: Path) -> None:
    # Both become tensors of 1,408 bytes at 0.
    content = bytearray(tiny.read_bytes())
    for name, rows in ((b"one.weight", 11), (b"two.weight", 11)):
        at = content.index(name) + len(name)
        content[at : at + 32] = struct.pack("<IQQIQ", 2, 32, rows, 0, 0)
    tiny.write_bytes(content)
    assert "its tensors 'one.weight' and 'two.weight' overlap" in refusal(tiny)


def test_every_truncation_is_refused(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "cut.gguf"
    for size in range(0, len(tiny_bytes), 7):
        path.write_bytes(tiny_bytes[:size])
        refusal(path)


@settings(max_examples=sampled(300), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_bytes_give_a_model_or_a_model_error(tmp_path: Path, tiny_bytes: bytes, data: st.DataObject) -> None:
    mutated = bytearray(tiny_bytes)
    header = len(tiny_bytes) - 12 * 32 * np.dtype(np.float32).itemsize
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1))
        patch = data.draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff", b"\0", b"\x7f"]) | st.binary(max_size=9))
        mutated[at : at + len(patch)] = patch
    path = tmp_path / "mutated.gguf"
    path.write_bytes(bytes(mutated[: data.draw(st.integers(len(tiny_bytes) // 2, len(tiny_bytes) + 9))]))
    try:
        model = GGUFModel.open(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert model.spec.n_layers > 0


@pytest.mark.parametrize(
    ("stated", "shown"),
    [
        (15, "Q4_K_M"),
        (14, "Q4_K_S"),
        (1024 + 15, "Q4_K_M"),  # the converter's guess
        (7, "Q4_K"),  # Q8_0, of which it has nothing
        (9999, "Q4_K"),
        ("Q4_K_M", "Q4_K"),
        (None, "Q4_K"),
    ],
)
def test_the_type_is_the_stated_one_if_there_are_such_tensors(stated: object, shown: str, tmp_path: Path) -> None:
    types = {"ffn_down": "q6_k"}
    file = write_model(tmp_path / "q8_0.gguf", weight_type="q4_k", types=types, n_embd=256, n_ff=512, n_vocab=327)
    model = GGUFModel.open(file)
    assert replace(model, metadata={**model.metadata, "general.file_type": stated}).weight_type == shown
