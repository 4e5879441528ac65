"""Models whose layers carry a state: what torch computes is what transformers computes, however a text is cut, whatever
else is in a step, and from wherever it goes on. f32, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cllm import LLM, SamplingParams
from cllm.backends.torch.backend import TorchBackend
from cllm.backends.torch.device import unsupported_heads
from cllm.backends.torch.worker import Setup
from cllm.errors import BackendError
from cllm.kv.groups import LocalBlock
from cllm.kv.ops import BlockGeometry
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.models.hf_directory import HFModel
from engine_kit import assert_nothing_left
from group_kit import NO_NUMBER, GroupedSteps
from torch_kit import BLOCK, STATES, Floats, build, random_tokens, save, save_whole

TOKENS = random_tokens(150)
KINDS = ["qwen3.5", "lfm2", "falcon h1"]
"""One of every rule."""


def opened(path: Path, kv_type: str = "f32", **options: Any) -> GroupedSteps:
    backend = TorchBackend(HFModel.open(path), device="cpu", kv_type=kv_type, threads=1, **options)
    return GroupedSteps(backend, kv_type)


def greedy(steps: GroupedSteps, prompt: list[int], count: int) -> list[int]:
    sequence, tokens, new = steps.begin(len(prompt) + count), list(prompt), prompt
    for _ in range(count):
        new = [int(steps.step((sequence, new))[0].argmax())]
        tokens += new
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", STATES)
def test_logits_and_greedy_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    with torch.no_grad():
        expected: Floats = model(torch.tensor([TOKENS])).logits[0].numpy()
        prompt = torch.tensor([TOKENS[:40]])
        answer = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    steps = opened(save(model, tmp_path))
    with steps.backend:
        assert expected.std() > 0.1, "a model that says nothing would agree with anything"
        sequence = steps.begin(len(TOKENS))
        found = np.concatenate([steps.step((sequence, [token])) for token in TOKENS])
        assert np.abs(found - expected).max() < 1e-4
        assert greedy(steps, TOKENS[:40], 40) == answer
        for size in (7, 33, len(TOKENS)):
            assert np.abs(steps.run(TOKENS, size) - expected[-1]).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_kinds_go_together(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    steps = opened(save(model, tmp_path))
    with steps.backend:
        sequences = [steps.begin(len(TOKENS)) for _ in range(3)]
        for counts in ((60, 2, 5), (1, 30, 1), (20, 1, 3), (1, 1, 1), (1, 40, 9)):
            parts = [
                (each, TOKENS[each.done : each.done + count]) for each, count in zip(sequences, counts, strict=True)
            ]
            found = steps.step(*parts)
            assert np.abs(found - expected[[each.done - 1 for each in sequences]]).max() < 1e-4


@pytest.mark.parametrize("kind", STATES)
def test_the_invariant_mode_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    """In chunks of any size, among others, and from a snapshot."""
    steps = opened(save(build(kind), tmp_path), invariant=True)
    with steps.backend:
        expected = steps.run(TOKENS, len(TOKENS))
        for size in (1, 7, 64):
            assert np.array_equal(steps.run(TOKENS, size), expected)
        parent, other = steps.begin(len(TOKENS)), steps.begin(len(TOKENS))
        steps.step((other, TOKENS[:9][::-1]), (parent, TOKENS[:48]))
        twin, snapshot = steps.go_on(parent, len(TOKENS)), parent.state.current
        steps.step((parent, TOKENS[60:90]), (other, TOKENS[:1]), keep=[snapshot])
        found = steps.step((parent, TOKENS[:3]), (twin, TOKENS[48:]), keep=[snapshot])
        assert np.array_equal(found[1], expected)
        again = steps.go_on(parent, len(TOKENS))
        again.blocks[:3], again.state.current, again.done = parent.blocks[:3], snapshot, 48
        assert np.array_equal(steps.step((again, TOKENS[48:]))[0], expected), "the snapshot is what it was"


@pytest.mark.parametrize("kv_type", ["f16", "int8", "fp8"])
def test_states_are_exact_whatever_keys_and_values_are(kv_type: str, tmp_path: Path) -> None:
    path = save(build("falcon h1"), tmp_path)
    states = []
    for each in ("f32", kv_type):
        steps = opened(path, each)
        with steps.backend:
            sequence = steps.begin(64)
            steps.step((sequence, TOKENS[:40]))
            assert sequence.state.current is not None
            memory = steps.backend._worker.context.arena.states[0]
            cells = torch.tensor([sequence.state.current.cells])
            states.append(torch.cat([part.read(cells, None).flatten() for part in (memory.heads, memory.inputs)]))
    assert torch.equal(*states), "of the first layer, which sees no other keys and values"


@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 0.2), ("f16", 0.03)])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_near(kind: str, dtype: str, limit: float, tmp_path: Path) -> None:
    model = build(kind)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1].numpy()
    steps = opened(save(model, tmp_path), dtype, dtype=dtype)
    with steps.backend:
        error = np.abs(steps.run(TOKENS, 64) - expected).max() / expected.std()
    assert 0 < error < limit


def test_weights_in_fp8_keep_what_states_need(tmp_path: Path) -> None:
    steps = opened(save(build("qwen3.5"), tmp_path), dtype="fp8")
    with steps.backend:
        layer = steps.backend._worker._weights.layers[0]  # type: ignore[union-attr]
        assert layer.states_input.dtype == layer.states_output.dtype == torch.float8_e4m3fn
        assert layer.states_rates.dtype == torch.bfloat16
        assert layer.recurrence.taps.dtype == layer.recurrence.decay.dtype == torch.float32
        gated = next(each for each in steps.backend._worker._weights.layers if each.gate is not None)
        assert gated.gate.dtype == torch.float8_e4m3fn and len(gated.scales["gate"]) == len(gated.gate)
        assert np.isfinite(steps.run(TOKENS, 64)).all()


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[GroupedSteps]:
    steps = opened(save(build("lfm2"), tmp_path))
    with steps.backend:
        yield steps


def test_a_step_that_is_dropped_has_changed_nothing(steps: GroupedSteps) -> None:
    sequence = steps.begin(64)
    steps.step((sequence, TOKENS[:30]))
    dropped, used = steps.chunk(sequence, TOKENS[40:50]), sequence.state.next
    first = steps.backend.collect([dropped])
    assert used is not None and not (steps.data[used.cells] == NO_NUMBER).all(), "it was computed"
    steps.give_back(used.cells)
    again = steps.step((sequence, TOKENS[30:40]))
    steps.end(sequence)
    whole = steps.begin(64)
    steps.step((whole, TOKENS[:30]))
    assert np.array_equal(steps.step((whole, TOKENS[30:40])), again)
    assert not np.array_equal(first.logits, again)


def test_tables_that_cannot_be_are_refused(steps: GroupedSteps) -> None:
    sequence = steps.begin(64)
    steps.step((sequence, TOKENS[:10]))
    good = steps.chunk(sequence, TOKENS[10:12])
    table = sequence.state
    assert table.current is not None and table.next is not None

    def refused(match: str) -> None:
        with pytest.raises(BackendError, match=match):
            steps.backend.collect([good])

    target = table.next
    for cells in ([], [*target.cells, 7]):
        table.next = LocalBlock(cells)
        refused("does not say where, in 1 cells")
    table.next = LocalBlock([1 << 20])
    refused("is in cell 1048576, but there are 400")
    table.next = LocalBlock(table.current.cells)
    refused("would be written over one that the step needs")
    table.next, good.state = target, None
    refused("does not say where")
    good.state = table
    assert np.isfinite(steps.backend.collect([good]).logits).all()


def test_memory_without_a_layout_of_states_is_refused(steps: GroupedSteps) -> None:
    with pytest.raises(BackendError, match="there is no layout of them"):
        steps.backend.allocate(BlockGeometry(8, BLOCK))


def test_what_is_refused_where_layers_carry_a_state_points_at_no_other_backend(tmp_path: Path) -> None:
    with TorchBackend(HFModel.open(save(build("lfm2"), tmp_path)), device="cpu") as backend:
        assert backend.traits.no_window is not None
        assert "carry a state" in backend.traits.no_window and "--backend" not in backend.traits.no_window


def test_on_a_gpu_steps_are_not_ahead_of_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [HFModel.open(save(build(kind), tmp_path / kind)) for kind in ("lfm2", "qwen3")]
    monkeypatch.setattr(Setup, "on_gpu", True)
    monkeypatch.setattr(TorchBackend, "_load", lambda *_: None)
    traits = [TorchBackend(model, device="cpu").traits for model in models]
    assert [each.depth for each in traits] == [1, 2]
    assert not any(each.frees_windows for each in traits)


@pytest.mark.parametrize(("kind", "refused"), [("lfm2", True), ("qwen3", False)])
def test_kernels_have_no_int8_beside_states(
    kind: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = HFModel.open(save(build(kind), tmp_path)).spec
    cpu = torch.device("cpu")
    assert unsupported_heads(spec, cpu, "int8") is None, "plain torch has"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ("use f16" in (unsupported_heads(spec, cpu, "int8") or "")) == refused
    assert unsupported_heads(spec, cpu, "f16") is None


# -- under the engine --------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "resources.kv_type_k": "f32",
    "resources.kv_type_v": "f32",
    "resources.kv_cache_max_memory_mb": 16,
    "backend.torch.device": "cpu",
    "backend.torch.batch_invariant": True,
    "backend.threads": 1,
    "kv.disk.enabled": False,
    "scheduler.max_step_tokens": 64,
}
EXACT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
LONG = random_tokens(400, 99)
PROMPTS = [random_tokens(70 + 30 * seed, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(build("qwen3.5"), tmp_path_factory.mktemp("models") / "tiny-qwen3.5")


def bits(llm: LLM, prompts: list[list[int]], params: SamplingParams = EXACT) -> list[Any]:
    answers = llm.generate(prompts, params, progress=False)
    return [[(each.token_id, each.logprob, each.top) for each in answer.logprobs or ()] for answer in answers]


def test_cached_and_batched_equals_alone(directory: Path) -> None:
    with LLM(str(directory), settings=SETTINGS) as llm:
        expected = [bits(llm, [prompt])[0] for prompt in PROMPTS]
        assert bits(llm, PROMPTS) == expected, "among others, and cached"
        answers = llm.generate(PROMPTS, EXACT, progress=False)
        assert [answer.cached_tokens for answer in answers] == [(len(each) - 1) // BLOCK * BLOCK for each in PROMPTS]
        assert_nothing_left(llm._llm.executor.engine)


def test_what_comes_from_disk_equals_what_is_computed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "compute_seconds", lambda tier, blocks: 60.0)
    disk = {"kv.disk.enabled": True, "kv.disk.directory": str(tmp_path)}
    with LLM(str(directory), settings=SETTINGS | disk) as llm:
        first = bits(llm, [LONG])[0]
        turn = [*LONG, *(each[0] for each in first), *PROMPTS[0][:20]]
        second = bits(llm, [turn])[0]
    with LLM(str(directory), settings=SETTINGS | disk) as llm:
        answer = llm.generate([turn], EXACT)[0]
        assert answer.cached_tokens >= len(LONG) // BLOCK * BLOCK
        assert [(each.token_id, each.logprob, each.top) for each in answer.logprobs or ()] == second
    with LLM(str(directory), settings=SETTINGS) as llm:
        assert bits(llm, [turn])[0] == second


def test_preempted_and_forked_equals_alone(directory: Path) -> None:
    long = replace(EXACT, max_tokens=60, n=2)
    with LLM(str(directory), settings=SETTINGS) as llm:
        expected = [bits(llm, [prompt], long) for prompt in PROMPTS]
        assert all(first == second for first, second in expected)
    few = {"resources.kv_cache_max_memory_mb": 0.5, "resources.max_context_length": 200, "scheduler.watermark": 0.0}
    with LLM(str(directory), settings=SETTINGS | few) as llm:
        assert bits(llm, PROMPTS, long) == [answer for pair in expected for answer in pair]
        assert llm._llm.executor.engine.snapshot.preemptions > 0
        assert_nothing_left(llm._llm.executor.engine)
