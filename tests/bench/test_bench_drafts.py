"""`cllm bench drafts`: its texts, and a run of it without a model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cllm_bench.drafts.texts import CHAT, EDIT, KINDS, QUOTE, tasks
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS
from cllm_bench.workloads import WORKLOADS
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.drafts import NO_DRAFTS, Drafts

SETUP = Setup("fake", str.encode, 1, 1, backend="fake", settings={"backend.fake.latency_ms": 0.1})


def test_there_are_enough_texts_of_each_kind() -> None:
    (usual,) = WORKLOADS["drafts"]
    assert isinstance(usual, Drafts)
    for kind in KINDS:
        found = tasks(kind)
        assert len(found) >= usual.texts and len({task.text for task in found}) == len(found)
        assert all(task.is_chat == (kind == CHAT) and task.text.strip() for task in found)


def test_edits_and_quotations_have_begun() -> None:
    for task, (old, new) in zip(
        tasks(EDIT), (("total", "balance"), ("book", "entry"), ("needed", "cost")), strict=True
    ):
        before, after = task.text.split(f"# After {old} was renamed to {new}", 1)
        assert f" {old} " in before and after.strip().count("\n") >= 10
    for task in tasks(QUOTE):
        text, begun = task.text.split("\n\nThe same text once more, word for word:\n\n")
        assert text.startswith(begun) and len(begun) < len(text) / 5


def test_a_run_measures_both_sides_on_the_same_answers() -> None:
    work = replace(Drafts().quick(), answer_tokens=12, streams=2, stream_answer_tokens=4)
    ours, theirs = asyncio.run(work.one_repeat(SETUP, 0))
    assert (ours.side, theirs.side) == (OURS, NO_DRAFTS)
    keys = {figure.key for figure in work.figures}
    assert ours.metrics.keys() <= keys and theirs.metrics.keys() <= keys
    assert {key for key in keys if not key.endswith("_accepted")} <= ours.metrics.keys() & theirs.metrics.keys()
    assert not any(key.endswith("_accepted") for key in theirs.metrics)


def test_answers_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(range(100))

    async def answer(*_: object) -> list[int]:
        return [next(answers)]

    monkeypatch.setattr("cllm_bench.workloads.drafts._Side.answer", answer)
    with pytest.raises(BenchError, match="not the same"):
        asyncio.run(Drafts().quick().one_repeat(SETUP, 0))
