"""A drafter that knows the answers, and says what it is told to: the truth, half of it, or something else."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

from cllm.backends.fake import END_TOKEN
from cllm.engine.request import Request
from cllm.engine.request import Sequence as Answer

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

    def took(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        self.steps.append((rows, drafted, prompt_tokens))

    def ended(self, sequence: Answer) -> None:
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
