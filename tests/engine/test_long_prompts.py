"""The line in the log when a long prompt begins."""

from __future__ import annotations

import logging

import pytest

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.llm import AsyncLLM

ONE = SamplingParams(max_tokens=1)


def fake(layout: str = "paged") -> AsyncLLM:
    return AsyncLLM(load_config(None, {"backend.type": "fake", "backend.fake.layout": layout}).config)


@pytest.mark.parametrize("layout", ["paged", "slots"])
async def test_a_long_prompt_is_announced_with_its_numbers(layout: str, caplog: pytest.LogCaptureFixture) -> None:
    async with fake(layout) as llm:
        with caplog.at_level(logging.INFO, "cllm.engine"):
            await llm.submit("x" * 3000, ONE, request_id="long").collect()
            await llm.submit("y" * 1000, ONE, request_id="short").collect()
    (record,) = [record for record in caplog.records if "begins" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert record.getMessage() == "long begins a long prompt: 3000 tokens, 0 cached, 3000 to compute"
    assert vars(record)["fields"]["uncomputed_tokens"] == 3000


async def test_once_the_speed_is_known_it_decides_what_is_long(caplog: pytest.LogCaptureFixture) -> None:
    async with fake() as llm:
        costs = llm.executor.parts.scheduler.budget.costs
        with caplog.at_level(logging.INFO, "cllm.engine"):
            costs.token_s = 1e-6
            await llm.submit("x" * 3000, ONE, request_id="fast").collect()
            costs.token_s = 0.1
            await llm.submit("x" * 2900 + "y" * 100, ONE, request_id="slow").collect()
    (record,) = [record for record in caplog.records if "begins" in record.getMessage()]
    said = record.getMessage()
    assert said.startswith("slow begins a long prompt: 3000 tokens, 2896 cached, 104 to compute; about ")
    assert said.endswith(" s if it is computed alone")
