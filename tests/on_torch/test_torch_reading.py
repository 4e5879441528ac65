"""Log probabilities of prompts and hidden states on torch are those of transformers, however a text is cut."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cllm import LLM, SamplingParams
from cllm.backends.base import Chunk, Hidden, Pooling, PromptScores, Scoring
from cllm.backends.torch.backend import TorchBackend
from torch_kit import BLOCK, build, open_backend, random_tokens, save, save_whole

TOKENS = random_tokens(150)
BLOCKS = list(range(-(-len(TOKENS) // BLOCK)))


def read(backend: TorchBackend, chunk: Chunk) -> PromptScores | Hidden:
    return backend.collect(backend.submit([chunk])).read[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cuts", [[150], [1, 60, 149, 150]])
def test_scores_and_states_are_those_of_transformers(cuts: list[int], depth: int, tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        given = model(torch.tensor([TOKENS]), output_hidden_states=True)
        expected = torch.log_softmax(given.logits[0].double(), dim=-1).numpy()
        states = given.hidden_states[-1][0].double().numpy()
    tokens, found = array("i", TOKENS), []
    before = None
    with open_backend(save(model, tmp_path)) as backend:
        backend.traits = replace(backend.traits, depth=depth)
        start = 0
        for end in cuts:
            chunk = Chunk(tokens[start:end], start, 0, blocks=BLOCKS, row=1)
            chunk.asks = Scoring(tokens[start + 1 : end + 1], 3)
            if chunk.asks.targets:
                scores = read(backend, chunk)
                assert isinstance(scores, PromptScores)
                found.append(scores)
            chunk.asks = Pooling("mean", before)
            summed = read(backend, chunk)
            assert isinstance(summed, np.ndarray)
            before, start = summed, end
        chunk.asks = Pooling("last")
        last = read(backend, chunk)
    logprobs = np.concatenate([scores.logprobs for scores in found])
    rows = np.arange(149)
    assert np.abs(logprobs - expected[rows, TOKENS[1:]]).max() < 1e-4
    ranks = 1 + (expected[:149] > expected[rows, TOKENS[1:]][:, None]).sum(axis=1)
    assert np.array_equal(np.concatenate([scores.ranks for scores in found]), ranks)
    tops = np.concatenate([scores.top_logprobs for scores in found])
    assert np.abs(tops - np.sort(expected[:149], axis=1)[:, :-4:-1]).max() < 1e-4
    assert before is not None and np.abs(before - states.sum(axis=0)).max() < 1e-2
    assert np.abs(last - states[-1]).max() < 1e-4


def test_the_whole_engine_on_torch_scores_and_embeds(tmp_path: Path) -> None:
    model = build("qwen3")
    with torch.no_grad():
        given = model(torch.tensor([TOKENS]), output_hidden_states=True)
        expected = torch.log_softmax(given.logits[0].double(), dim=-1).numpy()
        state = given.hidden_states[-1][0, -1].double().numpy()
    settings = {
        "kv.disk.enabled": False, "resources.kv_cache_max_memory_mb": 16, "scheduler.max_step_tokens": 32,
        "backend.torch.dtype": "f32", "backend.torch.device": "cpu", "resources.kv_type_k": "f32",
        "resources.kv_type_v": "f32",
    }  # fmt: skip
    with LLM(str(save_whole(model, tmp_path)), backend="torch", settings=settings) as llm:
        (scored,) = llm.generate([TOKENS], SamplingParams(max_tokens=0, prompt_logprobs=1))
        (again,) = llm.generate([TOKENS], SamplingParams(max_tokens=0, prompt_logprobs=1))
        vector = llm.embed([TOKENS])[0]
    assert scored.prompt_logprobs is not None and again.prompt_logprobs is not None
    assert np.abs(scored.prompt_logprobs.logprobs - expected[np.arange(149), TOKENS[1:]]).max() < 1e-4
    assert np.abs(scored.prompt_logprobs.logprobs - again.prompt_logprobs.logprobs).max() < 1e-5
    assert np.abs(vector - state / np.linalg.norm(state)).max() < 1e-4
