"""Several models on torch under one budget: on a CPU, and on GPUs, which are imitated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.errors import ConfigError
from cllm.llm import AsyncLLM
from cllm.served import ServedModels
from native_kit import write_model
from torch_kit import build, save_whole

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (number * 7 + place * place) % 300 for place in range(20 + 9 * number)] for number in range(4)]
MIB = 1 << 20


def several(entries: list[Any], **settings: Any) -> ServedModels:
    flags = {"models": entries, **{key.replace("__", "."): value for key, value in settings.items()}}
    return ServedModels(load_config(None, flags, {}).config)


async def tokens(llm: AsyncLLM, prompt: list[int]) -> list[int]:
    return [token async for delta in llm.submit(prompt, GREEDY) for token in delta.token_ids]


# -- on a CPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [str(save_whole(build("llama", seed=seed), root / name)) for seed, name in enumerate(("one", "two"))]


async def test_those_that_shrink_and_those_that_do_not_answer_as_if_alone(
    directories: list[str], tmp_path: Path
) -> None:
    gguf = str(write_model(tmp_path / "three.gguf"))
    common = {"backend.torch.device": "cpu", "kv.disk.enabled": False, "resources.max_context_length": 256}
    expected: dict[str, list[list[int]]] = {}
    for name, path in zip(("one", "two", "three"), [*directories, gguf], strict=True):
        single = {**common, "model.name": path, "resources.kv_cache_max_memory_mb": 8.0}
        async with AsyncLLM(load_config(None, single, {}).config) as llm:
            expected[name] = [await tokens(llm, prompt) for prompt in PROMPTS]
    served = several([*directories, gguf], resources__max_memory_mb=16.0, **common)
    await served.start()
    try:
        assert [each.estimate.kind for each in served.models] == ["torch", "torch", "native"]
        assert [each.estimate.is_elastic for each in served.models] == [False, False, True]
        assert {each.estimate.device for each in served.models} == {"cpu"}

        async def ask(name: str, number: int) -> None:
            model = served.find(name)
            assert model is not None
            llm = await served.acquire(model)
            try:
                assert await tokens(llm, PROMPTS[number]) == expected[name][number]
            finally:
                model.release()
            served.memory_of(model).ledger.check()

        for _ in range(2):
            await asyncio.gather(*(ask(name, number) for number in range(len(PROMPTS)) for name in expected))
            await served.unload(served.models[1])
        for model in (served.models[0], served.models[2]):
            assert model.llm is not None and model.account is not None
            taken = model.estimate.weights + model.llm.executor.kv()["bytes"]["total"]
            assert 0.9 * model.account.taken <= taken <= model.account.taken, "what is counted is what it has"
    finally:
        await served.shutdown(0)


async def test_those_that_do_not_fit_together_take_each_others_place(directories: list[str]) -> None:
    entries = [{"name": path, "load": "first_use"} for path in directories]
    common = {"backend__torch__device": "cpu", "kv__disk__enabled": False, "resources__max_context_length": 512}
    probe = several(entries, **common).models[0].estimate
    served = several(entries, resources__max_memory_mb=1.5 * (probe.weights + probe.context_bytes) / MIB, **common)
    await served.start()
    try:
        for _ in range(2):
            for model in served.models:
                llm = await served.acquire(model)
                assert llm.text.max_context == 512
                assert len(await tokens(llm, PROMPTS[0])) == 8
                model.release()
                assert [each.name for each in served.memory_of(model).ledger.account_status()] == [model.name]
    finally:
        await served.shutdown(0)


# -- on GPUs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that are free on each."""
    free = {0: 100 * MIB, 1: 10 * MIB}
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda device: "A GPU",
        "mem_get_info": lambda device: (free[torch.device(device).index], 200 * MIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr("cllm.loading.backend_choice.has_gpu", lambda config: config.backend.torch.device != "cpu")
    monkeypatch.setattr("cllm.backends.torch.device.choose_operations", lambda device: None)
    return free


def on(device: str, path: str) -> dict[str, Any]:
    return {"name": path, "load": "first_use", "backend": {"torch": {"device": device}}}


def test_every_gpu_has_a_budget_of_its_own(gpus: dict[int, int], directories: list[str], tmp_path: Path) -> None:
    gguf = str(write_model(tmp_path / "three.gguf"))
    entries = [*(on("cuda:0", path) for path in directories), on("cpu", gguf)]
    served = several(entries, backend__type="auto")
    assert [each.estimate.device for each in served.models] == ["cuda:0", "cuda:0", "cpu"]
    gpu, host = served.memories["cuda:0"], served.memories["cpu"]
    assert gpu.ledger.budget == 90 * MIB, "nine tenths of what is free, for both of them"
    one, two, three = served.models
    fixed = [gpu.fixed(each) for each in (one, two)]
    assert fixed[0] == fixed[1] and 89 * MIB < sum(fixed) <= 90 * MIB
    assert one.estimate.context == 512, "the model's own, as on a GPU"
    assert served.memory_of(three) is host and host.ledger is not gpu.ledger


def test_a_limit_holds_for_each_memory(gpus: dict[int, int], directories: list[str]) -> None:
    served = several([on("cuda:0", path) for path in directories], resources__max_memory_mb=40)
    assert served.memories["cuda:0"].ledger.budget == 40 * MIB
    with pytest.raises(ConfigError, match=r"^resources.max_memory_mb is 101, more than .*cuda:0"):
        several([on("cuda:0", path) for path in directories], resources__max_memory_mb=101)


def test_what_does_not_fit_on_a_gpu_is_refused_with_the_estimate(gpus: dict[int, int], directories: list[str]) -> None:
    gpus[1] = MIB // 4
    with pytest.raises(ConfigError, match=r"^two needs .* for its weights .* may take together on cuda:1"):
        several([on("cuda:0", directories[0]), on("cuda:1", directories[1])])
