"""One budget over several models: never passed, whatever happens; and who gives way to whom."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError
from cllm.kv.ledger import NEVER, Account, MemoryLedger, NoRoomError
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import KVSequence
from kv_kit import BYTES_PER_TOKEN, Prompt, compute, computed_alone, run_to_end
from thorough import sampled
from upkeep_kit import UpkeepMachine, elastic

EXTENT = 4 * 4 * BYTES_PER_TOKEN
"""Four blocks of four tokens."""


class LimitedMachine(UpkeepMachine):
    """The manager's machine beside a neighbour that takes memory and gives it back; the two never have more than the
    budget, and the manager's memory never lies outside what it was granted."""

    blocks = 24

    def build(self) -> tuple[FakeBackend, KVManager]:
        self.ledger = MemoryLedger(6 * EXTENT)
        self.account = self.ledger.open("ours", fixed=0, least=3 * EXTENT)
        self.neighbour = self.ledger.open("neighbour", fixed=0, least=2 * EXTENT)
        self.backend, self.paged, self.clock = elastic(self.blocks, account=self.account, **self.options)
        return self.backend, self.paged

    @rule(prompt=Prompt)
    def admit(self, prompt: list[int]) -> None:
        sequence = KVSequence(prompt)
        expected = self.kv.peek(sequence.tokens.tobytes())
        cached = self.kv.admit(sequence)
        if cached is None:
            assert not sequence.admitted
            assert self.live or self.kv.awaits_memory, "nothing runs, nothing comes, and it waits for ever"
            return
        assert cached == expected
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(token)
        count = data.draw(st.integers(1, len(sequence.tokens) - sequence.num_computed))
        count = sequence.until_stop(count, 4)
        if self.kv.grow(sequence, count):
            logits = compute(self.backend, self.kv, sequence, count)
            assert np.array_equal(logits, computed_alone(sequence.tokens[: sequence.num_computed]))

    @rule(extents=st.integers(1, 6), oldest=st.sampled_from([0.0, 1e12, NEVER]))
    def neighbour_asks(self, extents: int, oldest: float) -> None:
        self.neighbour.vacant, self.neighbour.unused, self.neighbour.oldest = 0, 0, NEVER
        self.neighbour.ask(extents * EXTENT, oldest)

    @rule(share=st.floats(0, 1))
    def neighbour_gives(self, share: float) -> None:
        self.neighbour.give_back(int(self.neighbour.kv * share))

    @rule(oldest=st.sampled_from([0.0, NEVER]), vacant=st.booleans())
    def neighbour_rests(self, oldest: float, vacant: bool) -> None:
        self.neighbour.unused, self.neighbour.oldest = self.neighbour.kv, oldest
        self.neighbour.vacant = self.neighbour.kv if vacant else 0
        self.neighbour.needs_no_more()

    @rule()
    def neighbour_does_as_it_is_told(self) -> None:
        self.neighbour.give_back(self.neighbour.target)

    @invariant()
    def the_budget_holds(self) -> None:
        self.ledger.check()
        arena = self.paged.arena
        assert arena.pool.total * arena.block_bytes <= self.account.kv
        assert min(arena.taken_bytes, self.blocks * arena.block_bytes) <= self.account.kv
        memory: Any = self.backend.memory
        resident = np.flatnonzero(memory._resident)
        assert resident.size == 0 or resident.max() < arena.pool.total


class TwoModels(RuleBasedStateMachine):
    """Two managers under one ledger, each of which does in its own time what it is told. Whenever nothing runs, either
    can have a whole context."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger(7 * EXTENT)
        accounts = [self.ledger.open(name, fixed=0, least=3 * EXTENT) for name in "ab"]
        self.models = [manager(account, eviction_threshold=0.9, watermark=0.05) for account in accounts]
        self.live: list[tuple[int, KVSequence]] = []

    @rule(which=st.integers(0, 1), prompt=Prompt)
    def admit(self, which: int, prompt: list[int]) -> None:
        sequence = KVSequence(prompt)
        kv = self.models[which][1]
        if kv.admit(sequence) is not None:
            self.live.append((which, sequence))
        else:
            assert kv.awaits_memory or kv.usage().sequences_running
            kv.nobody_waits()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, token: int) -> None:
        which, sequence = data.draw(st.sampled_from(self.live))
        backend, kv = self.models[which]
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(token)
        count = len(sequence.tokens) - sequence.num_computed
        if kv.grow(sequence, count):
            logits = compute(backend, kv, sequence, count)
            assert np.array_equal(logits, computed_alone(sequence.tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        which, sequence = each = data.draw(st.sampled_from(self.live))
        self.live.remove(each)
        self.models[which][1].release(sequence, keep=keep)

    @rule(which=st.integers(0, 1))
    def maintain(self, which: int) -> None:
        self.models[which][1].maintain(0.0)

    @rule(which=st.integers(0, 1))
    def whoever_comes_gets_a_context_when_nothing_runs(self, which: int) -> None:
        for other, sequence in self.live:
            self.models[other][1].release(sequence)
        self.live = []
        for _, kv in self.models:
            settle(kv)
        sequence, (_, kv) = KVSequence([number % 7 for number in range(48)]), self.models[which]
        for _ in range(20):
            if kv.admit(sequence) is not None:
                self.live.append((which, sequence))
                return
            assert kv.awaits_memory, "it is told that there is no room, though there will be"
            for _, each in self.models:
                settle(each)
        raise AssertionError("it waits for ever")

    @invariant()
    def the_budget_holds(self) -> None:
        self.ledger.check()
        for _, kv in self.models:
            kv.check()
            arena, account = kv.arena, kv.resizer._account  # type: ignore[union-attr]
            assert max(arena.pool.extents.open * arena.extent_bytes, arena.taken_bytes) <= account.kv


TwoModels.TestCase.settings = settings(max_examples=sampled(80), stateful_step_count=40, deadline=None)
TestTwoModels = TwoModels.TestCase
LimitedMachine.TestCase.settings = settings(max_examples=sampled(50), stateful_step_count=40, deadline=None)
TestLimited = LimitedMachine.TestCase


class NarrowMachine(LimitedMachine):
    """The last extent is narrower than the others."""

    blocks = 22


NarrowMachine.TestCase.settings = settings(max_examples=sampled(50), stateful_step_count=40, deadline=None)
TestNarrow = NarrowMachine.TestCase


class StatesMachine(LimitedMachine):
    """A layer carries a state of two cells."""

    options: ClassVar[dict[str, Any]] = {"compaction": "auto", "states": 2}


StatesMachine.TestCase.settings = settings(max_examples=sampled(50), stateful_step_count=40, deadline=None)
TestStates = StatesMachine.TestCase


def manager(account: Account, blocks: int = 24, **options: Any) -> tuple[FakeBackend, PagedKVManager]:
    backend = FakeBackend()
    geometry = BlockGeometry(blocks, 4)
    backend.allocate(geometry)
    assert isinstance(backend.ops, BlockOps)
    return backend, PagedKVManager(
        backend.ops, geometry, bytes_per_token=BYTES_PER_TOKEN, extent_blocks=4, account=account, **options
    )


def two(budget: int = 6 * EXTENT) -> tuple[MemoryLedger, list[tuple[FakeBackend, PagedKVManager]]]:
    ledger = MemoryLedger(budget)
    accounts = [ledger.open(name, fixed=0, least=2 * EXTENT) for name in "ab"]
    return ledger, [manager(account) for account in accounts]


Model = tuple[FakeBackend, PagedKVManager]


def serve(model: Model, prompt: list[int], beside: Model | None = None) -> int:
    """A request from beginning to end; how many of its tokens were cached. The model `beside` does as it is told."""
    backend, kv = model
    sequence = KVSequence(prompt)
    cached = kv.admit(sequence)
    if cached is None and beside is not None:
        assert kv.awaits_memory
        settle(beside[1])
        cached = kv.admit(sequence)
    assert cached is not None
    remaining = len(prompt) - cached
    assert kv.grow(sequence, remaining)
    compute(backend, kv, sequence, remaining)
    kv.release(sequence)
    settle(kv)
    return cached


def settle(kv: PagedKVManager) -> None:
    while kv.maintain(0.0):
        pass


def prompts(count: int, length: int = 32, letter: int = 0) -> list[list[int]]:
    return [[1 + letter, number, *range(2, length)] for number in range(count)]


def test_one_that_is_alone_gets_all_there_is() -> None:
    ledger, (a, _) = two()
    for prompt in prompts(3):
        serve(a, prompt)
    assert a[1].usage().total == 24
    assert ledger.free == 0
    assert [serve(a, prompt) for prompt in prompts(3)] == [28, 28, 28]


def test_an_idle_models_prefixes_give_way_to_a_busy_ones_the_oldest_first() -> None:
    ledger, (a, b) = two()
    for prompt in prompts(3):
        serve(a, prompt)
    for prompt in prompts(2, letter=1):
        serve(b, prompt, beside=a)
        settle(a[1])
        ledger.check()
    assert [serve(b, prompt, beside=a) for prompt in prompts(2, letter=1)] == [28, 28]
    cached = [a[1].peek(KVSequence(prompt).tokens.tobytes()) for prompt in prompts(3)]
    assert cached[0] == 0 and cached[2] > 0


def test_what_runs_is_never_taken_away() -> None:
    ledger, (a, b) = two()
    backend, kv = a
    running = run_to_end(backend, kv, list(range(60)))
    waiting = KVSequence(list(range(40)))
    assert b[1].admit(waiting) is None
    assert b[1].awaits_memory
    settle(kv)
    assert running.num_computed == 60
    ledger.check()
    woken = []
    next(account for account in ledger.accounts if account.name == "b").wake = lambda: woken.append(True)
    kv.release(running)
    settle(kv)
    assert woken
    assert b[1].admit(waiting) == 0


def test_newcomers_do_not_take_what_is_to_be_given_back() -> None:
    _, (a, b) = two()
    running = run_to_end(*a, list(range(60)))
    assert b[1].admit(KVSequence(list(range(20)))) is None
    a[1].release(running, keep=False)
    assert a[1].admit(KVSequence(list(range(90)))) is None
    settle(a[1])
    assert b[1].admit(KVSequence(list(range(20)))) == 0


def test_a_cache_that_is_more_recent_stays() -> None:
    ledger, (a, b) = two()
    serve(b, prompts(1, letter=1)[0])
    for prompt in prompts(2):
        serve(a, prompt, beside=b)
        settle(b[1])
    assert serve(b, prompts(1, letter=1)[0], beside=a) == 28  # it is the most recent now
    serve(a, prompts(1, letter=2)[0], beside=b)
    settle(b[1])
    assert b[1].peek(KVSequence(prompts(1, letter=1)[0]).tokens.tobytes()) == 28
    assert a[1].peek(KVSequence(prompts(1)[0]).tokens.tobytes()) == 0
    ledger.check()


def test_what_cannot_be_opened_is_refused_and_changes_nothing() -> None:
    ledger = MemoryLedger(100)
    first = ledger.open("a", fixed=50, least=20)
    assert not ledger.fits(31)
    with pytest.raises(NoRoomError):
        ledger.open("b", fixed=30, least=1)
    assert [status.name for status in ledger.account_status()] == ["a"]
    assert ledger.claim(first) and ledger.free == 50
    first.close()
    assert ledger.free == 100


def test_weights_take_the_place_of_caches() -> None:
    ledger = MemoryLedger(6 * EXTENT)
    model = manager(ledger.open("a", fixed=0, least=2 * EXTENT))
    for prompt in prompts(3):
        serve(model, prompt)
    newcomer = ledger.open("b", fixed=3 * EXTENT, least=EXTENT)
    assert not ledger.claim(newcomer)
    settle(model[1])
    assert ledger.claim(newcomer)
    ledger.check()
    assert model[1].usage().total <= 12


def test_the_memory_is_closed_again_after_a_rebuild() -> None:
    ledger, (a, b) = two()
    serve(a, prompts(1)[0])
    serve(b, prompts(1)[0])
    a[0].rebuild()
    a[1].reset()
    a[1].check()
    ledger.check()
    assert a[1].usage().total < 24


def test_one_with_something_to_evict_does_not_wait_for_what_others_use() -> None:
    """Though it has a right to more, its own oldest prefix goes: that is faster than the end of a long answer."""
    _, (a, b) = two()
    serve(b, prompts(1, letter=1)[0])
    assert a[1].admit(KVSequence(list(range(60)))) is None
    settle(b[1])  # what it had ahead
    running = run_to_end(*a, list(range(60)))
    settle(a[1])
    serve(b, prompts(1, letter=2)[0])
    assert running.num_computed == 60


def test_who_waited_and_left_keeps_nobody_from_memory() -> None:
    ledger, (a, b) = two()
    running = run_to_end(*a, list(range(60)))
    assert b[1].admit(KVSequence(list(range(40)))) is None and b[1].awaits_memory
    waiting = next(account for account in ledger.accounts if account.name == "b")
    assert waiting.is_entitled
    b[1].nobody_waits()  # as the engine says once nobody is in its queue
    settle(b[1])
    assert not waiting.is_entitled
    a[1].release(running)
    settle(a[1])


def test_blocks_that_cannot_be_moved_are_kept() -> None:
    ledger, (a, b) = two()
    backend, kv = a
    gone, stays = run_to_end(backend, kv, prompts(1)[0]), run_to_end(backend, kv, prompts(1, letter=1)[0])

    def refuse(moves: object) -> None:
        raise BackendError("not now")

    memory: Any = backend.memory
    memory.move_blocks = refuse
    kv.release(gone, keep=False)
    assert b[1].admit(KVSequence(list(range(60)))) is None
    settle(kv)
    kv.check()
    ledger.check()
    assert stays.num_computed == 32


def test_memory_that_the_system_does_not_take_back_is_not_asked_for_again() -> None:
    ledger, (a, b) = two()
    for prompt in prompts(3):
        serve(a, prompt)

    def refuse(first: int, count: int) -> None:
        raise OSError("not now")

    memory: Any = a[0].memory
    memory.release_pages = refuse
    assert b[1].admit(KVSequence(prompts(1)[0])) is None
    for _ in range(10):
        settle(a[1])
    assert b[1].admit(KVSequence(prompts(1)[0])) is None
    assert next(each for each in ledger.accounts if each.name == "a").is_rigid
    ledger.check()
    a[1].check()
