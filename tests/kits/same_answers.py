"""A state machine of requests, faults and cancellations, in which every answer must be the one it is alone."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.backends.fake import FakeBackend
from cllm.engine.request import FinishReason, Request
from cllm.kv.ops import BlockGeometry, SlotGeometry
from cllm.kv.paged.local import LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.window import Window
from fault_kit import CAUSE, WAYS, Clock, Machine, Rig
from pipelined_backend import PipelinedFake
from window_kit import windowed_reference

CONTEXT = 96
MOST_FAULTS = 3
"""With more of them in a row, nothing computed in between, the engine may give up."""


def in_blocks(backend: FakeBackend, blocks: int, local: LocalShape | None = None) -> Machine:
    """Blocks are moved after every step."""
    clock, geometry = Clock(), BlockGeometry(blocks, 4)
    backend.allocate(geometry)
    options: dict[str, Any] = {"bytes_per_token": 8, "watermark": 0.02, "eviction_threshold": 0.8, "extent_blocks": 4}
    options["local"] = local
    upkeep = UpkeepSettings(compaction="always")
    kv = PagedKVManager(backend.ops, geometry, clock=clock, upkeep=upkeep, **options)  # type: ignore[arg-type]
    return Machine(backend, kv, lambda request, index: windowed_reference(request, "paged", index), clock=clock)


def in_slots() -> Machine:
    backend, geometry = FakeBackend(context_length=CONTEXT), SlotGeometry(3, CONTEXT)
    backend.allocate(geometry)
    kv = SlotKVManager(backend.ops, geometry, bytes_per_token=8, store_bytes=2 * most_bytes(48, 8))  # type: ignore[arg-type]
    return Machine(backend, kv, lambda request, index: windowed_reference(request, "slots", index))


class SameAnswers(RuleBasedStateMachine):
    @initialize(blocks=st.sampled_from([28, 40, 128]))
    def start(self, blocks: int) -> None:
        ahead = PipelinedFake(context_length=CONTEXT)
        self.begin([in_slots(), in_blocks(FakeBackend(context_length=CONTEXT), blocks), in_blocks(ahead, blocks)])

    windows = True
    """Whether requests may ask for a rolling window."""

    def begin(self, machines: list[Machine]) -> None:
        self.rigs = [Rig(machine) for machine in machines]
        self.faults = 0
        for rig in self.rigs:
            rig.own_faults.append(CAUSE)
            rig.before_step = _takes_time(rig)

    @rule(
        letters=st.text("ab", min_size=1, max_size=60),
        max_tokens=st.integers(0, 36),
        n=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        ends=st.booleans(),
        penalties=st.sampled_from([{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5, "presence_penalty": 1}]),
        logprobs=st.sampled_from([None, 2]),
        priority=st.integers(-1, 1),
        timeout_s=st.sampled_from([1e9, 1e9, 0.1]),
        kept=st.sampled_from([(0, 1), (1, 8), (4, 12), (9, 33), None, None, None]),
        reads=st.sampled_from([None, None, None, "scores", "last", "mean", "cls"]),
        cuts=st.just(()) | st.lists(st.sampled_from([0, 0.2, 0.5, 0.9, 1]), min_size=1, max_size=3),
    )
    def submit(self, letters: str, max_tokens: int, kept: Any, ends: bool, penalties: Any, **options: Any) -> None:
        for rig in self.rigs:
            window = (
                Window.fit(*kept, rig.scheduler.kv.unit_tokens)
                if kept and self.windows and not options["reads"]
                else None
            )
            rig.submit(letters, max_tokens, seed=3, window=window, ignore_eos=not ends, **penalties, **options)

    @rule(count=st.integers(1, 4))
    def turn(self, count: int) -> None:
        for rig in self.rigs:
            rig.turns(count)

    @rule(seconds=st.sampled_from([0.05, 1.0]))
    def time_passes(self, seconds: float) -> None:
        for rig in self.rigs:
            rig.now += seconds

    @precondition(lambda self: self.rigs[0].requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.rigs[0].requests) - 1))
        index = data.draw(st.sampled_from([None, *range(self.rigs[0].requests[number].params.n)]))
        for rig in self.rigs:
            rig.cancel(rig.requests[number], index)

    @precondition(lambda self: self.faults < MOST_FAULTS)
    @rule(calls=st.integers(1, 40), way=st.sampled_from(sorted(WAYS)), after=st.booleans())
    def something_fails(self, calls: int, way: str, after: bool) -> None:
        """One of the next calls, whatever it is, unless nobody makes so many before the next fault is planned."""
        self.faults += 1
        for rig in self.rigs:
            rig.fault.number, rig.fault.way, rig.fault.after = len(rig.calls.names) + calls, way, after
            rig.scripted_rebuilds += 4

    @invariant()
    def memory_is_sound(self) -> None:
        for rig in getattr(self, "rigs", []):
            rig.calls.counting = False
            if rig.scheduler.doubt.error is None:
                rig.scheduler.kv.check()
                usage = rig.scheduler.kv.usage()
                assert usage.free + usage.evictable + usage.referenced == usage.total
                assert usage.sequences_running == len(rig.scheduler.requests.running)
            rig.calls.counting = True

    def teardown(self) -> None:
        rigs: list[Rig] = getattr(self, "rigs", [])
        for rig in rigs:
            rig.run()
            rig.assert_sound()
        if rigs:
            for one, other in zip(rigs[1].requests, rigs[2].requests, strict=True):
                for index in range(one.params.n):
                    if (one.id, index) not in rigs[1].ended_before:
                        self._compare(one, other, index)

    def _compare(self, one: Request, other: Request, index: int) -> None:
        """One after another or ahead: the same tokens, if the answers ended by themselves; else one is longer."""
        _, plain, ahead = self.rigs
        tokens = plain.collector.tokens.get((one.id, index), [])
        tokens_ahead = ahead.collector.tokens.get((other.id, index), [])
        reasons = {rig.collector.ends[r.id, index].reason for rig, r in ((plain, one), (ahead, other))}
        if reasons <= {FinishReason.LENGTH, FinishReason.STOP}:
            assert tokens == tokens_ahead and len(reasons) == 1
        common = min(len(tokens), len(tokens_ahead))
        assert tokens[:common] == tokens_ahead[:common]


class SameAnswersOfLocalLayers(SameAnswers):
    """Two of three layers attend to the last tokens only, and keep no more."""

    windows = False

    @initialize(blocks=st.sampled_from([60, 100, 300]), window=st.sampled_from([3, 8, 17]))
    def start(self, blocks: int, window: int) -> None:  # type: ignore[override]
        shape = LocalShape(window, cells=2, ahead=12)
        plain, ahead = (kind(context_length=CONTEXT, window=window) for kind in (FakeBackend, PipelinedFake))
        self.begin([in_slots(), in_blocks(plain, blocks, shape), in_blocks(ahead, blocks, shape)])


class SameAnswersOfStates(SameAnswers):
    """A layer carries a state, and on one machine two others attend to the last tokens only."""

    windows = False

    @initialize(blocks=st.sampled_from([60, 100, 300]), window=st.sampled_from([3, 8, 17]), states=st.integers(1, 4))
    def start(self, blocks: int, window: int, states: int) -> None:  # type: ignore[override]
        plain = FakeBackend(context_length=CONTEXT, states=states)
        both = FakeBackend(context_length=CONTEXT, states=states, window=window)
        shape = LocalShape(state=states)
        wider = LocalShape(window, cells=2, ahead=12, state=states)
        self.begin([in_slots(), in_blocks(plain, blocks, shape), in_blocks(both, blocks, wider)])


def _takes_time(rig: Rig) -> Any:
    """Of which upkeep has its share."""

    def step(chunks: object) -> None:
        rig.now += 0.001

    return step
