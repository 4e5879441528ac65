"""The state machine of KV managers, with pins."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cllm.backends.fake import FakeBackend
from cllm.kv.manager import KVManager
from cllm.kv.pins import PinMark
from cllm.kv.radix import COMMON_SPACE
from cllm.kv.sequence import KVSequence
from kv_kit import ManagerMachine, paged, run_to_end, slots

SPACES = (b"", b"one", COMMON_SPACE)


def pinned(kv: KVManager, backend: FakeBackend, tokens: list[int], ttl_s: float = math.inf) -> PinMark:
    """Compute a prompt, pin all of it, let it go."""
    sequence = run_to_end(backend, kv, tokens)
    mark = PinMark(len(tokens), ttl_s)
    kv.pin(sequence, mark)
    kv.release(sequence)
    kv.check()
    return mark


class PinMachine(ManagerMachine):
    """Pins of several spaces come and go among the sequences of the machine below."""

    limit = 0.5

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()
        self.pinned: dict[str, tuple[list[int], bytes, float]] = {}
        self.lost: dict[str, tuple[list[int], bytes, float]] = {}

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(eviction_threshold=0.8, pin_limit=self.limit, clock=lambda: self.now)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40), space=st.sampled_from(SPACES))
    def admit(self, prompt: list[int], space: bytes) -> None:
        sequence = KVSequence(prompt, space=space)
        if self.kv.admit(sequence) is not None:
            self.live.append(sequence)
        self.note_who_gave_way(allowed=not self.live or len(self.live) == 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = KVSequence(parent.tokens[: parent.num_computed], space=parent.space)
        if self.kv.fork(parent, child):
            self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.sampled_from([0.5, 1.0]), ttl_s=st.sampled_from([5.0, 50.0, math.inf]))
    def end_with_a_pin(self, data: st.DataObject, share: float, ttl_s: float) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        mark = PinMark(int(share * len(sequence.tokens)), ttl_s)
        self.kv.rewind(sequence)
        self.kv.pin(sequence, mark)
        self.note_who_gave_way(allowed=True)  # to a space that has less than its part
        assert (mark.pin_id is None) == (mark.refusal is not None)
        if mark.pin_id is not None:
            before = self.pinned.get(mark.pin_id)
            until = max(self.now + ttl_s, -1.0 if before is None else before[2])
            self.pinned[mark.pin_id] = (sequence.tokens[: mark.pinned_tokens].tolist(), sequence.space, until)
            self.lost.pop(mark.pin_id, None)
        self.kv.release(sequence)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pinned)))
        del self.pinned[name]
        assert self.kv.unpin(name)
        assert not self.kv.unpin(name)

    @rule(seconds=st.sampled_from([1.0, 6.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        ends = [until for _, _, until in self.pinned.values() if not math.isinf(until)]
        if ends:
            assert (due := self.kv.upkeep_at()) is not None and due <= min(ends)
        self.kv.maintain(0.0)
        self.pinned = {name: pin for name, pin in self.pinned.items() if pin[2] > self.now}

    @rule()
    def rebuild(self) -> None:
        super().rebuild()
        self.forget()
        lost = {pin.id: pin for pin in self.kv.lost_pins()}
        assert lost.keys() == {name for name, pin in self.lost.items() if pin[2] > self.now} - self.pinned.keys()
        for name, pin in lost.items():
            tokens, space, until = self.lost[name]
            assert (pin.of.tokens.tolist(), pin.of.space, pin.ttl_s) == (tokens, space, until - self.now)

    def forget(self) -> None:
        self.lost.update(self.pinned)
        self.pinned.clear()

    def listed(self, state: str) -> list[dict[str, Any]]:
        return [pin for pin in self.kv.details()["pins"]["prefixes"] if pin["state"] == state]

    def note_who_gave_way(self, *, allowed: bool) -> None:
        names = {pin["id"] for pin in self.listed("pinned")}
        gone = self.pinned.keys() - names
        assert allowed or not gone
        for name in gone:
            del self.pinned[name]

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.kv.check()
        usage, details = self.kv.usage(), self.kv.details()["pins"]
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert min(usage.free, usage.evictable, usage.referenced) >= 0
        assert usage.referenced >= usage.pinned and (self.live or usage.referenced == usage.pinned)
        assert usage.pins == len(self.pinned) == len(self.listed("pinned"))
        assert details["pinned_bytes"] <= details["limit_bytes"]

    @invariant()
    def what_is_pinned_is_found_in_its_space(self) -> None:
        for tokens, space, _ in self.pinned.values():
            key = KVSequence([*tokens, 2]).tokens.tobytes()
            for finder in SPACES if space == COMMON_SPACE else (space,):
                assert self.kv.peek(key, finder) >= len(tokens)


class SlotPinMachine(PinMachine):
    limit = 0.9

    def build(self) -> tuple[FakeBackend, KVManager]:
        return slots(store_tokens=400, pin_limit=self.limit, clock=lambda: self.now)

    def forget(self) -> None:
        """What is saved outlives the backend's memory."""
