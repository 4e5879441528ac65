"""Random use of two stores that share a directory, against a shadow: nothing wrong is loaded, no limit is passed."""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from itertools import count
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cllm.kv.disk.directory import Directory
from cllm.kv.disk.files import ID_BYTES, Files
from cllm.kv.disk.store import DiskStore, ModelStore
from disk_kit import (
    BLOCK_TOKENS,
    FaultyFiles,
    content,
    load,
    make_store,
    names_of,
    open_model_store,
    put,
    segments,
    total_bytes,
)
from thorough import sampled

LIMIT = 70_000
TRUNKS = [[number] * (40 * BLOCK_TOKENS) for number in range(3)]
SIDES = st.integers(0, 1)
LENGTHS = st.integers(1, 30)


def prompt(trunk: int, shared: int, branch: int, length: int) -> list[int]:
    """Begins like others, then goes its own way."""
    blocks = min(shared, length)
    return TRUNKS[trunk][: blocks * BLOCK_TOKENS] + [100 + branch] * ((length - blocks) * BLOCK_TOKENS)


PROMPTS = st.builds(prompt, st.integers(0, 2), st.integers(0, 20), st.integers(0, 2), LENGTHS)


class TwoStores(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.now = 0.0
        self.wall = 10**18
        self.shadow: dict[bytes, bytes] = {}
        """All that was ever handed over, and so all that may ever be loaded."""
        self.files = [FaultyFiles(), FaultyFiles()]
        ids = count(1)
        for files in self.files:
            files.fresh_id = lambda: next(ids).to_bytes(ID_BYTES, "little")  # type: ignore[method-assign]
        self.trouble = False
        """A byte was damaged, or a call has failed."""
        self.stores: list[DiskStore] = []
        self.model_stores: list[ModelStore] = []
        for side in range(2):
            self.stores.append(self.new_store(side))
            self.model_stores.append(open_model_store(self.stores[side]))

    def new_store(self, side: int) -> DiskStore:
        return make_store(
            self.directory,
            limit=LIMIT,
            files=self.files[side],
            monotonic=lambda: self.now,
            clock_ns=lambda: self.wall,
            queue_bytes=30_000,
        )

    @rule(side=SIDES, tokens=PROMPTS, at_once=st.booleans())
    def hand_over(self, side: int, tokens: list[int], at_once: bool) -> None:
        model_store = self.model_stores[side]
        names = names_of(model_store, tokens)
        self.shadow.update({name: content(name) for name in names})
        assert put(model_store, names) <= len(names)
        if at_once:
            self.stores[side].work()

    @rule(side=SIDES, tokens=PROMPTS)
    def load_what_is_there(self, side: int, tokens: list[int]) -> None:
        names = names_of(self.model_stores[side], tokens)
        held = self.model_stores[side].held(names)
        assert all(name in self.shadow for name in names[:held])
        if held:
            load(self.stores[side], self.model_stores[side], names[:held])

    @rule(side=SIDES, tokens=PROMPTS)
    def written_is_loaded(self, side: int, tokens: list[int]) -> None:
        """What one store has just written and nobody else touched can be loaded there."""
        model_store, store = self.model_stores[side], self.stores[side]
        store.work()
        names = names_of(model_store, tokens)
        self.shadow.update({name: content(name) for name in names})
        put(model_store, names)
        store.work()
        held = model_store.held(names)
        loaded = load(store, model_store, names[:held])
        if not self.trouble:  # the other store may have cut or removed what this one still thought was there
            assert loaded == held or store.details()["counts"].get("damaged", 0) == 0

    @rule(side=SIDES, tokens=PROMPTS, rest=st.integers(0, 3), size=st.integers(1, 9000))
    def save_sequence(self, side: int, tokens: list[int], rest: int, size: int) -> None:
        tokens = tokens + [7] * rest
        data = array("i", tokens).tobytes()
        key = b"sequence" + data
        payload = self.shadow.setdefault(key, content(data, size))
        self.model_stores[side].put_sequence(names_of(self.model_stores[side], tokens), data, payload)

    @rule(side=SIDES, tokens=PROMPTS, rest=st.integers(0, 3))
    def load_sequence(self, side: int, tokens: list[int], rest: int) -> None:
        tokens = tokens + [7] * rest
        data = array("i", tokens).tobytes()
        found = self.model_stores[side].find_sequence(names_of(self.model_stores[side], tokens), data)
        if found is None:
            return
        buffer = np.zeros(found.nbytes, np.uint8)
        ticket = self.model_stores[side].load_sequence(found, buffer)
        self.stores[side].work()
        if ticket.complete and found.matched == found.tokens:
            assert buffer.tobytes() == self.shadow[b"sequence" + data[: 4 * found.tokens]]

    @rule(side=SIDES)
    def work(self, side: int) -> None:
        self.stores[side].work()

    @rule(side=SIDES, orderly=st.booleans())
    def reopen(self, side: int, orderly: bool) -> None:
        if orderly:
            self.stores[side].close()
        self.stores[side] = self.new_store(side)
        self.model_stores[side] = open_model_store(self.stores[side])

    @rule(side=SIDES)
    def look(self, side: int) -> None:
        self.now += 3
        self.model_stores[side].look()
        self.stores[side].work()

    @rule(seconds=st.integers(-(10**6), 10**6))
    def clock_is_set(self, seconds: int) -> None:
        self.wall = max(1, self.wall + seconds * 10**9)

    @rule(side=SIDES, after=st.integers(1, 30))
    def a_call_fails(self, side: int, after: int) -> None:
        self.files[side].fail_at = self.files[side].calls + after
        self.trouble = True
        self.now += 2000  # whatever went wrong before is tried again

    def pick(self, number: int) -> Path | None:
        paths = segments(self.directory)
        return paths[number % len(paths)] if paths else None

    @rule(pick=st.integers(0, 100), offset=st.integers(0, 20_000), bit=st.integers(0, 7))
    def damage(self, pick: int, offset: int, bit: int) -> None:
        path = self.pick(pick)
        data = bytearray(path.read_bytes() if path is not None else b"")
        if path is not None and data:
            data[offset % len(data)] ^= 1 << bit
            times = path.stat()
            path.write_bytes(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            self.trouble = True

    @rule(pick=st.integers(0, 100))
    def remove(self, pick: int) -> None:
        if (path := self.pick(pick)) is not None:
            path.unlink()

    @rule(pick=st.integers(0, 100), size=st.integers(1, 9000))
    def half_written(self, pick: int, size: int) -> None:
        """Somebody died while he appended. What he was about to write is in the tally: that is raised first."""
        path = self.pick(pick)
        if path is None or total_bytes(self.directory) + size > LIMIT:
            return
        with Directory(str(self.directory), Files()).locked() as tally:
            if (known := tally.read()) is not None:
                tally.write(known + size)
        os.truncate(path, path.stat().st_size + size)

    @invariant()
    def the_limit_holds(self) -> None:
        if hasattr(self, "directory"):
            assert total_bytes(self.directory) <= LIMIT
            for store in self.stores:
                assert 0 <= store.writer.queued_bytes <= 30_000

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            for files in self.files:
                files.fail_at = None
            self.now += 10_000
            store = self.new_store(0)
            model_store = open_model_store(store)
            names = names_of(model_store, prompt(0, 12, 1, 20))
            for _ in range(2):
                load(store, model_store, names)
                put(model_store, names)
                store.work()
            assert load(store, model_store, names) == 20
            shutil.rmtree(self.directory)


TestTwoStores = TwoStores.TestCase
TestTwoStores.settings = settings(
    max_examples=sampled(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
