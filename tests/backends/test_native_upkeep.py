"""Moving blocks and giving memory back on the native engine: not a bit changes, and the OS agrees."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, SamplingParams
from cllm.generation import Completion
from thorough import slow

pytestmark = pytest.mark.model

MIB = 1 << 20
SETTINGS: dict[str, Any] = {"resources.max_context_length": 1024, "resources.kv_cache_max_memory_mb": 400}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
TWINS = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=20, ignore_eos=True, logprobs=3)
PROMPTS = [
    f"Write a few sentences about {subject}, and why people like it. " * 4 for subject in ("bread", "tea", "fog")
]


def answers(llm: LLM) -> list[Any]:
    """One after another and together, with prefixes that are found and answers that fork."""
    together = llm.generate([*PROMPTS, PROMPTS[0] + "Or not?"], GREEDY, progress=False)
    again = llm.generate(PROMPTS[0] + "Or not?", GREEDY)
    twins = llm.generate(PROMPTS[1], TWINS)
    return [bits(answer) for answer in (*together, *again, *twins)]


def bits(answer: Completion) -> list[Any]:
    assert answer.logprobs is not None
    return [(logprob.token_id, logprob.logprob, logprob.top) for logprob in answer.logprobs]


@slow
def test_blocks_that_move_all_the_time_change_not_a_bit() -> None:
    with LLM("smollm2", backend="native", settings={**SETTINGS, "kv.compaction": "off"}) as still:
        expected = answers(still)
        assert still.kv()["compactions"] == 0
    moving = {**SETTINGS, "kv.compaction": "always", "kv.compaction_share": 1.0}
    with LLM("smollm2", backend="native", settings=moving) as llm:
        assert answers(llm) == expected
        kv = llm.kv()
        assert kv["compactions"] > 4 and kv["moved_bytes"] > 20 * MIB and kv["upkeep_failures"] == 0


def arena_bytes() -> int:
    """How much is in memory of mappings as large as the arena, which it may share with neighbours; from the OS."""
    found, size = [0], 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            size = last - first
        elif line.startswith("Rss:") and size >= 300 * MIB:
            found.append(int(line.split()[1]) * 1024)
    return sum(found)


class Peak:
    """The most that `arena_bytes` is meanwhile."""

    def __enter__(self) -> Peak:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.bytes = max(self.bytes, arena_bytes())


@pytest.fixture
def elastic() -> Iterator[LLM]:
    settings = {**SETTINGS, "kv.release_after_s": 1.0, "kv.idle_mb": 16}
    with LLM("smollm2", backend="native", settings=settings) as llm:
        yield llm


@pytest.mark.alone
def test_memory_of_a_burst_goes_back_to_the_os(elastic: LLM) -> None:
    prompts = [[number + 300] * 200 for number in range(8)]
    burst = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    elastic.generate([prompts[0][:40]] * 8, burst, progress=False)  # what steps need beside the arena
    before = arena_bytes()
    with Peak() as peak:
        elastic.generate(prompts, burst, progress=False)
    assert peak.bytes > before + 16 * MIB
    deadline = time.monotonic() + 60
    while arena_bytes() > before + 16 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    assert arena_bytes() <= before + 16 * MIB
    kv = elastic.kv()
    assert kv["released_bytes"] > 8 * MIB and kv["evictable"] * kv["bytes_per_unit"] <= 16 * MIB
    assert elastic.generate([prompts[-1]], burst)[0].text
