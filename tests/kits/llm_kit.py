"""Prompts for the real model, and looks into an `LLM`: its engine, its cache, the bits of an answer."""

from __future__ import annotations

import threading
from typing import Any

from cllm import LLM
from cllm.engine.loop import Engine
from cllm.offline import Completion
from engine_kit import assert_nothing_left

SUBJECTS = ["the sea", "a small dog", "bread", "winter", "music", "a train", "the moon", "gardens"]
PROMPTS = [f"Write a few sentences about {subject}, and why people like it." for subject in SUBJECTS]
LONG = "It was a quiet morning in the village, and nothing had happened yet. " * 40


def engine_of(llm: LLM) -> Engine:
    engine = llm._llm.executor.engine
    assert engine is not None
    return engine


def empty_cache(llm: LLM) -> None:
    """On the engine's thread, which owns the cache."""
    engine, done = engine_of(llm), threading.Event()

    def reset() -> None:
        engine.scheduler.kv.reset()
        done.set()

    engine._inbox.append(reset)
    engine._wake.set()
    assert done.wait(10)


def bits(answer: Completion) -> list[Any]:
    assert answer.logprobs is not None
    return [(logprob.token_id, logprob.logprob, logprob.top) for logprob in answer.logprobs]


def assert_idle(llm: LLM) -> None:
    kv = llm.kv()
    assert kv["referenced"] == 0 and kv["running"] == 0 and kv["waiting"] == 0
    assert_nothing_left(engine_of(llm))
