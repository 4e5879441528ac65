"""Is the simulation right? The real engine on three workloads beside their simulation, with a cost model fitted before.

The cost model is fitted from a fourth workload, the calibration, so that the three are predicted, not remembered.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cllm.backends.base import Backend
from cllm.config import Config
from cllm.kv.manager import KVManager
from cllm.loading.open_model import paged_max_running
from cllm.loading.parts import ModelParts
from cllm_bench.simulate.cluster import simulate
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.fit import fit_cost
from cllm_bench.simulate.live import Clock, LiveRun, Measured, Turn, Workload
from cllm_bench.simulate.settings import Settings

TOLERANCE = 0.15
_SAME_HIT_RATE = 0.02
"""Hit rates that differ by less than this are equal, however small they are."""


@dataclass(frozen=True)
class Comparison:
    measured: Measured
    tokens_per_s: float
    hit_rate: float
    ttft_p50_s: float

    @property
    def speed_error(self) -> float:
        return self.tokens_per_s / self.measured.tokens_per_s - 1

    @property
    def hit_error(self) -> float:
        real = self.measured.hit_rate
        if abs(self.hit_rate - real) < _SAME_HIT_RATE:
            return 0.0
        return self.hit_rate / real - 1 if real else 1.0

    @property
    def holds(self) -> bool:
        return abs(self.speed_error) <= TOLERANCE and abs(self.hit_error) <= TOLERANCE


class RandomTokens:
    """Random tokens that every vocabulary has."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._highest = min(vocabulary, 32_000) - 1

    def __call__(self, count: int) -> array[int]:
        return array("i", (self._draw.randint(3, self._highest) for _ in range(count)))

    def between(self, low: int, high: int) -> int:
        return self._draw.randint(low, high)


def calibrations(words: RandomTokens, size: float) -> list[Workload]:
    """One, few and many together, with short and long prompts: every price has steps that tell it from the others."""
    workloads = []
    for users in (1, 2, 4, _scaled(8, size), _scaled(16, size), _scaled(32, size)):
        lengths = (24, 160, 480) if users <= 4 else (24, 160)
        turns = [[Turn(words(length), 24, extends=False) for length in lengths] for _ in range(users)]
        workloads.append(Workload(f"calibration with {users}", turns))
    return workloads


def batch(words: RandomTokens, size: float) -> Workload:
    users = range(_scaled(24, size))
    return Workload("batch", [[Turn(words(words.between(64, 330)), words.between(32, 64))] for _ in users])


def prefix(words: RandomTokens, size: float) -> Workload:
    system = words(320)
    users = range(_scaled(24, size))
    return Workload("prefix", [[Turn(system + words(words.between(20, 60)), 32)] for _ in users])


def chat(words: RandomTokens, size: float) -> Workload:
    conversations = []
    for _ in range(_scaled(12, size)):
        first = Turn(words(words.between(80, 200)), words.between(24, 48))
        later = [Turn(words(words.between(20, 60)), words.between(24, 48)) for _ in range(3)]
        conversations.append([first, *later])
    return Workload("chat", conversations)


WORKLOADS = (batch, prefix, chat)


def _scaled(count: int, size: float) -> int:
    return max(4, round(count * size))


def settings_of(parts: ModelParts, config: Config) -> Settings:
    """The settings under which a simulation is like these parts."""
    scheduler = config.scheduler
    usage = parts.scheduler.kv.usage()
    slots = parts.scheduler.kv.details().get("slots", [])
    return Settings(
        policy="slots" if slots else "paged",
        blocks=usage.total,
        block_size=usage.unit_tokens,
        max_running=len(slots) or paged_max_running(config),
        step_tokens=scheduler.max_step_tokens or parts.backend.traits.preferred_step_tokens,
        eviction=scheduler.eviction_policy,
        threshold=scheduler.kv_cache_eviction_threshold,
        watermark=scheduler.watermark,
        token_ms=scheduler.inter_token_target_ms,
        gap_ms=parts.scheduler.budget.max_gap_s * 1000,
        chunk_ms=parts.scheduler.budget.chunk_gap_s * 1000,
        prefill_ms=scheduler.prefill_target_ms,
        ageing_s=scheduler.ageing_s,
        context=parts.scheduler.kv.details().get("slot_tokens", 0),
    )


class Validation:
    """Runs workloads on a backend, and simulates them."""

    def __init__(
        self, backend: Backend, kv: KVManager, settings: Settings, *, clock: Clock = time.perf_counter
    ) -> None:
        self._backend = backend
        self._kv = kv
        self._settings = settings
        self._clock = clock

    def measure(self, workload: Workload) -> Measured:
        return LiveRun(self._backend, self._kv, self._settings, self._clock).run(workload)

    def fit(self, name: str, description: str, measured: Sequence[Measured], bytes_per_token: int) -> CostModel:
        return fit_cost(
            name,
            description,
            [run.steps for run in measured],
            kv_bytes_per_token=bytes_per_token,
        )

    def compare(self, measured: Measured, cost: CostModel) -> Comparison:
        figures = simulate(measured.trace, self._settings, cost).figures
        return Comparison(measured, figures["answer_tokens_per_s"], figures["hit_rate"], figures["ttft_p50_s"])
