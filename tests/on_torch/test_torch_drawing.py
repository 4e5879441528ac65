"""Tokens that the device chooses are those that the host would choose: plain torch here, kernels in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.backends.base import Chunk, Draw, Drawn
from cllm.backends.torch.plain_sampling import PlainSampler
from cllm.backends.torch.sampling import choose, read_draws
from cllm.backends.torch.staging import upload
from cllm.engine.params import SamplingParams
from cllm.engine.sampling import TokenChooser
from draw_kit import agrees
from repository import KITS

HERE = Path(__file__).parent
SIZE = 40
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def run_apart(script: str, **environment: str) -> str:
    """In a process of its own: whether kernels are interpreted is decided when Triton is imported."""
    paths = os.pathsep.join(map(str, (HERE, HERE.parent, KITS)))
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(HERE / script)],
        env=known | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_choose_what_the_host_chooses() -> None:
    assert json.loads(run_apart("interpreted_draws.py", TRITON_INTERPRET="1")) == []


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert run_apart("compiled_draws.py", TRITON_CACHE_DIR=str(tmp_path)).strip() == "all"


values_of_rows = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.sampled_from([-np.inf, 0.0, -0.0, 3.0, 3.0])),
    min_size=SIZE,
    max_size=SIZE,
).map(lambda values: np.array(values, np.float32))
uniforms = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=values_of_rows,
    temperature=st.sampled_from([0.0, 1e-6, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, SIZE - 1, SIZE, SIZE + 1]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    uniform=uniforms,
    broken=st.sampled_from([None, None, None, np.nan, np.inf]),
)
def test_plain_torch_chooses_what_the_host_chooses(
    values: NDArray[np.float32], broken: float | None, **numbers: float
) -> None:
    if broken is not None:
        values[7] = broken
    params = [numbers[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniform")]
    last, owners = torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    (token,) = (
        PlainSampler().choose(torch.from_numpy(values[None]), torch.tensor([params]).double(), owners, last).tolist()
    )
    assert agrees(token, values, *params)
    assert last.tolist() == [0, max(token, 0)]


def chooser(params: SamplingParams, prompt: list[int]) -> TokenChooser:
    return TokenChooser(
        params, prompt, end_ids=frozenset({1}), forbidden=frozenset({2}) if params.ignore_eos else frozenset(),
        seed=9, vocab_size=SIZE,
    )  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_answer_on_the_device_is_the_hosts(data: st.DataObject) -> None:
    """Token after token, each one chosen before the host has heard of the one before."""
    changes: dict[str, Any] = {
        "temperature": data.draw(st.sampled_from([0.0, 0.8])),
        "top_k": data.draw(st.sampled_from([0, 5])),
        "top_p": data.draw(st.sampled_from([1.0, 0.9])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.5, 0.5])),
        "frequency_penalty": data.draw(st.sampled_from([0.0, 0.7])),
        "presence_penalty": data.draw(st.sampled_from([0.0, -0.4])),
        "logprobs": data.draw(st.sampled_from([None, 0, 3])),
        "logit_bias": data.draw(st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100), max_size=3)),
        "min_tokens": data.draw(st.integers(0, 3)),
        "ignore_eos": data.draw(st.booleans()),
    }
    prompt = data.draw(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=6))
    host, device = (chooser(SamplingParams(**changes), prompt) for _ in range(2))
    last, unknown = torch.zeros(4, dtype=torch.int32), None
    for step in range(5):
        logits = np.random.default_rng(data.draw(st.integers(0, 2**32))).normal(size=SIZE).astype(np.float32) * 4
        assert device.can_draw_ahead(unknown is not None)
        draw = device.draw_ahead(0 if unknown is None else 1)
        made = Chunk(array("i", [0]), 0, True, row=3, follows=unknown is not None, draws=(draw,))
        draws, row = read_draws([made], SIZE), torch.from_numpy(logits.copy()[None])
        ((drawn,),) = choose(row, draws, upload(draws.parts(), row.device), PlainSampler(), last).read()
        if unknown is not None:
            device.take(unknown)
        expected = host.choose(logits, None)
        assert (expected is None) == (drawn.token_id < 0)
        if expected is None:
            return
        assert expected.token_id == drawn.token_id == int(last[3]), step
        same_logprobs(drawn, expected.logprob)
        unknown = drawn


def same_logprobs(drawn: Drawn, expected: Any) -> None:
    if expected is None:
        assert drawn.top == ()
        return
    assert drawn.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert [token for token, _ in drawn.top] == [token for token, _ in expected.top]
    assert [each for _, each in drawn.top] == pytest.approx([each for _, each in expected.top], abs=1e-5)


def test_more_unknown_tokens_than_one_wait_for_penalties() -> None:
    assert chooser(SamplingParams(temperature=0), [3]).can_draw_ahead(2)
    penalised = chooser(SamplingParams(temperature=0, presence_penalty=0.5), [3])
    assert penalised.can_draw_ahead(1) and not penalised.can_draw_ahead(2)


def test_a_greedy_draw_is_made_once() -> None:
    plain = chooser(SamplingParams(temperature=0, min_tokens=2), [3])
    early, late = plain.draw_ahead(1), plain.draw_ahead(2)
    assert early.bias is not None and early.bias.ids.tolist() == [1] and late.bias is None
    assert plain.draw_ahead(0) is early and plain.draw_ahead(7) is late


def test_everybody_is_told_as_many_likely_tokens_as_they_asked_for() -> None:
    logits = torch.randn((4, SIZE), generator=torch.Generator().manual_seed(3))
    asked = (2, 5, 0, None)
    chunks = [
        Chunk(array("i", [0]), 0, True, row=row, draws=(Draw(0.0, 0, 1.0, 0.0, 0.5, count, None, None, None),))
        for row, count in enumerate(asked)
    ]
    draws = read_draws(chunks, SIZE)
    last = torch.zeros(8, dtype=torch.int32)
    drawn = choose(logits, draws, upload(draws.parts(), torch.device("cpu")), PlainSampler(), last).read()
    assert [len(each.top) for (each,) in drawn] == [2, 5, 0, 0]
    assert [each.top[0][0] for (each,) in drawn[:2]] == logits[:2].argmax(1).tolist()
