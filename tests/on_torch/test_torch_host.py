"""Blocks of the torch backend in the host's memory: what comes back is what was there, to the bit, and answers are
those of a cache that never had to evict. On the CPU, where ordinary memory stands for pinned memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cllm import LLM, SamplingParams
from cllm.backends.torch.backend import TorchBackend
from cllm.backends.torch.host_rows import runs
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams as Params
from cllm.engine.request import FinishReason
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.errors import BackendError, ConfigError
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.tiers.host_tier import HostTier
from engine_kit import make_request
from torch_kit import BLOCK, build, open_backend, random_tokens, save, save_whole

BLOCKS = 24
PROMPTS = [random_tokens(10 * BLOCK + 2 + seed, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def backend(model: Path) -> Iterator[TorchBackend]:
    with open_backend(model, blocks=BLOCKS) as opened:
        yield opened


@pytest.mark.parametrize("kv_type", ["f16", "f32", "fp8", "int8"])
def test_blocks_come_back_to_the_bit(model: Path, kv_type: str) -> None:
    with open_backend(model, blocks=8, kv_type=kv_type) as backend:
        arena = backend._worker.context.arena
        for part in arena.parts:
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
        before = arena.read(range(8))
        rows = backend.open_host_rows(6 * backend.ops.block_bytes)
        rows.want_more(1)
        assert rows.rows == rows.most_rows == 6
        assert rows.copy_out([2, 3, 4, 7], [1, 2, 4, 5]).done
        assert bytes(rows.row(4)) == bytes(before[4].numpy()), "the bytes that the disk has"
        for part in arena.parts:
            part.zero_()
        assert rows.copy_in([5, 4, 1, 2], [0, 1, 5, 6], []).done
        assert torch.equal(arena.read([0, 1, 5, 6]), before[[7, 4, 2, 3]])
        assert not arena.read([2, 3, 4, 7]).any()


def test_neighbours_are_copied_together() -> None:
    assert list(runs([3, 4, 5, 9, 10], [0, 1, 2, 3, 4], 100)) == [(3, 0, 3), (9, 3, 2)]
    assert list(runs([3, 4, 5, 6], [2, 3, 4, 5], 4)) == [(3, 2, 2), (5, 4, 2)], "rows of another piece begin anew"
    assert list(runs([3, 4], [1, 0], 100)) == [(3, 1, 1), (4, 0, 1)]
    assert list(runs([], [], 4)) == []


class Run:
    """Requests through scheduler and stepper, without a thread."""

    def __init__(self, backend: TorchBackend, *, blocks: int = BLOCKS, host_rows: int = 0) -> None:
        self.backend = backend
        backend.allocate(BlockGeometry(blocks, BLOCK))
        self.kv = PagedKVManager(backend.ops, BlockGeometry(blocks, BLOCK), bytes_per_token=8)
        if host_rows:
            self.rows = backend.open_host_rows(host_rows * backend.ops.block_bytes)
            self.kv.use_host(HostTier(self.rows, block_tokens=BLOCK, least_tokens=2 * BLOCK))
        budget = StepBudget(inter_token_s=10.0, max_gap_s=10.0, prompt_only_s=10.0, max_tokens=48)
        self.scheduler = Scheduler(self.kv, budget, max_running=2)
        self.stepper = Stepper(backend, self.scheduler, timer=lambda: 0.0)
        self.answers: dict[str, list[int]] = {}
        self.errors: list[Exception] = []
        self.asked = 0

    def add(self, prompt: list[int], **changes: Any) -> str:
        self.asked += 1
        params = Params(**({"max_tokens": 6, "ignore_eos": True, "temperature": 0.8, "seed": 1} | changes))
        name = f"r{self.asked}"
        self.scheduler.requests.add(make_request(prompt, params, request_id=name))
        return name

    def advance(self) -> None:
        self.stepper.advance()
        self.kv.check()
        for output in self.scheduler.requests.take_outputs():
            if output.token_id is not None:
                self.answers.setdefault(output[0], []).append(output.token_id)
            if output.error is not None:
                self.errors.append(output.error)

    def finish(self) -> None:
        while self.scheduler.requests.has_work or self.stepper.under_way:
            self.advance()

    def ask(self, prompt: list[int]) -> list[int]:
        name = self.add(prompt)
        self.finish()
        return self.answers[name]


def in_turns(run: Run) -> list[list[int]]:
    return [run.ask(prompt) for _ in range(2) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_those_of_a_cache_that_is_large_enough(backend: TorchBackend, depth: int) -> None:
    backend.traits = replace(backend.traits, depth=depth)
    expected = in_turns(Run(backend, blocks=128))
    small = Run(backend, host_rows=64)
    assert in_turns(small) == expected
    usage = small.kv.usage()
    assert usage.host.loads == 4 and usage.host.loaded_tokens >= 3 * 10 * BLOCK and usage.host.failed_loads == 0
    assert usage.evictions > 0 and usage.referenced == 0
    assert len({tuple(answer) for answer in expected}) == 4, "answers that are all alike would prove nothing"


@pytest.mark.parametrize("depth", [1, 2])
def test_with_others_running_and_leaving(backend: TorchBackend, depth: int) -> None:
    backend.traits = replace(backend.traits, depth=depth)
    expected = [Run(backend, blocks=128).ask(prompt) for prompt in PROMPTS]
    run = Run(backend, host_rows=64)
    wanted = {run.add(prompt): answer for _ in range(3) for prompt, answer in zip(PROMPTS, expected, strict=True)}
    for number, prompt in enumerate(PROMPTS * 2):
        gone = run.add([*prompt, number])
        run.advance()
        if request := run.scheduler.requests.by_id.get(gone):
            run.scheduler.requests.finish(request, None, FinishReason.CANCELLED)
    run.finish()
    assert {name: run.answers[name] for name in wanted} == wanted
    assert run.kv.usage().host.loads > 0 and run.kv.usage().referenced == 0 and run.kv.loading == 0


def test_a_backend_that_is_rebuilt_finds_what_was_copied(backend: TorchBackend) -> None:
    expected = in_turns(Run(backend, blocks=128))
    run = Run(backend, host_rows=64)
    assert in_turns(run) == expected
    held = len(run.kv.tiers.host or ())
    backend.rebuild()
    run.kv.reset()
    assert len(run.kv.tiers.host or ()) == held
    loads = run.kv.usage().host.loads
    assert in_turns(run) == expected
    assert run.kv.usage().host.loads > loads


@pytest.mark.parametrize("name", ["copy_out", "copy_in"])
def test_copies_that_fail_are_computed_again(backend: TorchBackend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_turns(Run(backend, blocks=128))
    run = Run(backend, host_rows=64)
    original, calls = getattr(run.rows, name), []

    def sometimes(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) % 2:
            raise BackendError("no memory for that")
        return original(*arguments)

    monkeypatch.setattr(run.rows, name, sometimes)
    assert in_turns(run) == expected and not run.errors and len(calls) > 1


def test_through_the_settings(tmp_path: Path) -> None:
    path = save_whole(build("llama"), tmp_path / "model")
    text = [random_tokens(150, seed) for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    common = {"backend.torch.device": "cpu", "backend.threads": 1, "kv.disk.enabled": False, "log.level": "warning"}

    def answers(**more: float) -> tuple[list[list[int]], dict[str, Any]]:
        settings = common | {key.replace("__", "."): value for key, value in more.items()}
        with LLM(str(path), settings=settings) as llm:
            found = [llm.generate(tokens, params)[0].token_ids for _ in range(2) for tokens in text]
            return found, llm.kv()

    large, kv = answers()
    assert kv["host"]["limit_bytes"] == 0, "off on a CPU, unless it is asked for"
    small, kv = answers(resources__kv_cache_max_memory_mb=0.2, kv__host__max_mb=4.0)
    assert large == small
    assert 0 < kv["host"]["bytes"] <= kv["host"]["limit_bytes"] <= 4 << 20
    assert kv["host"]["loads"] == 4 and kv["details"]["host"]["blocks"] > 0


def test_more_than_there_is_is_refused(tmp_path: Path) -> None:
    path = save_whole(build("llama"), tmp_path / "model")
    settings = {"backend.torch.device": "cpu", "kv.disk.enabled": False, "kv.host.max_mb": 1e9}
    with pytest.raises(ConfigError, match=r"kv\.host\.max_mb is 1e\+09, but only .* MiB of memory are free; lower it"):
        LLM(str(path), settings=settings)
