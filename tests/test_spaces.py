"""Spaces of the prefix cache: nobody finds what another space computed, in whatever order things happen."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from cllm.backends.fake import FakeBackend
from cllm.engine.params import SamplingParams
from cllm.engine.request import Request, RequestState
from cllm.engine.tenant import Tenant
from cllm.kv.manager import KVManager
from cllm.kv.radix import RadixTree
from cllm.kv.sequence import KVSequence
from engine_kit import make_request, make_scheduler, reference
from test_kv_managers import ManagerMachine, Prompt, compute, on_demand, paged, run_to_end, slots, state_of
from test_scheduler import LAYOUTS, SchedulerMachine, answer, run, step

Space = st.sampled_from([b"", b"ann", b"bob"])


def most_in_common(tokens: Sequence[int], others: Iterable[Sequence[int]]) -> int:
    pairs = (takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)) for other in others)
    return max((sum(1 for _ in pair) for pair in pairs), default=0)


class SpacesMachine(ManagerMachine):
    """What a sequence finds was computed in its own space before; all else of `ManagerMachine` holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[KVSequence] = []

    @rule(prompt=Prompt, space=Space)
    def admit(self, prompt: list[int], space: bytes) -> None:
        sequence = KVSequence(prompt, space=space)
        before = state_of(self.kv)
        expected = self.kv.peek(sequence.tokens.tobytes(), space)
        possible = most_in_common(prompt, (other.tokens for other in self.computed if other.space == space))
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
        self.alone = {space: self.build() for space in (b"", b"ann", b"bob")}
        self.twins: dict[int, KVSequence] = {}

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=2048, block_size=2)

    @rule(prompt=Prompt, space=Space)
    def admit(self, prompt: list[int], space: bytes) -> None:
        sequence, twin = KVSequence(prompt, space=space), KVSequence(prompt)
        assert self.kv.admit(sequence) == self.alone[space][1].admit(twin)
        self.live.append(sequence)
        self.twins[id(sequence)] = twin

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
        for each in ((self.backend, self.kv, sequence), (backend, kv, twin)):
            assert each[1].grow(each[2], count)
            compute(*each, count)
        assert sequence.indexed == twin.indexed

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


class TenantMachine(SchedulerMachine):
    """The same through the scheduler: twins, preemption, lost steps and lost memory included."""

    @initialize(layout=st.sampled_from(LAYOUTS), tokens=st.sampled_from([128, 512]))
    def start(self, layout: str, tokens: int) -> None:
        self.backend = FakeBackend()
        self.scheduler = make_scheduler(self.backend, layout, tokens=tokens, running=4, max_step_tokens=24)
        self.live: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.known: list[Any] = []
        admit = self.scheduler.kv.admit

        def watched(sequence: Any) -> int | None:
            cached = admit(sequence)
            own = [s.tokens for s in self.known if s.space == sequence.space and s is not sequence]
            if not sequence.counts_as_query:
                own.append(sequence.tokens)
            assert cached is None or cached <= most_in_common(sequence.tokens, own)
            self.known.append(sequence)
            return cached

        self.scheduler.kv.admit = watched  # type: ignore[method-assign]

    @rule(
        letters=st.lists(st.sampled_from([97, 98]), min_size=1, max_size=60),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 30),
        space=Space,
    )
    def submit(self, letters: list[int], n: int, max_tokens: int, space: bytes) -> None:
        params = SamplingParams(n=n, temperature=0.0, max_tokens=max_tokens)
        request = make_request(letters, params, max_context=100, tenant=Tenant(space.decode(), space))
        self.live[request.id] = request
        self.scheduler.add(request)


_profile = settings(max_examples=50, stateful_step_count=40, deadline=None)
for _machine in (SpacesMachine, SlotSpacesMachine, OnDemandSpacesMachine, AsIfAloneMachine, TenantMachine):
    _machine.TestCase.settings = _profile
TestPagedSpaces = SpacesMachine.TestCase
TestSlotSpaces = SlotSpacesMachine.TestCase
TestOnDemandSpaces = OnDemandSpacesMachine.TestCase
TestAsIfAlone = AsIfAloneMachine.TestCase
TestTenants = TenantMachine.TestCase


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
        scheduler.add(request)
    outputs = step(scheduler, backend)
    assert first.state is other.state is RequestState.PROCESSING
    assert same.state is RequestState.PENDING
    outputs += run(scheduler, backend)
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    assert same.cached_tokens >= 32
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
    assert tree.leaves == 0
