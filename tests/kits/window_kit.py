"""Rolling windows computed the slow way: no manager, one token after another, memory as a plain list."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.backends.fake import END_TOKEN, FakeBackend
from cllm.engine.request import Request
from cllm.engine.sampling import TokenChooser, choose
from cllm.kv.ops import BlockGeometry, SlotGeometry, SlotOps
from cllm.kv.window import Window
from step_of import rows_of

Logits = NDArray[np.float32]


class LoneMemory:
    """The memory of one sequence on a fake backend, in blocks of one token or a slot."""

    def __init__(self, layout: str) -> None:
        self.backend = FakeBackend()
        self.backend.allocate(BlockGeometry(1 << 11, 1) if layout == "paged" else SlotGeometry(1, 1 << 12))
        self._paged = layout == "paged"
        self._table: list[int] = []
        self._used = 0
        self._history: list[tuple[str, tuple[int, ...]]] = []
        self.tokens: list[int] = []
        self.dropped = self.kept = 0

    def drop(self, start: int, count: int) -> None:
        self._history.append(("drop", (start, count)))
        del self.tokens[start : start + count]
        if self._paged:
            del self._table[start : start + count]
        else:
            assert isinstance(self.backend.ops, SlotOps)
            self.backend.ops.remove(0, start, start + count)
            self.backend.ops.shift(0, start + count, None, -count)
        self.dropped += count
        self.kept = start

    def truncate(self, length: int) -> None:
        """`length` counts what was dropped."""
        self._history.append(("truncate", (length,)))
        held = length - self.dropped
        del self.tokens[held:], self._table[held:]
        if not self._paged:
            assert isinstance(self.backend.ops, SlotOps)
            self.backend.ops.remove(0, held)

    def copy(self) -> LoneMemory:
        """Another one with the same history."""
        twin = LoneMemory("paged" if self._paged else "slots")
        for name, arguments in self._history:
            getattr(twin, name)(*arguments)
        return twin

    def compute(self, token: int) -> Logits:
        self._history.append(("compute", (token,)))
        self._table.append(self._used)
        self._used += 1
        chunk = Chunk(array("i", [token]), len(self.tokens), True, 0, self._table, self.dropped, self.kept)
        self.tokens.append(token)
        return rows_of(self.backend, [chunk])


_KNOWN: dict[object, list[int]] = {}


def windowed_reference(request: Request, layout: str, answer: int = 0) -> list[int]:
    """What a request with a window gives when it is alone, uncached, one token after another. Computed once."""
    sequence = request.sequences[answer]
    key = (bytes(request.prompt), repr(request.params), layout, answer, sequence.window, sequence.max_length)
    if key not in _KNOWN:
        _KNOWN[key] = _compute_alone(request, layout, answer)
    return _KNOWN[key]


def _compute_alone(request: Request, layout: str, answer: int) -> list[int]:
    params = request.params
    window = request.sequences[answer].window
    chooser = TokenChooser(
        params,
        request.prompt,
        end_ids=request.end_ids,
        forbidden=frozenset({END_TOKEN}) if params.ignore_eos else frozenset(),
        seed=(params.seed or 0) + answer,
        vocab_size=320,
    )
    memory, tokens = LoneMemory(layout), list(request.prompt)
    limit = request.sequences[answer].max_length
    if limit == len(tokens):
        return []
    position = 0
    while True:
        roll(memory, window, position)
        logits = memory.compute(tokens[position])
        position += 1
        if position < len(tokens):
            continue
        choice = choose(logits, [(0, chooser)])[0]
        assert choice is not None
        tokens.append(choice.token_id)
        if choice.token_id in request.end_ids or len(tokens) >= limit:
            return tokens[len(request.prompt) :]


def roll(memory: LoneMemory, window: Window | None, position: int) -> None:
    if window is not None and (due := window.dropped_at(position) - memory.dropped):
        memory.drop(window.keep, due)
