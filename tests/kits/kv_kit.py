"""KV managers on the fake backend, and the state machine that tries everything with them."""

from __future__ import annotations

import weakref
from array import array
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend, FakeBlocks, state_after
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, BlockOps, SlotGeometry, SlotOps
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.paged.local import LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import KVSequence
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.tiers.loads import LoadingSequence
from step_of import rows_of

BYTES_PER_TOKEN = 8
Prompt = st.lists(st.integers(0, 1), min_size=1, max_size=40)


def paged(
    blocks: int = 16,
    block_size: int = 4,
    window: int = 0,
    ahead: int = 16,
    states: int = 0,
    reach: int | None = None,
    kind: type[FakeBackend] = FakeBackend,
    **options: Any,
) -> tuple[FakeBackend, PagedKVManager]:
    """`window`: of two layers beside the full one; `ahead`: tokens for which they take blocks beforehand; `states`:
    cells of a state; `reach`: `window - 1` lets windows be computed again by themselves."""
    backend = kind(window=window, states=states)
    if window or states:
        options["local"] = LocalShape(window, cells=2 if window else 0, ahead=ahead, state=states, reach=reach)
    geometry = BlockGeometry(blocks, block_size)
    backend.allocate(geometry)
    assert isinstance(backend.ops, BlockOps)
    return backend, PagedKVManager(backend.ops, geometry, bytes_per_token=BYTES_PER_TOKEN, **options)


def slots(
    count: int = 4, slot_tokens: int = 64, store_tokens: int = 100, **options: Any
) -> tuple[FakeBackend, SlotKVManager]:
    backend = FakeBackend()
    geometry = SlotGeometry(count, slot_tokens)
    backend.allocate(geometry)
    assert isinstance(backend.ops, SlotOps)
    # What the manager reckons for one saved sequence of that many tokens.
    store_bytes = most_bytes(store_tokens, BYTES_PER_TOKEN)
    manager = SlotKVManager(backend.ops, geometry, bytes_per_token=BYTES_PER_TOKEN, store_bytes=store_bytes, **options)
    return backend, manager


SLOT_BYTES = 64 * BYTES_PER_TOKEN
IDLE_BYTES = 2 * SLOT_BYTES + 400


class Metered:
    """A backend's slots, with an eye on the bytes of them and of all that was saved and is still there."""

    def __init__(self, ops: Any, limit: int) -> None:
        self._ops = ops
        self._limit = limit
        self._saved: list[weakref.ref[Any]] = []
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def save(self, slot: int) -> Any:
        saved = self._ops.save(slot)
        self._saved.append(weakref.ref(saved))
        self._check()
        return saved

    def resize(self, slots: int) -> None:
        self._ops.resize(slots)
        self._check()

    def _check(self) -> None:
        self._saved = [there for there in self._saved if there() is not None]
        saved = sum(array.nbytes for there in self._saved if (array := there()) is not None)
        self.most = max(self.most, len(self._ops._cells) * self._ops._capacity * BYTES_PER_TOKEN + saved)
        assert self.most <= self._limit


def on_demand(
    count: int = 4, movable: int = 2, slot_tokens: int = 64, **options: Any
) -> tuple[FakeBackend, SlotKVManager]:
    """One slot at the start, and room beside all of them for so many whole sequences."""
    backend = FakeBackend()
    geometry = SlotGeometry(count, slot_tokens, at_start=1)
    backend.allocate(geometry)
    store_bytes = movable * most_bytes(slot_tokens, BYTES_PER_TOKEN)
    limit = geometry.tokens * BYTES_PER_TOKEN + store_bytes
    settings = {"release_after_s": 10.0, "idle_bytes": IDLE_BYTES, "store_bytes": store_bytes} | options
    ops: Any = Metered(backend.ops, limit)
    return backend, SlotKVManager(ops, geometry, bytes_per_token=BYTES_PER_TOKEN, **settings)


def compute(backend: FakeBackend, kv: KVManager, sequence: KVSequence, count: int) -> np.ndarray:
    """What the scheduler does with one sequence in one step."""
    logits = rows_of(backend, [chunk_of(sequence, count)])
    sequence.num_computed += count
    kv.verify(sequence)
    kv.commit(sequence)
    return logits[0]


def chunk_of(sequence: KVSequence, count: int) -> Chunk:
    start = sequence.num_computed
    tokens = sequence.tokens[start : start + count]
    where = {"blocks": sequence.blocks, "local": sequence.local, "state": sequence.state, "known": sequence.rebuilt}
    return Chunk(tokens, start, True, sequence.slot, **where)


def held_tokens(backend: FakeBackend, sequence: KVSequence) -> list[int]:
    chunk = Chunk(array("i"), 0, False, sequence.slot, sequence.blocks)
    return backend.memory.read(chunk, sequence.num_computed).tolist()


def assert_states(backend: FakeBackend, kv: KVManager) -> None:
    """Every state that somebody may go on from is that of the tokens before it: of sequences, and of the whole tree."""
    if not isinstance(kv, PagedKVManager) or kv.arena.local is None or not kv.arena.local.shape.state:
        return
    memory, size = backend.memory, kv.unit_tokens
    assert isinstance(memory, FakeBlocks)
    for sequence in kv.arena.running.values():
        table = sequence.state
        if table is None or isinstance(sequence, LoadingSequence):
            continue
        for block, computed in ((table.current, table.computed), (table.last, table.last_computed)):
            assert block is None or memory.state_in(block.cells) == state_after(sequence.tokens[:computed])
    for snapshot in kv.arena.local.policy:
        unit = next(unit for unit, mark in snapshot.node.marks.items() if mark is snapshot)
        above, *path = snapshot.node.path()
        key = b"".join(bytes(node.key) for node in reversed(path)) + bytes(above.key[: unit * size * 4])
        assert snapshot.state is not None
        assert memory.state_in(snapshot.state.cells) == state_after(array("i", key))


def state_of(kv: KVManager) -> Any:
    """Everything that a call which fails must leave as it is: numbers, tables, trees, and the orders of eviction."""
    if isinstance(kv, PagedKVManager):
        order = [bytes(node.key) for node in kv.arena.prefixes.policy]
        pool = (bytes(kv.arena.pool.free_map), dict(kv.arena.pool._shared), list(kv.arena.pool.holders))
        tables = [
            (list(s.tokens), s.num_computed, list(s.blocks), allocation_of(s).indexed)
            for s in kv.arena.running.values()
        ]
        tree = _shape(kv.arena.prefixes.tree.root, lambda node: (node.number, list(node.value), node.references))
        return kv.usage()._replace(extents_ready=0, extents_fresh=0), order, pool, tables, tree
    assert isinstance(kv, SlotKVManager)
    slots = [entry and (entry.number, entry.length, entry.hits) for entry in kv.places.slots]
    store = [(entry.number, entry.length, entry.hits) for entry in kv.places.store]
    return (
        kv.usage(),
        slots,
        store,
        _shape(kv.places.index._tree.root, lambda node: {entry.number for entry in node.value}),
    )


def _shape(node: Any, look: Any) -> Any:
    return bytes(node.key), node.hits, look(node), [_shape(child, look) for child in node.children.values()]


class ManagerMachine(RuleBasedStateMachine):
    """Sequences over two letters, so that prefixes are shared all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.kv = self.build()
        self.live: list[KVSequence] = []

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(eviction_threshold=0.8, max_sequences=6)

    @rule(prompt=Prompt)
    def admit(self, prompt: list[int]) -> None:
        self.take(prompt)

    def take(self, prompt: list[int]) -> None:
        sequence = KVSequence(prompt)
        before = state_of(self.kv)
        expected = self.kv.peek(sequence.tokens.tobytes())
        cached = self.kv.admit(sequence)
        if cached is None:
            assert not sequence.admitted
            assert state_of(self.kv) == before
            return
        self.check_found(cached, expected)
        assert cached == sequence.num_computed < len(prompt)
        self.live.append(sequence)

    def check_found(self, cached: int, expected: int) -> None:
        assert cached == expected

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(token)
        count = data.draw(st.integers(1, len(sequence.tokens) - sequence.num_computed))
        count = sequence.until_stop(count, self.kv.unit_tokens)
        self.kv.arrange()
        before = state_of(self.kv)
        if not self.kv.grow(sequence, count):
            assert state_of(self.kv) == before
        else:
            known = sequence.rebuilt
            logits = compute(self.backend, self.kv, sequence, count)
            if sequence.num_computed <= known:
                return  # not all layers are exact, and nobody asks for logits
            alone = computed_alone(sequence.tokens[: sequence.num_computed])
            assert np.array_equal(logits, alone)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort_a_step(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        remaining = len(sequence.tokens) - sequence.num_computed
        if remaining and self.kv.grow(sequence, remaining):
            rows_of(self.backend, [chunk_of(sequence, remaining)])
            self.kv.rewind(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = KVSequence(parent.tokens[: parent.num_computed])
        before = state_of(self.kv)
        if self.kv.fork(parent, child):
            self.live.append(child)
        else:
            assert state_of(self.kv) == before and not child.admitted

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.kv.release(sequence, keep=keep)
        assert not sequence.admitted

    @rule(budget_s=st.sampled_from([0.0, 1.0]))
    def maintain(self, budget_s: float) -> None:
        self.kv.maintain(budget_s)

    @rule()
    def arrange(self) -> None:
        self.kv.arrange()

    @rule()
    def rebuild(self) -> None:
        for sequence in self.live:
            self.kv.release(sequence, keep=False)
        self.live = []
        self.backend.rebuild()
        self.kv.reset()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.kv.check()
        usage = self.kv.usage()
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert min(usage.free, usage.evictable, usage.referenced) >= 0
        assert usage.sequences_running == len(self.live)
        if isinstance(self.kv, PagedKVManager) and self.kv.room._max_sequences is not None:
            assert len(self.live) + usage.sequences_held - usage.pins <= self.kv.room._max_sequences
        if not self.live:
            assert usage.referenced == 0

    @invariant()
    def what_others_go_on_from_is_evicted_after_them(self) -> None:
        if isinstance(self.kv, PagedKVManager):
            gone: set[int] = set()
            for node in self.kv.arena.prefixes.policy:
                assert all(child.number in gone for child in node.children.values())
                gone.add(node.number)

    @invariant()
    def memory_spells_the_tokens(self) -> None:
        for sequence in self.live:
            assert held_tokens(self.backend, sequence) == sequence.tokens[: sequence.num_computed].tolist()
        assert_states(self.backend, self.kv)


def computed_alone(tokens: array[int]) -> np.ndarray:
    backend = FakeBackend()
    backend.allocate(SlotGeometry(1, 128))
    return rows_of(backend, [Chunk(tokens, 0, True)])[0]


def run_to_end(backend: FakeBackend, kv: KVManager, prompt: list[int]) -> KVSequence:
    sequence = KVSequence(prompt)
    assert kv.admit(sequence) is not None
    remaining = len(prompt) - sequence.num_computed
    assert kv.grow(sequence, remaining)
    compute(backend, kv, sequence, remaining)
    return sequence
