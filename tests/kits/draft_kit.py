"""A drafter that knows the answers, and says what it is told to: the truth, half of it, or something else."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from cllm.backends.fake import END_TOKEN, FakeBackend
from cllm.engine.params import SamplingParams
from cllm.engine.plan import Drafting
from cllm.engine.request import Output, Request, Terms, build_request
from cllm.engine.request import Sequence as Answer
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.engine.submission import Submission
from cllm.engine.tenant import Tenant
from engine_kit import make_scheduler, reference

KINDS = ("right", "half", "wrong", "ends", "none")
"""The truth; the truth up to a place, then something else; nothing but that; the end in its middle; no idea."""


class ScriptedDrafter:
    """`expected` tells what an answer consists of. The same calls in the same order give the same drafts."""

    def __init__(
        self,
        expected: Callable[[Request, int], Sequence[int]],
        kinds: Sequence[str] = KINDS,
        *,
        seed: int = 0,
        longest: int = 64,
        always_longest: bool = False,
        allowances: Sequence[int] = (0, 3, 64, 64),
        vocabulary: int = 256,
    ) -> None:
        self.steps: list[tuple[int, int, int]] = []
        """Of each: answers, drafted tokens, tokens of prompts."""
        self._expected = expected
        self._known: dict[tuple[str, int], Sequence[int]] = {}
        self._kinds, self._longest, self._allowances = kinds, longest, allowances
        self._always_longest = always_longest
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._ended: set[tuple[str, int]] = set()

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        assert rows > 0
        return self._random.choice(self._allowances)

    def propose(self, sequence: Answer, most: int) -> array[int]:
        """One too many at times: whoever asked for fewer takes fewer."""
        assert sequence.running and most > 0
        truth = self._answer(sequence)[len(sequence.tokens) - sequence.n_prompt :]
        kind, longest = self._random.choice(self._kinds), min(most + 1, self._longest)
        length = longest if self._always_longest else self._random.randint(1, longest)
        draft = [*truth, *self._others(length)][:length]
        if kind == "none":
            return array("i")
        if kind != "right":
            at = 0 if kind == "wrong" else self._random.randrange(length)
            draft[at:] = [END_TOKEN] * (kind == "ends") + self._others(length)
        return array("i", draft[:length])

    def observe_step(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        self.steps.append((rows, drafted, prompt_tokens))

    def end(self, sequence: Answer) -> None:
        key = (sequence.request.id, sequence.index)
        assert key not in self._ended
        self._ended.add(key)

    def _answer(self, sequence: Answer) -> Sequence[int]:
        key = (sequence.request.id, sequence.index)
        if key not in self._known:
            self._known[key] = self._expected(sequence.request, sequence.index)
        return self._known[key]

    def _others(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]


class Lone:
    """A scheduler with its backend, whose steps a test takes."""

    def __init__(self, layout: str, drafter: Any = None, *, most: int | None = None, **options: Any) -> None:
        self.backend = FakeBackend()
        drafting = (
            None if drafter is None else Drafting(drafter, self.backend.traits.most_drafts if most is None else most)
        )
        self.now = 0.0
        self.scheduler: Scheduler = make_scheduler(
            self.backend, layout, drafting=drafting, clock=lambda: self.now, **options
        )
        self.stepper = Stepper(self.backend, self.scheduler, timer=lambda: self.now)
        self.outputs: list[Output] = []

    def run(self, *requests: Request) -> list[Output]:
        for request in requests:
            self.scheduler.requests.add(request)
        while self.scheduler.requests.has_work:
            self.step()
        assert self.scheduler.drafting is None or self.scheduler.drafting.alive
        return self.outputs

    def step(self) -> list[Output]:
        self.now += 1.0
        assert self.stepper.advance()
        self.scheduler.kv.check()
        for sequence in self.scheduler.requests.running:
            assert sequence.num_computed <= len(sequence.tokens)
        taken = self.scheduler.requests.take_outputs()
        self.outputs += taken
        return taken


def by_answer(outputs: list[Output]) -> dict[tuple[str, int], list[Any]]:
    """All that a client could tell: tokens, log probabilities, ends, in order."""
    answers: dict[tuple[str, int], list[Any]] = {}
    for output in outputs:
        told = (output.token_id, output.logprob, output.reason, output.stop_token)
        answers.setdefault((output.request_id, output.answer), []).append(told)
    return answers


LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def oracle(kinds: Sequence[str] = ("right",), *, longest: int = 8, **options: Any) -> ScriptedDrafter:
    """One that always says as much as it may, unless told otherwise."""
    options = {"allowances": (64,), "always_longest": True, **options}
    return ScriptedDrafter(reference, kinds, longest=longest, **options)


A, B = Tenant("a", b"a"), Tenant("b", b"b")


def new_sequence(prompt: list[int], tenant: Tenant = A) -> Answer:
    submission = Submission(prompt, SamplingParams(max_tokens=10_000), "request", tenant=tenant)
    return build_request(submission, Terms(1 << 20, 1 << 17), arrival=0.0, seed=0).sequences[0]


def draft_with(scheduler: Scheduler, drafting: Drafting | None) -> None:
    """From now on; None: not at all."""
    scheduler.planner.drafting = scheduler.requests.drafting = drafting
