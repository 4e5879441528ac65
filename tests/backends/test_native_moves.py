"""Moving blocks in the native engine's arena, and giving its pages back: every block equals a shadow's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.backends.fake import FakeBackend
from cllm.kv.ops import BlockGeometry, BlockOps, Move
from cllm_bench._limits import measure_copy
from native_kit import build_model
from step_kit import Floats, Part, Rig, random_tokens
from thorough import sampled

BLOCKS = 24
MIB = 1 << 20
Labels = NDArray[np.int64]


class Arena:
    """Blocks whose content is known: block b is filled with the tokens of label b.

    What a block holds is read by a token behind it, in a block of its own: its logits differ if one value does.
    """

    def __init__(self, path: Path, *, threads: int, block_size: int = 16, kv_type: str = "f16") -> None:
        self.rig = Rig(path, threads=threads, blocks=2 * BLOCKS, block_size=block_size, kv_type=kv_type)
        self.labels: Labels = np.arange(BLOCKS)
        self.fill(range(BLOCKS))
        self._known = self.read()

    def fill(self, blocks: Sequence[int]) -> None:
        size, rig = self.rig.block_size, self.rig
        rig.step(*(Part(random_tokens(rig.n_vocab, size, int(b)), 0, [b], wants=False) for b in blocks))
        self.labels[list(blocks)] = list(blocks)

    def read(self) -> Floats:
        size = self.rig.block_size
        return self.rig.step(*(Part([1], size, [block, BLOCKS + block]) for block in range(BLOCKS)))

    def move(self, plan: Sequence[Move]) -> None:
        self.rig.engine.move_blocks(np.array(plan, np.int32).reshape(-1, 3))
        for source, target, count in plan:
            self.labels[target : target + count] = self.labels[source : source + count].copy()

    def check(self) -> None:
        """Blocks with a label below 0 hold anything."""
        known = self.labels >= 0
        assert np.array_equal(self.read()[known], self._known[self.labels[known]])

    def refill(self) -> None:
        self.fill(range(BLOCKS))


@st.composite
def moves(draw: st.DrawFn) -> Move:
    count = draw(st.integers(0, BLOCKS))
    where = st.integers(0, BLOCKS - count)
    return Move(draw(where), draw(where), count)


plans = st.lists(moves(), max_size=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"n_embd": 128, "n_heads": 2, "n_kv_heads": 2, "n_ff": 64, "n_layers": 2, "n_vocab": 61}
    return build_model(**shape).write(tmp_path_factory.mktemp("moves") / "model.gguf")


@pytest.fixture(scope="module", params=[1, 2, 3])
def arena(request: pytest.FixtureRequest, model: Path) -> Arena:
    return Arena(model, threads=request.param)


@pytest.fixture(scope="module")
def large(model: Path) -> Arena:
    """Blocks of 768 KiB, so that each is cut into several pieces, and none begins at a large page."""
    return Arena(model, threads=2, block_size=768)


@settings(max_examples=sampled(150), deadline=None)
@given(plan=plans)
def test_moves_are_as_if_one_after_another(arena: Arena, plan: list[Move]) -> None:
    arena.refill()
    arena.move(plan)
    arena.check()


@settings(max_examples=sampled(10), deadline=None)
@given(plan=plans)
def test_large_blocks_too(large: Arena, plan: list[Move]) -> None:
    large.refill()
    large.move(plan)
    large.check()


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_blocks_that_are_no_whole_number_of_lines(tmp_path: Path, kv_type: str) -> None:
    shape = {"n_embd": 32, "n_heads": 1, "n_kv_heads": 1, "n_ff": 32, "n_layers": 1, "n_vocab": 33}
    arena = Arena(build_model(**shape).write(tmp_path / "odd.gguf"), threads=2, kv_type=kv_type)
    arena.move([Move(1, 0, 20), Move(3, 9, 11), Move(22, 2, 1)])
    arena.check()


@pytest.mark.parametrize("by", [1, 2, 5, 23])
def test_slides_in_both_directions(arena: Arena, by: int) -> None:
    for source, target in ((by, 0), (0, by)):
        arena.refill()
        arena.move([Move(source, target, BLOCKS - by)])
        arena.check()


def test_a_chain_a_swap_and_a_move_to_itself(arena: Arena) -> None:
    arena.refill()
    arena.move([Move(0, 20, 1), Move(1, 0, 1), Move(20, 1, 1), Move(7, 7, 3), Move(1, 2, 1), Move(2, 3, 1)])
    arena.check()


@pytest.mark.parametrize(
    "plan",
    [[(0, 0, -1)], [(-1, 0, 1)], [(0, -1, 1)], [(0, 2 * BLOCKS, 1)], [(2 * BLOCKS - 1, 0, 2)], [(0, 1, 2 * BLOCKS)]],
)
def test_a_plan_with_one_wrong_move_moves_nothing(arena: Arena, plan: list[tuple[int, int, int]]) -> None:
    arena.refill()
    with pytest.raises(ValueError, match="blocks"):
        arena.rig.engine.move_blocks(np.array([(0, 1, 2), *plan], np.int32))
    arena.check()
    with pytest.raises(ValueError, match="rows of 2"):
        arena.rig.engine.move_blocks(np.zeros((1, 2), np.int32))


@settings(deadline=None)
@given(plan=plans)
def test_the_fake_backend_moves_the_same(plan: list[Move]) -> None:
    backend = FakeBackend()
    backend.allocate(BlockGeometry(BLOCKS, 1))
    memory = backend.memory
    arena = np.arange(BLOCKS)
    memory._arena[:, 0] = arena  # type: ignore[union-attr]
    assert isinstance(memory, BlockOps)
    memory.move_blocks(plan)
    for source, target, count in plan:
        arena[target : target + count] = arena[source : source + count].copy()
    assert np.array_equal(memory._arena[:, 0], arena)  # type: ignore[union-attr]


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("large_pages", [False, True])
def test_what_is_given_back_is_gone_and_the_rest_stays(model: Path, large_pages: bool) -> None:
    arena = Arena(model, threads=2, block_size=768)
    rig = arena.rig
    rig.engine.allocate(cells=2 * BLOCKS, block_size=768, **rig.kv_types, large_pages=large_pages)
    engine, block = rig.engine, rig.engine.kv_bytes // (2 * BLOCKS)
    assert engine.resident_bytes() == 0
    arena.refill()
    full = engine.resident_bytes()
    assert full >= BLOCKS * block
    engine.release_pages(8, 9)
    arena.labels[8:17] = -1
    given_back = full - engine.resident_bytes()
    edges = 2 * (2 * MIB if large_pages else 4096)
    assert 9 * block - edges < given_back <= 9 * block
    arena.check()
    engine.prepare_pages(8, 9)
    assert engine.resident_bytes() >= full - edges
    arena.check()
    engine.release_pages(0, 2 * BLOCKS)
    assert engine.resident_bytes() == 0
    arena.refill()
    arena.check()


def test_pages_are_taken_ahead_without_touching_neighbours(large: Arena) -> None:
    large.refill()
    engine = large.rig.engine
    for first, count in ((3, 0), (3, 1), (5, 2), (0, 1)):
        engine.prepare_pages(first, count)
        large.labels[first : first + count] = -1
        large.check()


def test_wrong_ranges_of_pages_are_refused(large: Arena) -> None:
    for first, count in ((-1, 1), (0, -1), (0, 2 * BLOCKS + 1), (2 * BLOCKS + 1, 0), (2**62, 2**62)):
        for change in (large.rig.engine.release_pages, large.rig.engine.prepare_pages):
            with pytest.raises(ValueError, match="blocks from"):
                change(first, count)


def test_the_speed_of_copying_is_measured() -> None:
    assert measure_copy(2, 0.01, 4 * MIB) > 0
    for threads, seconds, size in ((0, 0.1, MIB), (1, 0.0, MIB), (1, 0.1, 0), (8, 0.1, 7)):
        with pytest.raises(ValueError, match="measure_copy"):
            measure_copy(threads, seconds, size)
