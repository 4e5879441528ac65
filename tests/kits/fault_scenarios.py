"""What happens on a server while one of its calls fails: a scenario for each thing that an engine does."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable

import numpy as np

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.engine.request import Request
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.ops import BlockGeometry, SlotGeometry
from cllm.kv.paged.local import MOST_STATES, LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.window import Window
from engine_kit import make_request, reference
from fault_kit import Clock, Machine, Rig, Scenario
from pipelined_backend import PipelinedFake
from state_slots_kit import state_slots


def paged(blocks: int = 48, backend: FakeBackend | None = None, local: LocalShape | None = None) -> Machine:
    backend = backend or FakeBackend(context_length=96)
    geometry = BlockGeometry(blocks, 4)
    backend.allocate(geometry)
    kv = PagedKVManager(backend.ops, geometry, local, bytes_per_token=8, eviction_threshold=0.7, watermark=0.02)
    return Machine(backend, kv, expected)


def elastic(compaction: str, backend: FakeBackend | None = None) -> Machine:
    """Memory that is moved together and given back, by a clock of its own."""
    backend, clock = backend or FakeBackend(context_length=96), Clock()
    geometry = BlockGeometry(48, 4)
    backend.allocate(geometry)
    upkeep = UpkeepSettings(
        release_after_s=10.0,
        idle_bytes=4 * 32,
        ahead_bytes=32,
        compaction=compaction,  # type: ignore[arg-type]
    )
    options = {"bytes_per_token": 8, "watermark": 0.02, "extent_blocks": 4, "upkeep": upkeep}
    return Machine(backend, PagedKVManager(backend.ops, geometry, clock=clock, **options), expected, clock=clock)


def slots(count: int = 3) -> Machine:
    backend = FakeBackend(context_length=96)
    geometry = SlotGeometry(count, 96)
    backend.allocate(geometry)
    store = 2 * most_bytes(48, 8)
    kv = SlotKVManager(backend.ops, geometry, bytes_per_token=8, store_bytes=store, eviction_threshold=0.9)
    return Machine(backend, kv, expected, max_running=count)


def slots_on_demand(count: int = 4) -> Machine:
    backend = FakeBackend(context_length=96)
    geometry = SlotGeometry(count, 96, at_start=1)
    backend.allocate(geometry)
    clock = Clock()
    settings = {"store_bytes": 2 * most_bytes(96, 8), "release_after_s": 1.0, "idle_bytes": 96 * 8 + 300}
    kv = SlotKVManager(backend.ops, geometry, bytes_per_token=8, clock=clock, **settings)
    return Machine(backend, kv, expected, max_running=count, clock=clock)


def slots_with_states(count: int = 3) -> Machine:
    """With room to keep a few states: they cannot be rewound."""
    backend, kv = state_slots(count, 96, store_sequences=2)
    kv.places.snapshots.apart = 4
    return Machine(backend, kv, expected, max_running=count)


def expected(request: Request, index: int) -> list[int]:
    params = request.params
    return _reference(bytes(request.prompt), params.max_tokens, params.temperature, params.seed, params.n, index)


@functools.cache
def _reference(prompt: bytes, max_tokens: int, temperature: float, seed: int | None, n: int, index: int) -> list[int]:
    from cllm.engine.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, n=n, ignore_eos=True)
    tokens = list(memoryview(prompt).cast("i"))
    return reference(make_request(tokens, params, max_context=96), index)


def mixed_prompts(rig: Rig) -> None:
    rig.submit("short")
    rig.submit("a prompt of more than one chunk", temperature=1.0, seed=3)
    rig.turns(2)
    rig.submit("late")
    rig.run()
    rig.idle_check()


def shared_prefixes(rig: Rig) -> None:
    """Prefixes of sequences that run, are held, were saved or evicted."""
    prefix = "all of them begin like "
    rig.submit(prefix + "one", 5)
    rig.submit(prefix + "two", 5)
    rig.run()
    rig.submit("x" * 30, 2)
    rig.submit("y" * 30, 2)
    rig.run()
    rig.submit(prefix + "three", 2)
    rig.submit("x" * 20, 2)
    rig.run()


def forks(rig: Rig) -> None:
    """More answers than may run at once."""
    rig.submit("several", 3, n=4, temperature=1.0, seed=5)
    rig.turns(2)
    rig.submit("one more", 2)
    rig.run()


def answers_are_resumed(rig: Rig) -> None:
    """From tokens that were generated elsewhere; of one answer there are none, and one had ended."""
    rig.submit("several answers to a prompt", 8, n=4, temperature=1.0, seed=5, cuts=(0.5, 0, 0.2, 1))
    rig.turns(2)
    rig.submit("another one that was cut off", 6, seed=1, cuts=(0.9,))
    rig.run()


def prompts_are_read(rig: Rig) -> None:
    """Scored and embedded, beside one that answers, some of whose beginning is cached."""
    prefix = "all of them begin like "
    rig.submit(prefix + "one", 3)
    rig.turns(2)
    rig.submit(prefix + "two", 2, reads="scores", n=2)
    rig.submit(prefix + "three", reads="mean")
    rig.submit(prefix + "four", reads="last")
    rig.submit("nothing", 0)
    rig.run()


def windows(rig: Rig) -> None:
    """Two that share a beginning drop tokens, one of them twice; a third finds what they left."""
    window = Window.fit(4, 12, rig.scheduler.kv.unit_tokens)
    rig.submit("the same beginning", 8, window=window)
    rig.submit("the same beginning for", 4, window=window, n=2, temperature=1.0, seed=2)
    rig.run()
    rig.submit("the same beginning again", 2)
    rig.run()
    rig.idle_check()


def cancels(rig: Rig) -> None:
    """While waiting, while running, one answer of two, and in the middle of a step."""
    rig.scheduler.budget._max_tokens = 64  # chunks that are worth interrupting
    running, twins = rig.submit("to be cancelled", 8), rig.submit("twins", 5, n=2, temperature=1.0, seed=1)
    waiting = rig.submit("never begins", 3)
    other = rig.submit("goes on", 4)
    rig.turns(2)
    rig.cancel(waiting)
    rig.cancel(twins, 1)
    rig.turns(1)
    rig.cancel(running)
    rig.turns(1)
    rig.cancel(other)
    rig.turns(2)
    long = rig.submit("l" * 40, 3)
    rig.submit("stays", 2)

    def interrupt(chunks: object) -> None:
        rig.before_step = lambda chunks: None
        rig.cancel(long)
        raise StepAbortedError("somebody was cancelled")

    rig.before_step = interrupt
    rig.run()


def timeouts(rig: Rig) -> None:
    rig.submit("too slow", 30, timeout_s=0.05)
    rig.submit("in time", 4)
    rig.submit("m" * 20, 2)
    rig.submit("too late", 30, timeout_s=0.06)
    rig.run()


def preempted_prompt(rig: Rig) -> None:
    """In the middle of a prompt its memory goes to an answer."""
    rig.submit("l" * 40, 2, priority=1)
    rig.turns(1)
    rig.submit("abc", 5)
    rig.run()


def preempted_answer(rig: Rig) -> None:
    """Two answers outgrow the memory; on slots, one leaves a gap behind."""
    rig.submit("abc", 1)
    rig.submit("uvw", 8)
    rig.submit("xyz", 7)
    rig.run()


def shutdown(rig: Rig) -> None:
    rig.submit("ends", 3)
    rig.submit("does not", 60)
    rig.submit("nor this", 60, n=2, temperature=1.0, seed=2)
    rig.submit("has not begun")
    rig.turns(2)
    rig.stop(0.05)
    rig.run()


def rebuilds(rig: Rig) -> None:
    """A context that is lost, a step that fails, a sequence that cannot be computed, in turn."""
    rig.scripted_rebuilds = 1
    rig.own_faults.append("nobody can compute this")
    rig.submit("one", 6)
    rig.submit("two of the same", 6, n=2, temperature=1.0, seed=4)
    rig.turns(3)

    def lose(chunks: object) -> None:
        rig.before_step = lambda chunks: None
        raise BackendError("nobody can compute this: the context is lost", fatal=True)

    rig.before_step = lose
    rig.turns(2)
    poison = ord("~")

    def refuse(chunks: list) -> None:
        if any(poison in chunk.tokens for chunk in chunks):
            raise BackendError("nobody can compute this")

    rig.before_step = refuse
    rig.submit("bad ~", 3)
    rig.run()


def wrong_positions(rig: Rig) -> None:
    """A slot that holds a token nobody asked it to hold, twice."""
    rig.scripted_rebuilds = 2
    rig.own_faults.append("positions")
    rig.submit("one", 5)
    rig.submit("two", 5)

    def stray(chunks: list) -> None:
        token = Chunk(array("i", [9]), chunks[0].start + 40, False, chunks[0].slot)
        rig.machine.backend.memory.write(token, np.array([9], np.int32))

    for _ in range(2):
        rig.turns(2)
        rig.before_step = stray
        rig.turns(1)
        rig.before_step = lambda chunks: None
    rig.run()


def bursts(rig: Rig) -> None:
    """More and more at once, then few, then nobody, and again: memory is taken and given back."""
    kv = rig.machine.kv
    assert isinstance(kv, SlotKVManager)
    taken = []
    rig.submit("stays for long", 40)
    for prompts in (["a second"], ["the third one", "x" * 20]):
        rig.turns(3)
        for prompt in prompts:
            rig.submit(prompt, 3)
    rig.submit("twins", 2, n=2, temperature=1.0, seed=6)
    rig.turns(8)
    taken.append(len(kv.places.slots))
    rig.now += 2.0
    rig.turns(2)
    taken.append(len(kv.places.slots))
    rig.run()
    rig.idle_check()
    taken.append(len(kv.places.slots))
    rig.submit("and the next", 2)
    rig.submit("stays for", 2)
    rig.run()
    if not rig.fault.number:
        assert taken == [4, 2, 1] and len(kv.places.slots) == 2


def takes_time(rig: Rig) -> Callable[[object], None]:
    """Steps take a millisecond, of which upkeep may have its share."""

    def step(chunks: object) -> None:
        rig.now += 0.001

    return step


def moved_all_the_time(rig: Rig) -> None:
    """Blocks move after every step, while others come, fork, are cancelled and end."""
    rig.before_step = takes_time(rig)
    rig.submit("ends soon", 2)
    gone = rig.submit("is cancelled", 9)
    rig.submit("several", 5, n=2, temperature=1.0, seed=5)
    rig.turns(3)
    rig.cancel(gone)
    rig.submit("comes late", 4)
    rig.run()


SCENARIOS: list[Scenario] = [
    prompts_are_read, answers_are_resumed,
    mixed_prompts, shared_prefixes, forks, cancels, timeouts, preempted_prompt, preempted_answer, shutdown, rebuilds,
]  # fmt: skip


STATE_CELLS = 2


def make_fake(layout: str, scenario: Scenario) -> Machine:
    if layout == "slots with states":
        return slots_with_states(2 if scenario is shared_prefixes else 3)
    if layout == "slots on demand":
        return slots_on_demand()
    if layout == "slots":
        return slots(2 if scenario is shared_prefixes else 3)
    if layout == "states":
        blocks = 2 * MOST_STATES * STATE_CELLS + {preempted_prompt: 11, preempted_answer: 4}.get(scenario, 40)
        return paged(blocks, FakeBackend(context_length=96, states=STATE_CELLS), LocalShape(state=STATE_CELLS))
    blocks = {preempted_prompt: 11, preempted_answer: 5, shared_prefixes: 16}.get(scenario, 48)
    return paged(blocks, PipelinedFake(context_length=96) if layout == "ahead" else None)


CASES = [(layout, scenario) for layout in ("paged", "slots", "states") for scenario in SCENARIOS] + [
    ("slots", wrong_positions),
    *(("slots on demand", scenario) for scenario in (bursts, shared_prefixes, forks, rebuilds)),
    *(("slots with states", scenario) for scenario in (mixed_prompts, shared_prefixes, forks, cancels, rebuilds)),
]
