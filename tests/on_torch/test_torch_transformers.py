"""What the torch backend computes is what transformers computes, for every architecture: f32, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from torch_kit import (
    MODELS,
    RICH,
    SEEING,
    all_logits,
    build,
    build_seeing,
    greedy,
    in_chunks,
    open_backend,
    random_tokens,
    save,
)

TOKENS = random_tokens(150)


@pytest.mark.parametrize("kind", MODELS | RICH)
def test_logits_and_greedy_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
        prompt = torch.tensor([TOKENS[:40]])
        answer = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    with open_backend(save(model, tmp_path)) as backend:
        found = all_logits(backend, TOKENS)
        assert expected.std() > 0.1, "a model that says nothing would agree with anything"
        assert np.abs(found - expected).max() < 1e-4
        assert greedy(backend, TOKENS[:40], 40) == answer
        for size in (7, 33, len(TOKENS)):
            assert np.abs(in_chunks(backend, TOKENS, size) - expected[-1]).max() < 1e-4


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma4 E"])
def test_the_invariant_mode_gives_the_same_bits_with_windows(kind: str, tmp_path: Path) -> None:
    with open_backend(save(build(kind), tmp_path), invariant=True) as backend:
        expected = all_logits(backend, TOKENS)[-1]
        for size in (1, 7, 33, len(TOKENS)):
            assert np.array_equal(in_chunks(backend, TOKENS, size), expected)


@pytest.mark.parametrize("family", SEEING)
def test_of_models_of_images_the_text_part_is_read(family: str, tmp_path: Path) -> None:
    model = build_seeing(family)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    with open_backend(save(model, tmp_path)) as backend:
        assert expected.std() > 0.1
        assert np.abs(all_logits(backend, TOKENS) - expected).max() < 1e-4


def test_weights_in_parts_and_in_half_precision(tmp_path: Path) -> None:
    save(build("qwen2").bfloat16(), tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    with open_backend(tmp_path) as backend:
        assert np.abs(all_logits(backend, TOKENS) - expected).max() < 1e-4


@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 0.15), ("f16", 0.02)])
def test_half_precision_is_near(dtype: str, limit: float, tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    with open_backend(save(model, tmp_path), dtype=dtype, kv_type=dtype) as backend:
        error = np.abs(all_logits(backend, TOKENS) - expected).max() / expected.std()
    assert 0 < error < limit
