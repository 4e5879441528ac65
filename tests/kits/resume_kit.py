"""Answers that are cut off somewhere, and servers on which they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from cllm import AsyncLLM, SamplingParams
from cllm.backends.fake import FakeBackend
from cllm.engine.observer import RequestRecord
from cllm.engine.plan import Drafter, Drafting
from cllm.engine.request import Output, Request
from cllm.engine.stepper import Stepper
from cllm.engine.submission import Submission
from draft_kit import ScriptedDrafter, by_answer
from engine_kit import make_scheduler, reference
from pipelined_backend import PipelinedFake

LIMIT_S = 60.0
LAYOUTS = ("paged", "slots", "ahead")

Told = list[tuple[Any, ...]]
"""What a client learns of one answer, output by output: token, log probability, reason of the end, stop token."""


class Server:
    """A scheduler and its fake backend. The layout "ahead" is blocks, on a backend that computes ahead."""

    def __init__(self, layout: str, drafter: Drafter | None = None, **options: Any) -> None:
        self.backend = PipelinedFake() if layout == "ahead" else FakeBackend()
        drafting = None if drafter is None else Drafting(drafter, self.backend.traits.most_drafts)
        memory = "slots" if layout == "slots" else "paged"
        self.scheduler = make_scheduler(self.backend, memory, drafting=drafting, **options)
        self.scheduler.requests.observers.append(self)
        self.records: dict[str, RequestRecord] = {}
        self._stepper = Stepper(self.backend, self.scheduler, timer=self._seconds)
        self._now = 0.0

    def run(self, *requests: Request) -> dict[tuple[str, int], Told]:
        """Answer them all, side by side."""
        scheduler = self.scheduler
        for request in requests:
            scheduler.requests.add(request)
        while scheduler.requests.has_work or self._stepper.under_way:
            self.step()
        usage = scheduler.kv.usage()
        assert usage.referenced == usage.pinned and not scheduler.requests.by_id
        return by_answer(scheduler.requests.take_outputs())

    def step(self) -> None:
        assert self._stepper.advance()
        self.scheduler.kv.check()

    def computed(self, *requests: Request) -> int:
        """How many tokens are computed to answer these."""
        before = self.backend.computed_tokens
        self.run(*requests)
        return self.backend.computed_tokens - before

    def _seconds(self) -> float:
        self._now += 1e-4
        return self._now

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None: ...

    def on_finished(self, record: RequestRecord) -> None:
        self.records[record.request_id] = record

    def on_eviction(self, count: int, seconds: float) -> None: ...


def cut_off(answers: Sequence[Told], cuts: Sequence[int]) -> list[list[int] | None]:
    """The tokens of each answer up to its cut; None if that is its end."""
    return [
        None if cut == len(answer) else [token for token, *_ in answer[:cut]]
        for answer, cut in zip(answers, cuts, strict=True)
    ]


def told(outputs: dict[tuple[str, int], Told], request: Request) -> list[Told]:
    return [outputs.get((request.id, index), []) for index in range(request.params.n)]


def knowing(answers: Callable[[Request, int], Sequence[int]] = reference, **options: Any) -> ScriptedDrafter:
    """Drafts that are right, wrong and half right."""
    return ScriptedDrafter(answers, ("right", "half", "wrong"), longest=6, **options)


def said(output: Output) -> tuple[Any, ...]:
    """What of it a client learns."""
    return output.token_id, output.logprob, output.reason, output.stop_token


class Outputs:
    """A sink of `AsyncLLM` that keeps everything."""

    def __init__(self, request: Request, on_output: Callable[[Output], None] = lambda output: None) -> None:
        self.request = request
        self.outputs: list[Output] = []
        self.error: Exception | None = None
        self._open = {sequence.index for sequence in request.sequences if not sequence.ended}
        self._changed = asyncio.Event()
        self._on_output = on_output

    @property
    def done(self) -> bool:
        return not self._open or self.error is not None

    def take(self, output: Output, now: float) -> None:
        assert not self.done
        self._on_output(output)
        self.outputs.append(output)
        if output.reason is not None:
            self._open.remove(output.answer)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        assert not self.done
        self.error = error
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), LIMIT_S)

    async def all(self) -> list[Output]:
        await self.until(lambda: self.done)
        return self.outputs

    def tokens(self, index: int = 0) -> list[int]:
        return [each.token_id for each in self.outputs if each.answer == index and each.token_id is not None]

    def told(self) -> list[list[tuple[Any, ...]]]:
        """Of each answer; not what was read off the prompt."""
        outputs = [each for each in self.outputs if each.read is None]
        return [[said(each) for each in outputs if each.answer == index] for index in range(self.request.params.n)]


def queued(
    llm: AsyncLLM,
    prompt: str | Sequence[int],
    params: SamplingParams,
    sink: Callable[[Request], Outputs] = Outputs,
    **asked: Any,
) -> Outputs:
    """A request whose outputs stay as they are."""
    return llm.queue_for(Submission(llm.text.encode(prompt, params), params, **asked), sink)
