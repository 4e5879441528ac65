"""How long a sequence may be: the model's own context, as far as the memory for K/V holds it, and what says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cllm.config import Config, load_config
from cllm.engine.params import SamplingParams
from cllm.errors import ConfigError, InvalidRequestError
from cllm.kv.sizing import MIB, most_bytes, plan_slots, slot_tokens_within
from cllm.llm import AsyncLLM
from cllm.loading.context import context_within
from cllm.served import ServedModels
from native_kit import write_model

LONG = 131_072
TOKEN_BYTES = 2 * 2 * (16 + 16) * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long") / "long.gguf", context_length=LONG)


@pytest.fixture
def configured(model: Path) -> Callable[..., Config]:
    def make(**settings: Any) -> Config:
        own = {"model.name": str(model), "backend.type": "native", "backend.threads": 1, "kv.disk.enabled": False}
        return load_config(None, own | {key.replace("__", "."): value for key, value in settings.items()}, {}).config

    return make


async def refusal(config: Config) -> tuple[int, int, str]:
    """The context, the K/V memory, and what a prompt that is too long is told."""
    async with AsyncLLM(config) as llm:
        context = llm.text.max_context
        with pytest.raises(InvalidRequestError) as caught:
            llm.submit([1] * context, SamplingParams(max_tokens=1))
        assert caught.value.code == "context_length_exceeded"
        return context, llm.executor.kv()["bytes"]["total"], str(caught.value)


@pytest.mark.parametrize(
    ("settings", "context", "reason", "advice"),
    [
        ({"kv_cache_max_memory_mb": 64}, LONG, "(the model's own context)", "max_context_length cannot be raised"),
        ({"max_context_length": 100}, 100, "own context is 131,072", "max_context_length may be raised to 131072"),
        (
            {"kv_cache_max_memory_mb": 1},
            MIB // TOKEN_BYTES,
            "no more; the model's own context is 131,072; for more, raise resources.kv_cache_max_memory_mb",
            "room for no more: raise resources.kv_cache_max_memory_mb (resources.max_context_length allows 131072)",
        ),
    ],
)
async def test_the_start_and_the_error_say_what_limits_the_context(
    configured: Callable[..., Config],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    context: int,
    reason: str,
    advice: str,
) -> None:
    caplog.set_level("INFO")
    found, _, error = await refusal(configured(**{f"resources__{key}": value for key, value in settings.items()}))
    assert found == context
    assert f"maximum context length is {context} tokens" in error and f"the prompt has {context} tokens" in error
    assert advice in error
    (line,) = [record.message for record in caplog.records if record.message.startswith("context: ")]
    assert line.startswith(f"context: {context:,} tokens (") and reason in line
    assert f"tokens of {TOKEN_BYTES} bytes" in line


async def test_a_long_context_takes_no_more_memory_than_a_short_one(configured: Callable[..., Config]) -> None:
    memory = {"resources__kv_cache_max_memory_mb": 64}
    long, short = configured(**memory), configured(**memory, resources__max_context_length=256)
    assert (await refusal(long))[1] == (await refusal(short))[1]
    for config in (long, short):
        async with AsyncLLM(config) as llm:
            upkeep = llm.executor.parts.scheduler.kv.upkeep.settings  # type: ignore[attr-defined]
            assert (upkeep.idle_bytes, upkeep.ahead_bytes) == (16 * MIB, 4 * MIB), "a quarter, whatever the context"


async def test_a_context_beyond_the_models_is_refused_before_its_weights_are_loaded(
    configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("cllm.loading.open_model._open_native", load)
    with pytest.raises(ConfigError, match=f"is {LONG + 1}, but the model was trained for {LONG} tokens"):
        async with AsyncLLM(configured(resources__max_context_length=LONG + 1)):
            pass


async def test_several_models_reserve_no_long_context_that_nobody_asked_for(model: Path) -> None:
    entries = [{"name": str(model), "aliases": [name]} for name in "ab"]
    flags = {"models": entries, "resources.max_memory_mb": 11.0, "backend.threads": 1, "kv.disk.enabled": False}
    served = ServedModels(load_config(None, flags, {}).config)
    weights = served.models[0].estimate.weights
    equal = 11 * MIB // 2 - weights
    for each in served.models:
        assert each.estimate.context == equal // 2 // TOKEN_BYTES // 256 * 256 > 8192
    try:
        await served.start()
        llm = await served.acquire(served.models[0])
        assert llm.text.max_context == served.models[0].estimate.context
        with pytest.raises(InvalidRequestError, match=r"raise resources\.max_memory_mb"):
            llm.submit([1] * llm.text.max_context, SamplingParams(max_tokens=1))
        async with llm.submit([1] * (llm.text.max_context - 2), SamplingParams(max_tokens=2)) as answer:
            async for _ in answer:
                pass
    finally:
        await served.shutdown(0)


@pytest.mark.parametrize("running", [1, 4, 8])
@pytest.mark.parametrize("budget", [2000 * MIB, 5560 * MIB])
def test_slots_are_as_long_as_their_memory_allows(running: int, budget: int) -> None:
    token_bytes = 28_672
    context = context_within(LONG, slot_tokens_within(budget, token_bytes, running))
    plan = plan_slots(
        budget_bytes=budget,
        bytes_per_token=token_bytes,
        context=context,
        running=running,
        running_is_asked=False,
        on_demand=True,
    )
    assert (plan.geometry.first, plan.geometry.slot_tokens) == (1, context)
    assert plan.running == running or context == 8192
    longer = context + 512
    assert longer > LONG or (running * longer * token_bytes + most_bytes(longer, token_bytes)) > budget


def test_a_share_of_the_memory_holds_enough_tokens_if_the_model_has_them() -> None:
    assert (context_within(LONG, 100), context_within(4096, 100), context_within(LONG, 20_000)) == (8192, 4096, 19_968)
