"""Replicas with different memory: the smallest context counts, unless somebody set one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cllm.cluster.remote import RemoteExecutor
from cllm.config import Config
from cllm.engine.params import SamplingParams
from cllm.engine.submission import Submission
from cllm.errors import InvalidRequestError
from cllm.llm import AsyncLLM
from cllm.loading.text_model import PRELOADED, TextModel
from cllm.work.pool import blocking_workers

FAKE: dict[str, Any] = {"backend": {"type": "fake"}}


async def ingress(**sections: Any) -> RemoteExecutor:
    """One whose first replica has a context of 65,536."""
    config = Config.model_validate({**FAKE, **sections})
    async with AsyncLLM(Config.model_validate(FAKE)) as llm:
        facts = replace(llm.text.facts, max_context=65_536)
    remote = RemoteExecutor(config, None)
    with blocking_workers(config.work, PRELOADED) as workers:
        remote.text = TextModel.load(config, facts, workers)
    return remote


async def test_a_replica_with_less_memory_lowers_the_context() -> None:
    remote = await ingress()
    assert remote._accept_context(20_000)
    assert remote.text is not None and remote.text.max_context == 20_000
    with pytest.raises(InvalidRequestError, match="maximum context length is 20000"):
        remote.text.request_of(Submission([1] * 20_000, SamplingParams(max_tokens=1)), None)
    window = SamplingParams(context_window=None)
    assert remote.text.prompt_limit(window).most == 19_999


@pytest.mark.parametrize(
    ("tokens", "sections"),
    [
        (8191, {}),
        (20_000, {"resources": {"max_context_length": 4096}}),
        (20_000, {"kv": {"window": {"keep": 0, "recent": 40_000}}}),
    ],
)
async def test_one_that_is_too_small_gets_no_requests_instead(tokens: int, sections: dict[str, Any]) -> None:
    remote = await ingress(**sections)
    assert not remote._accept_context(tokens)
    assert remote.text is not None and remote.text.max_context == 65_536
