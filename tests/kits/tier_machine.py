"""The state machine of a cache with tiers: prompts come, memory is short, servers end and start again."""

from __future__ import annotations

import errno
import shutil
import tempfile
from itertools import count
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cllm.kv.disk.files import ID_BYTES
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.radix import COMMON_SPACE
from disk_kit import FaultyFiles
from tier_kit import BLOCK, Cache

LONG = list(range(100, 100 + 10 * BLOCK + 1))
SPACES = (b"", b"", b"one", COMMON_SPACE)


def prompt(trunk: int, shared: int, branch: int, length: int) -> list[int]:
    """Two of the same trunk have their first `shared` tokens in common."""
    return [(1000 * trunk + i) if i < shared else (5000 + 1000 * branch + i) for i in range(length)]


PROMPTS = st.one_of(
    st.builds(prompt, st.just(0), st.sampled_from([16, 32]), st.integers(0, 1), st.just(40)),
    st.builds(prompt, st.integers(0, 1), st.integers(0, 32), st.integers(0, 1), st.integers(1, 40)),
)


class Tiers(RuleBasedStateMachine):
    """The tokens are the shadow: the fake backend's memory shows for every place which token was computed there."""

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.ids = count()
        self.start()

    def start(self) -> None:
        self.files = FaultyFiles()
        # Files are picked by their names, so these have to be the same when an example is tried again.
        self.files.fresh_id = lambda: next(self.ids).to_bytes(ID_BYTES, "little")  # type: ignore[method-assign]
        self.cache = self.make_cache()

    def make_cache(self) -> Cache:
        return Cache(self.directory, files=self.files, upkeep=UpkeepSettings(compaction="always"))

    @rule(tokens=PROMPTS, space=st.sampled_from(SPACES))
    def ask(self, tokens: list[int], space: bytes) -> None:
        self.cache.ask(tokens, space)

    @rule(tokens=PROMPTS, harm=st.none() | st.tuples(st.integers(0, 100), st.integers(0, 1 << 20)))
    def same_after_restart(self, tokens: list[int], harm: tuple[int, int] | None) -> None:
        self.whole_request(tokens, b"")
        self.restart(True)
        if harm is not None:
            self.damage(*harm, 0)
        self.cache.ask(tokens)
        self.cache.admit()

    @rule(tokens=PROMPTS, space=st.sampled_from(SPACES))
    def whole_request(self, tokens: list[int], space: bytes) -> None:
        self.end_all()
        self.cache.run(tokens, space)

    @rule()
    def admit(self) -> None:
        self.cache.admit()

    @rule(pick=st.integers(0, 100), count=st.integers(1, 40))
    def compute(self, pick: int, count: int) -> None:
        if running := self.cache.running:
            self.cache.compute(running[pick % len(running)], count)

    @rule(pick=st.integers(0, 100))
    def finish(self, pick: int) -> None:
        if running := self.cache.running:
            self.cache.finish(running[pick % len(running)])

    @rule(pick=st.integers(0, 100))
    def preempt(self, pick: int) -> None:
        if running := self.cache.running:
            sequence = running[pick % len(running)]
            self.cache.finish(sequence)
            self.cache.waiting.insert(0, sequence)

    @rule(pick=st.integers(0, 100))
    def give_up(self, pick: int) -> None:
        """Whoever waits, also for the disk, may leave without a word."""
        if waiting := self.cache.waiting:
            del waiting[pick % len(waiting)]

    @rule(budget=st.sampled_from([0.0, 1e-6, 1.0]))
    def maintain(self, budget: float) -> None:
        self.cache.kv.maintain(budget)

    @rule()
    def disk_works(self) -> None:
        self.cache.store.work()

    @rule(seconds=st.sampled_from([0.1, 3.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.cache.clock.now += seconds

    @rule(blocks=st.integers(1, 24))
    def evict(self, blocks: int) -> None:
        self.cache.lose(blocks)

    @rule()
    def memory_is_lost(self) -> None:
        self.cache.forget()

    @rule(after=st.integers(1, 20), error=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def a_call_fails(self, after: int, error: int) -> None:
        self.files.fail_at, self.files.error = self.files.calls + after, error

    @rule(pick=st.integers(0, 100), offset=st.integers(0, 1 << 20), bit=st.integers(0, 7))
    def damage(self, pick: int, offset: int, bit: int) -> None:
        if segments := sorted(self.directory.glob("*/*.kv")):
            path = segments[pick % len(segments)]
            content = bytearray(path.read_bytes())
            content[offset % len(content)] ^= 1 << bit
            path.write_bytes(content)

    def end_all(self) -> None:
        for sequence in list(self.cache.running):
            self.cache.finish(sequence)
        self.cache.waiting.clear()
        self.cache.settle()

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        if orderly:
            self.end_all()
            self.cache.kv.drain(0.0)
            self.cache.store.close()
        self.start()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.assert_sound()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.end_all()
        cache = self.cache
        cache.assert_sound()
        assert cache.kv.loading == 0 and cache.kv.usage().referenced == 0
        shutil.rmtree(self.directory)
