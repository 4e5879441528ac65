"""`cllm bench embed`: a run of it without a model."""

from __future__ import annotations

import asyncio

from cllm_bench.figures import OURS
from cllm_bench.workloads import WORKLOADS
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.embed import Embed

SETUP = Setup("fake", str.encode, 1, 1, backend="fake")


def test_a_run_has_all_figures() -> None:
    (usual,) = WORKLOADS["embed"]
    assert isinstance(usual, Embed) and (usual.texts, usual.text_tokens, usual.prompt_tokens) == (512, 128, 2000)
    (run,) = asyncio.run(Embed().quick().one_repeat(SETUP, 0))
    assert run.side == OURS and run.metrics.keys() == {figure.key for figure in usual.figures}
    assert all(value > 0 for value in run.metrics.values())
