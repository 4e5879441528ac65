"""Spaces of the prefix cache: nobody finds what another space computed, in whatever order things happen."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cllm.backends.fake import FakeBackend
from cllm.engine.request import RequestState
from cllm.engine.tenant import Tenant
from cllm.kv.manager import KVManager
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.radix import COMMON_SPACE, RadixTree
from cllm.kv.sequence import KVSequence
from cllm.kv.slots import room as slot_room
from cllm.kv.slots.index import entry_of
from cllm.kv.window import Window
from engine_kit import LAYOUTS, answer, make_request, make_scheduler, reference, run, step
from kv_kit import ManagerMachine, Prompt, compute, on_demand, paged, run_to_end, slots, state_of
from same_answers import SameAnswers
from thorough import sampled

OWN_SPACES = (b"", b"ann", b"bob")
Space = st.sampled_from([*OWN_SPACES, COMMON_SPACE])
MOST_REQUESTS = 10
"""The engine's turns are counted, and all of them have to end within those that there are."""


def most_in_common(tokens: Sequence[int], others: Iterable[Sequence[int]]) -> int:
    pairs = (takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)) for other in others)
    return max((sum(1 for _ in pair) for pair in pairs), default=0)


class SpacesMachine(ManagerMachine):
    """What a sequence finds was computed in its own space before, or in the common one; all else of `ManagerMachine`
    holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[KVSequence] = []

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=32, block_size=2, eviction_threshold=0.8, max_sequences=6)

    @rule(prompt=Prompt, space=Space)
    def admit(self, prompt: list[int], space: bytes) -> None:
        sequence = KVSequence(prompt, space=space)
        before = state_of(self.kv)
        expected = self.kv.peek(sequence.tokens.tobytes(), space)
        possible = most_in_common(prompt, (s.tokens for s in self.computed if s.space in (space, COMMON_SPACE)))
        assert expected <= possible
        cached = self.kv.admit(sequence)
        if cached is None:
            assert not sequence.admitted
            assert state_of(self.kv) == before
            return
        self.check_found(cached, expected)
        assert cached == sequence.num_computed < len(prompt)
        self.live.append(sequence)
        self.computed.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = KVSequence(parent.tokens[: parent.num_computed], space=parent.space)
        if self.kv.fork(parent, child):
            self.live.append(child)
            self.computed.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), length=st.integers(0, 40))
    def truncate(self, data: st.DataObject, length: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if length < sequence.num_computed:
            # What was computed before may stay in the cache.
            self.computed.append(KVSequence(sequence.tokens, space=sequence.space))
            kept = self.kv.truncate(sequence, length)
            del sequence.tokens[max(kept, 1) :]


class SlotSpacesMachine(SpacesMachine):
    def build(self) -> tuple[FakeBackend, KVManager]:
        return slots(eviction_threshold=0.8, max_sequences=6)


class OnDemandSpacesMachine(SpacesMachine):
    def build(self) -> tuple[FakeBackend, KVManager]:
        return on_demand()

    def check_found(self, cached: int, expected: int) -> None:
        assert cached <= expected


class AsIfAloneMachine(ManagerMachine):
    """While nothing is evicted, every space is what it would be if it had the whole cache to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = {space: self.build() for space in OWN_SPACES}
        self.twins: dict[int, KVSequence] = {}

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=2048, block_size=2)

    def shared(self, sequence: KVSequence) -> int:
        """How much of a sequence others can find."""
        return allocation_of(sequence).indexed

    @rule(prompt=Prompt, space=st.sampled_from(OWN_SPACES))
    def admit(self, prompt: list[int], space: bytes) -> None:
        sequence, twin = KVSequence(prompt, space=space), KVSequence(prompt)
        found = self.kv.admit(sequence)
        assert found is not None and found == self.alone[space][1].admit(twin)
        self.live.append(sequence)
        self.twins[id(sequence)] = twin

    @rule(prompt=Prompt)
    def look(self, prompt: list[int]) -> None:
        key = array("i", prompt).tobytes()
        for space, (_, kv) in self.alone.items():
            assert self.kv.peek(key, space) == kv.peek(key)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(token)
        count = data.draw(st.integers(1, len(sequence.tokens) - sequence.num_computed))
        backend, kv = self.alone[sequence.space]
        twin = self.twins[id(sequence)]
        twin.tokens = sequence.tokens[:]
        logits = []
        for each in ((self.backend, self.kv, sequence), (backend, kv, twin)):
            assert each[1].grow(each[2], count)
            logits.append(compute(*each, count))
        assert np.array_equal(*logits)
        assert self.shared(sequence) == self.shared(twin)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        known = parent.tokens[: parent.num_computed]
        child, twin = KVSequence(known, space=parent.space), KVSequence(known)
        assert self.kv.fork(parent, child)
        assert self.alone[parent.space][1].fork(self.twins[id(parent)], twin)
        self.live.append(child)
        self.twins[id(child)] = twin

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.kv.release(sequence, keep=keep)
        self.alone[sequence.space][1].release(self.twins.pop(id(sequence)), keep=keep)

    @rule()
    def rebuild(self) -> None:
        """Memory that is lost is another matter."""


class AloneInSlotsMachine(AsIfAloneMachine):
    """Whether a slot is taken over or copied depends on who runs beside it. Only in the one way short tails are lost:
    here every tail is saved. And what was taken over is lost with the sequence that continued it: here all are kept."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(slot_room, "SAVE_TAIL_TOKENS", 1)
        super().__init__()

    def build(self) -> tuple[FakeBackend, KVManager]:
        return slots(count=48, store_tokens=100_000)

    def shared(self, sequence: KVSequence) -> int:
        return entry_of(sequence).length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:  # type: ignore[override]
        super().release(data, keep=True)

    def teardown(self) -> None:
        self.patch.undo()


class TenantMachine(SameAnswers):
    """The same through the engine: twins, preemption, windows, lost steps and lost memory included. And what everybody
    gets is what he gets alone."""

    @initialize(blocks=st.sampled_from([28, 40, 128]))
    def start(self, blocks: int) -> None:
        super().start(blocks)
        self.foreign: list[list[int]] = []
        for rig in self.rigs:
            _watch(rig.scheduler.kv, self.foreign)

    @invariant()
    def nobody_found_what_others_computed(self) -> None:
        assert not getattr(self, "foreign", None)

    @precondition(lambda self: len(self.rigs[0].requests) < MOST_REQUESTS)
    @rule(
        letters=st.text("ab", min_size=1, max_size=60),
        max_tokens=st.integers(1, 30),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        kept=st.sampled_from([(1, 8), (4, 12), None, None, None]),
        space=Space,
    )
    def submit(self, letters: str, max_tokens: int, kept: Any, space: bytes, **options: Any) -> None:
        for rig in self.rigs:
            window = Window.fit(*kept, rig.scheduler.kv.unit_tokens) if kept else None
            tenant = Tenant(space.decode(), space)
            rig.submit(letters, max_tokens, seed=3, window=window, tenant=tenant, **options)


def _watch(kv: KVManager, foreign: list[list[int]]) -> None:
    """Whatever is found was computed in the same space before, or in the common one; if not, it goes into `foreign`."""
    known: list[KVSequence] = []
    admit, fork = kv.admit, kv.fork

    def admit_watched(sequence: KVSequence) -> int | None:
        own = [s.tokens for s in known if s.space in (sequence.space, COMMON_SPACE) and s is not sequence]
        if not sequence.counts_as_query:
            own.append(sequence.tokens)
        known.append(sequence)
        cached = admit(sequence)
        if cached is not None and cached > most_in_common(sequence.tokens, own):
            foreign.append(sequence.tokens[:cached].tolist())
        return cached

    def fork_watched(parent: KVSequence, child: KVSequence) -> bool:
        known.append(child)
        return fork(parent, child)

    kv.admit, kv.fork = admit_watched, fork_watched  # type: ignore[method-assign]


_profile = settings(max_examples=sampled(50), stateful_step_count=40, deadline=None)
for _machine in (SpacesMachine, SlotSpacesMachine, OnDemandSpacesMachine, AsIfAloneMachine, AloneInSlotsMachine):
    _machine.TestCase.settings = _profile
TenantMachine.TestCase.settings = settings(max_examples=sampled(30), stateful_step_count=25, deadline=None)
TestPagedSpaces = SpacesMachine.TestCase
TestSlotSpaces = SlotSpacesMachine.TestCase
TestOnDemandSpaces = OnDemandSpacesMachine.TestCase
TestAsIfAlone = AsIfAloneMachine.TestCase
TestAloneInSlots = AloneInSlotsMachine.TestCase
TestTenants = TenantMachine.TestCase


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("make", [paged, slots])
def test_the_same_prompt_is_found_in_its_own_space_alone(make: Any) -> None:
    backend, kv = make()
    prompt = [1] * 17
    kv.release(run_to_end(backend, kv, prompt))
    key = array("i", prompt).tobytes()
    assert (kv.peek(key), kv.peek(key, b"ann"), kv.peek(key, b"bob")) == (16, 0, 0)
    for _ in range(2):
        sequence = KVSequence(prompt, space=b"ann")
        found = kv.admit(sequence)
        compute(backend, kv, sequence, len(prompt) - sequence.num_computed)
        kv.release(sequence)
        kv.check()
    assert found == 16
    assert (kv.peek(key), kv.peek(key, b"ann"), kv.peek(key, b"bob")) == (16, 16, 0)


@pytest.mark.parametrize("make", [paged, slots])
def test_what_is_common_is_found_by_all_and_gone_on_from_by_each_alone(make: Any) -> None:
    backend, kv = make()
    common, question = list(range(16)), [50] * 9

    def ask(space: bytes, tokens: list[int]) -> int:
        sequence = KVSequence(tokens, space=space)
        found = kv.admit(sequence)
        assert found is not None
        compute(backend, kv, sequence, len(tokens) - found)
        kv.check()
        kv.release(sequence)
        kv.check()
        return found

    assert ask(COMMON_SPACE, common) == 0
    assert ask(b"ann", common + question) == 16
    assert ask(b"bob", common + question) == 16
    assert ask(b"ann", common + question) == 24
    assert ask(COMMON_SPACE, common + question) in (12, 15, 16)
    assert ask(b"", [*common[:8], 70, 71]) == 8  # a branch within what is common
    assert ask(b"ann", [*common[:8], 70, 71, 72]) == 8
    usage = kv.usage()
    assert usage.referenced == 0 and usage.free + usage.evictable == usage.total


def test_blocks_that_are_common_are_held_once() -> None:
    backend, kv = paged(blocks=16)
    common = list(range(16))
    for space in (COMMON_SPACE, b"ann", b"bob", b"eve"):
        sequence = KVSequence(common if space == COMMON_SPACE else [*common, *range(60, 65)], space=space)
        kv.admit(sequence)
        compute(backend, kv, sequence, len(sequence.tokens) - sequence.num_computed)
        kv.release(sequence)
    kv.check()
    usage = kv.usage()
    assert (usage.evictable, usage.evictions) == (4 + 3, 0)  # the beginning once, and one block of each


def test_what_was_used_longest_ago_goes_first_whosever_it_is() -> None:
    backend, kv = paged(blocks=8)
    for space in (b"ann", b"bob"):
        sequence = KVSequence([1] * 8, space=space)
        assert kv.admit(sequence) == 0
        compute(backend, kv, sequence, 8)
        kv.release(sequence)
    assert kv.admit(KVSequence([2] * 24, space=b"bob")) == 0
    key = array("i", [1] * 9).tobytes()
    assert (kv.peek(key, b"ann"), kv.peek(key, b"bob")) == (0, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nobody_waits_for_a_prompt_that_another_tenant_computes(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, max_step_tokens=8)
    tenants = [Tenant("ann", b"ann"), Tenant("bob", b"bob"), Tenant("ann", b"ann")]
    first, other, same = (make_request("s" * 40, tenant=tenant) for tenant in tenants)
    for request in (first, other, same):
        scheduler.requests.add(request)
    outputs = step(scheduler, backend)
    assert first.state is other.state is RequestState.PROCESSING
    assert same.state is RequestState.PENDING
    outputs += run(scheduler, backend)
    assert (first.hit.tokens, other.hit.tokens) == (0, 0)
    assert same.hit.tokens >= 32
    assert answer(outputs, first) == answer(outputs, other) == answer(outputs, same) == reference(first)


def test_a_space_that_is_empty_leaves_nothing_behind() -> None:
    tree: RadixTree[list[int]] = RadixTree(1, [], lambda value, at: (value, value))
    for number in range(100):
        root = tree.root_of(str(number).encode())
        assert tree.root_of(str(number).encode()) is root
        leaf = tree.add(root, b"abcd", [])
        del root
        assert tree.find(b"abcd", tree.root_of(str(number).encode())).node is leaf
        assert len(list(tree.examine())) == 1
        tree.remove(leaf)
        del leaf
    gc.collect()
    assert list(tree._roots) == [b""]
    assert not list(tree.nodes())
