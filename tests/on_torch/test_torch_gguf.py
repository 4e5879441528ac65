"""GGUF files on torch: what is dequantised computes what the native engine computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from architecture_kit import TINY, write_tiny
from cllm.backends.torch.backend import TorchBackend
from cllm.backends.torch.batch import make_batch
from cllm.backends.torch.sources import open_source, spec_of, unsupported
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text.tokenizer import load_tokenizer
from cllm_bench.quality.texts import TEXT
from group_kit import GroupedSteps
from native_kit import write_model
from plain_model import PlainModel
from step_kit import Rig, random_tokens
from torch_kit import BLOCK, Floats

TOKENS = random_tokens(300, 70)


def logits_of_all(path: Path, tokens: list[int]) -> Floats:
    """Of every position, in one step."""
    with TorchBackend(GGUFModel.open(path), device="cpu", kv_type="f32", threads=2) as backend:
        assert isinstance(backend, TorchBackend)
        steps = GroupedSteps(backend)
        context = backend._worker.context
        batch = make_batch([steps.chunk(steps.begin(len(tokens)), tokens)], BLOCK, torch.device("cpu"), steps.layout)
        with torch.inference_mode():
            every = replace(batch, wanted=torch.arange(len(tokens)))
            found: Floats = context.model.forward(every, context.arena).numpy()
        return found


FEW_BITS = ("mxfp4", "iq4_nl", "iq4_xs", "q3_k", "q2_k", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs")


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "llama"},
        {"arch": "llama", "tied": True, "rope_scaling": "llama3", "weight_type": "f16"},
        {"arch": "llama", "biases": True, "rope_scaling": "linear", "head_dim": 32},
        {"arch": "qwen2", "weight_type": "q8_0"},
        {"arch": "qwen3", "n_embd": 256, "weight_type": "q4_k", "types": {"ffn_down": "q6_k"}, "head_dim": 32},
        {"arch": "qwen3", "weight_type": "bf16", "tied": True},
        *({"arch": "llama", "n_embd": 256, "n_ff": 256, "weight_type": kind} for kind in FEW_BITS),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_small_models_are_what_native_computes(options: dict[str, object], tmp_path: Path) -> None:
    """Native rounds activations to 8 bits, and K and V to 16."""
    path = write_model(tmp_path / "model.gguf", **options)
    rig = Rig(path, threads=1)
    expected = rig.all_logits(TOKENS, rig.table(len(TOKENS)))
    found = logits_of_all(path, TOKENS)
    rounded = options.get("weight_type", "f32") in ("q8_0", "q4_k", *FEW_BITS)
    error = np.sqrt(np.square(found - expected).mean()) / expected.std()
    assert error < (0.05 if rounded else 2e-3), error
    assert (found.argmax(1) == expected.argmax(1)).mean() > (0.8 if rounded else 0.97)


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_is_what_its_description_says(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", TINY[name])
    tokens = [token % 97 for token in TOKENS[:70]]
    expected = PlainModel(GGUFModel.open(path)).logits(tokens)
    assert np.abs(logits_of_all(path, tokens) - expected).max() < 1e-3 * expected.std()


def test_every_tensor_has_its_place(tmp_path: Path) -> None:
    for arch in ("llama", "qwen2", "qwen3"):
        model = GGUFModel.open(write_model(tmp_path / f"{arch}.gguf", arch=arch, rope_scaling="linear"))
        assert unsupported(model) is None
        with open_source(model) as source:
            assert len(list(source.tensors(spec_of(model)))) == len(model.tensors)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    model = GGUFModel.open(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match="changed while it was being loaded") as caught:
        TorchBackend(model, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_smollm2_has_the_perplexity_it_has_on_native() -> None:
    path = resolve("smollm2")
    tokens = load_tokenizer(GGUFModel.open(path)).encode(TEXT.read_text("utf-8"))[:1024]
    rig = Rig(path, blocks=len(tokens) // 16)
    native = perplexity(rig.all_logits(tokens, rig.table(len(tokens))), tokens)
    ours = perplexity(logits_of_all(path, tokens), tokens)
    print(f"\nperplexity {ours:.4f}, on native {native:.4f} ({100 * (ours / native - 1):+.3f} %)")
    assert abs(ours / native - 1) < 0.005


def perplexity(logits: Floats, tokens: list[int]) -> float:
    total = 0.0
    for begin in range(0, len(tokens) - 1, 128):
        following = np.array(tokens[begin + 1 : begin + 129])
        rows = logits[begin : begin + len(following)].astype(np.float64)
        rows -= rows.max(1, keepdims=True)
        chosen = np.take_along_axis(rows, following[:, None], 1)[:, 0]
        total += float((np.log(np.exp(rows).sum(1)) - chosen).sum())
    return float(np.exp(total / (len(tokens) - 1)))
