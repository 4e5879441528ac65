"""Every call fails in turn while prompts come from disk and go there; see `fault_kit.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cllm.backends.fake import FakeBackend
from cllm.engine.request import Request
from cllm.kv.block_names import fingerprint
from cllm.kv.disk.store import DiskStore
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, BlockOps, SlotGeometry, SlotOps
from cllm.kv.paged.local import LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.tiers.disk_tier import DiskTier
from disk_kit import make_store
from engine_kit import make_request, reference
from fault_kit import Clock, Machine, Rig, fail_every_call
from thorough import exhaustive

KEPT = "a prompt that is on disk from the beginning"
SIZES = {"block_tokens": 4, "block_bytes": 32}


def expected(request: Request, index: int) -> list[int]:
    alone = make_request(request.prompt.tolist(), request.params, max_context=96)
    return reference(alone, index)


def make_kv(backend: FakeBackend, layout: str, clock: Clock) -> PagedKVManager | SlotKVManager:
    geometry = SlotGeometry(3, 96) if layout == "slots" else BlockGeometry(32 if layout == "paged" else 64, 4)
    backend.allocate(geometry)
    ops = backend.ops
    if isinstance(geometry, BlockGeometry):
        assert isinstance(ops, BlockOps)
        local = LocalShape(state=2) if layout == "states" else None
        return PagedKVManager(ops, geometry, local, bytes_per_token=8, clock=clock)
    assert isinstance(ops, SlotOps)
    return SlotKVManager(ops, geometry, bytes_per_token=8, store_bytes=1 << 14, clock=clock)


def machine(layout: str, directory: Path) -> tuple[Machine, DiskStore]:
    backend, clock = FakeBackend(context_length=96, states=2 if layout == "states" else 0), Clock()
    kv = make_kv(backend, layout, clock)
    store = make_store(directory, monotonic=clock)
    tier = DiskTier(store, **SIZES, least_tokens=8, worth_tokens=12)
    kv.use_disk(tier)
    model_store = store.open_model(fingerprint(layout.encode(), {}), **SIZES, about={"model": "fake"})
    store.work()
    tier.attach(model_store)

    def disk_works() -> bool:
        """Also what it does when nobody waits; but that alone is no reason for another turn."""
        waiting = kv.loading > 0
        store.work()
        return waiting

    assert isinstance(kv, KVManager)
    return Machine(backend, kv, expected, clock=clock, idle=disk_works), store


def scenario(rig: Rig) -> None:
    """One waits for the disk, others pass; one leaves while he waits; what is new is kept."""
    rig.submit(KEPT)
    gone = rig.submit(KEPT + " and a bit more")
    rig.turns(1)
    rig.submit("somebody who is in a hurry")
    rig.cancel(gone)
    rig.turns(4)
    rig.run()
    rig.submit(KEPT + " and what others asked")
    rig.run()
    rig.idle_check()


def stopped(rig: Rig) -> None:
    """The server ends while one waits for the disk."""
    rig.submit("somebody who is in a hurry")
    rig.turns(8)
    rig.submit(KEPT)
    rig.turns(1)
    rig.stop(0.05)
    rig.turns(20)


@exhaustive
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("layout", ["paged", "slots", "states"])
@pytest.mark.parametrize("script", [scenario, stopped])
def test_every_call_fails_in_turn(tmp_path: Path, layout: str, script: Callable[[Rig], None]) -> None:
    first, store = machine(layout, tmp_path / "first")
    rig = Rig(first)
    rig.submit(KEPT)
    rig.run()
    rig.idle_check()
    store.work()
    assert store.writer.speed.total > 0
    number = 0

    def make() -> Machine:
        nonlocal number
        number += 1
        shutil.rmtree(tmp_path / str(number - 1), ignore_errors=True)
        shutil.copytree(tmp_path / "first", tmp_path / str(number))
        return machine(layout, tmp_path / str(number))[0]

    reached = Rig(make())
    script(reached)
    assert reached.scheduler.kv.usage().disk.loads + reached.scheduler.kv.loading >= 1
    wanted = {"kv.fetch"} | ({"ops.load"} if layout == "slots" else {"ops.landing", "ops.land"})
    assert script is stopped or wanted <= set(reached.calls.names)
    runs = fail_every_call(make, script, ways=("error", "fatal", "bug"))
    print(f"{layout} {script.__name__}: {runs}")
