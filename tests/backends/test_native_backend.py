"""The native backend on the real model, step by step. Rows are compared bit by bit."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from cllm._native import instruction_sets
from cllm.backends.base import Chunk
from cllm.backends.native import NativeBackend
from cllm.config import load_config
from cllm.errors import BackendError, ConfigError, StepAbortedError
from cllm.kv.ops import BlockBytes, BlockGeometry, BlockOps, Move, SlotGeometry
from cllm.kv.sizing import MIB
from cllm.loading.open_model import _open_native
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from native_backend_kit import BLOCK_SIZE, BLOCKS, chunk, make, row, table
from repository import KITS
from step_of import rows_of

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def backend() -> Iterator[NativeBackend]:
    with make() as opened:
        assert isinstance(opened, NativeBackend)
        opened.allocate(BlockGeometry(BLOCKS, BLOCK_SIZE))
        yield opened


# -- steps ---------------------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_the_chunks_that_want_them(backend: NativeBackend) -> None:
    first = row(backend, chunk(0, 40, table(0, 40)))
    second = row(backend, chunk(0, 7, table(3, 7)))
    third = row(backend, chunk(0, 100, table(4, 100)))
    rows = rows_of(
        backend,
        [
            chunk(0, 100, table(20, 100)),
            chunk(0, 23, table(30, 23), wants=False),
            chunk(0, 7, table(40, 7)),
            chunk(0, 40, table(50, 40)),
        ],
    )
    assert rows.dtype == np.float32 and rows.shape == (3, backend.spec.n_vocab)
    assert np.array_equal(rows, [third, second, first])


def test_a_chunk_gives_the_rows_of_its_last_tokens(backend: NativeBackend) -> None:
    expected = [row(backend, chunk(0, end, table(0, end))) for end in (37, 38, 39, 40)]
    rows = rows_of(backend, [chunk(0, 9, table(30, 9)), chunk(0, 40, table(20, 40), wants=4), chunk(0, 3, [50])])
    assert rows.shape[0] == 6 and np.array_equal(rows[1:5], expected)


@pytest.mark.parametrize("size", [1, 5, 16, 33])
def test_chunks_of_any_size_give_the_same_row(backend: NativeBackend, size: int) -> None:
    whole = row(backend, chunk(0, 70, table(0, 70)))
    blocks = table(60, 70)[::-1]
    for start in range(0, 70, size):
        end = min(start + size, 70)
        rows = rows_of(backend, [chunk(start, end, blocks, wants=end == 70)])
    assert np.array_equal(rows[0], whole)


def test_a_table_may_be_longer_than_its_tokens_need(backend: NativeBackend) -> None:
    short = row(backend, chunk(0, 20, table(0, 20)))
    assert np.array_equal(row(backend, chunk(0, 20, [*table(10, 20), 90, 91, 92])), short)


def test_steps_without_rows_and_without_chunks(backend: NativeBackend) -> None:
    assert rows_of(backend, []).shape == (0, backend.spec.n_vocab)
    assert rows_of(backend, [chunk(0, 5, [0], wants=False)]).shape == (0, backend.spec.n_vocab)


def test_more_rows_than_ever_before(backend: NativeBackend) -> None:
    alone = row(backend, chunk(0, 3, [0]))
    rows = rows_of(backend, [chunk(0, 3, [block]) for block in range(80)])
    assert rows.shape[0] == 80 and all(np.array_equal(one, alone) for one in rows)


def test_what_is_computed_is_kept_and_shared(backend: NativeBackend) -> None:
    shared = table(0, 64)
    row(backend, chunk(0, 64, shared))
    expected = row(backend, chunk(0, 100, table(20, 100)))
    rows = rows_of(backend, [chunk(64, 100, [*shared, *range(50, 53)]), chunk(64, 100, [*shared, *range(60, 63)])])
    assert np.array_equal(rows, [expected, expected])


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_copied_block_goes_on_like_its_source(backend: NativeBackend) -> None:
    row(backend, chunk(0, 24, [5, 6]))
    ops = backend.ops
    assert isinstance(ops, BlockOps)
    ops.copy_blocks([(5, 70), (6, 71)])
    expected = row(backend, chunk(24, 30, [5, 6]))
    row(backend, chunk(0, 24, [5, 6][::-1]))  # the source is written over
    assert np.array_equal(row(backend, chunk(24, 30, [70, 71])), expected)
    ops.copy_blocks([])
    with pytest.raises(BackendError, match="copy"):
        ops.copy_blocks([(0, BLOCKS)])


def test_moved_blocks_go_on_like_their_sources(backend: NativeBackend) -> None:
    expected = row(backend, chunk(0, 50, table(10, 50)))
    ops = backend.ops
    assert isinstance(ops, BlockOps)
    ops.move_blocks([Move(10, 8, 4), Move(8, 40, 2), Move(10, 3, 2)])
    row(backend, chunk(0, 80, table(8, 80)))  # where they were is written over
    assert np.array_equal(row(backend, chunk(49, 50, [40, 41, 3, 4])), expected)
    ops.move_blocks([])


def test_a_block_that_comes_back_goes_on_like_before(backend: NativeBackend) -> None:
    row(backend, chunk(0, 24, [5, 6]))
    assert isinstance(backend.ops, BlockBytes)
    kept = [content.copy() for content in backend.read_blocks([5, 6])]
    assert [content.nbytes for content in kept] == 2 * [backend.kv_bytes // BLOCKS] == 2 * [backend.block_bytes]
    expected = row(backend, chunk(24, 30, [5, 6]))
    row(backend, chunk(0, 24, [6, 5]))  # the source is written over
    places = backend.landing([71, 70])
    for place, content in zip(places, kept, strict=True):
        place[:] = content
    backend.land([71, 70], places)
    assert np.array_equal(row(backend, chunk(24, 30, [71, 70])), expected)
    with pytest.raises(BackendError, match="the native engine has 128"):
        backend.read_blocks([BLOCKS])


def test_whoever_still_writes_to_old_memory_harms_nobody() -> None:
    backend = make()
    backend.allocate(BlockGeometry(BLOCKS, BLOCK_SIZE))
    places = backend.landing([0, 1])
    expected = row(backend, chunk(0, 30, [0, 1]))
    backend.rebuild()
    assert np.array_equal(row(backend, chunk(0, 30, [0, 1])), expected)
    for place in places:
        place[:] = 255
    assert np.array_equal(row(backend, chunk(29, 30, [0, 1])), expected)
    places = backend.landing([0])
    backend.close()
    places[0][:] = 255
    assert places[0].min() == 255


def test_what_the_os_or_the_engine_refuses_is_an_error_of_the_call(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = backend.ops
    assert isinstance(ops, BlockOps)
    for call, words in (
        (lambda: ops.move_blocks([Move(0, BLOCKS - 1, 2)]), "move blocks: 2 blocks from"),
        (lambda: ops.release_pages(BLOCKS, 1), "give memory back: 1 blocks from"),
        (lambda: ops.prepare_pages(-1, 1), "take memory ahead: 1 blocks from"),
    ):
        with pytest.raises(BackendError, match=words) as caught:
            call()
        assert not caught.value.fatal
    for error in (RuntimeError("no more memory"), MemoryError()):
        monkeypatch.setattr(backend, "_engine", Refusing(error))
        for ask in (lambda: ops.release_pages(0, 1), lambda: ops.prepare_pages(0, 1), ops.resident_bytes):
            with pytest.raises(BackendError, match="memory") as caught:
                ask()
            assert not caught.value.fatal


class Refusing:
    """An engine whose system says no."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., None]:
        def refuse(*arguments: object) -> None:
            raise self._error

        return refuse


@pytest.mark.parametrize(("setting", "offered", "asked"), [
    ("auto", True, True), ("auto", False, False), ("always", True, True), ("always", False, False),
    ("never", True, False), ("never", False, False),
])  # fmt: skip
def test_large_pages_are_asked_for_where_they_are_offered_and_wanted(
    setting: str, offered: bool, asked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cllm.loading.open_model.has_huge_pages", lambda: offered)
    made: list[bool] = []
    monkeypatch.setattr("cllm.backends.native.NativeBackend", lambda model, **given: made.append(given["large_pages"]))
    config = load_config(None, {"kv.large_pages": setting}).config
    _open_native(config, GGUFModel.open(resolve("smollm2")), 1)
    assert made == [asked]
    assert ("using its default pages" in caplog.text) == (setting == "always" and not offered)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_the_arena_takes_the_bytes_that_are_planned_and_touches_none(kv_type: str) -> None:
    with make(kv_type_k=kv_type, kv_type_v=kv_type) as backend:
        token = backend.spec.kv_bytes_per_token(kv_type, kv_type)
        before = psutil.Process().memory_info().rss
        backend.allocate(BlockGeometry(8192, BLOCK_SIZE))
        assert backend.kv_bytes == 8192 * BLOCK_SIZE * token
        row(backend, chunk(0, 20, [0, 8191]))
        assert psutil.Process().memory_info().rss - before < 64 * MIB < backend.kv_bytes


def test_a_rebuilt_context_computes_the_same(backend: NativeBackend) -> None:
    ops = backend.ops
    expected = row(backend, chunk(0, 50, table(0, 50)))
    taken = backend.kv_bytes
    backend.rebuild()
    assert backend.kv_bytes == taken
    assert np.array_equal(row(backend, chunk(0, 50, table(7, 50))), expected)
    ops.copy_blocks([(7, 20)])
    assert np.array_equal(row(backend, chunk(16, 50, [20, 8, 9, 10])), expected)


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        Chunk(array("i"), 0, True, blocks=[0]),
        Chunk(array("i", [49_152]), 0, True, blocks=[0]),
        Chunk(array("i", [-1]), 0, True, blocks=[0]),
        Chunk(array("i", [1]), -1, True, blocks=[0]),
        Chunk(array("i", [1]), 0, True, blocks=[]),
        Chunk(array("i", [1]), 0, True, blocks=[BLOCKS]),
        Chunk(array("i", [1]), 0, True, blocks=[-1]),
        Chunk(array("i", range(17)), 0, True, blocks=[0]),
        Chunk(array("i", [1]), 16, True, blocks=[0]),
    ],
    ids=["no tokens", "token too large", "token negative", "before 0", "no blocks", "block too large", "block negative",
         "too few blocks", "past the table"],
)  # fmt: skip
def test_impossible_chunks_are_errors_and_harm_nothing(backend: NativeBackend, wrong: Chunk) -> None:
    expected = row(backend, chunk(0, 20, [30, 31]))
    for chunks in ([wrong], [chunk(0, 20, [40, 41]), wrong]):
        with pytest.raises(BackendError) as caught:
            rows_of(backend, chunks)
        assert not caught.value.fatal and "\n" not in str(caught.value)
    assert np.array_equal(row(backend, chunk(0, 20, [30, 31])), expected)


def test_an_abort_ends_the_step_and_no_other(backend: NativeBackend) -> None:
    expected = row(backend, chunk(0, 500, table(0, 500)))
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.001):
            backend.abort()

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        with pytest.raises(StepAbortedError):
            rows_of(backend, [chunk(0, 500, table(40, 500))])
    finally:
        ended.set()
        other.join()
    backend.abort()  # between steps: nothing to end
    assert np.array_equal(row(backend, chunk(0, 500, table(40, 500))), expected)


STEP_WITHOUT_MEMORY = """
import resource
import numpy as np, psutil
from cllm.errors import BackendError
from array import array
from cllm.backends.base import Chunk
from cllm.kv.sizing import MIB
from cllm.kv.ops import BlockGeometry
from native_backend_kit import chunk, make, row, table
from step_of import rows_of
with make() as backend:
    backend.allocate(BlockGeometry(260, 16))
    many = Chunk(array("i", range(1, 1201)), 0, True, blocks=table(8, 1200))
    expected = row(backend, chunk(0, 16, [0]))
    taken = psutil.Process().memory_info().vms
    allowed = resource.getrlimit(resource.RLIMIT_AS)
    for _ in range(2):
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2 * MIB, allowed[1]))
        try:
            rows_of(backend, [many])
        except BackendError as error:
            assert not error.fatal, error
        else:
            raise AssertionError("there was memory")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, allowed)
        assert np.array_equal(row(backend, chunk(0, 16, [0])), expected)
    assert rows_of(backend, [many]).shape[0] == 1
print("sound")
"""


def test_a_step_that_gets_no_memory_harms_no_other() -> None:
    """In a process of its own, as it was killed when a buffer that could not grow was used all the same."""
    ran = subprocess.run([sys.executable, "-c", STEP_WITHOUT_MEMORY], cwd=KITS, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "sound\n"), ran.stderr


def test_it_needs_blocks_and_memory() -> None:
    with make() as backend:
        with pytest.raises(BackendError, match="allocate"):
            rows_of(backend, [chunk(0, 1, [0])])
        with pytest.raises(BackendError, match="blocks"):
            backend.allocate(SlotGeometry(4, 256))
        with pytest.raises(ConfigError) as caught:
            backend.allocate(BlockGeometry(8, 24))
        assert "\n" not in str(caught.value) and "24" in str(caught.value)


def test_more_than_the_address_space_is_one_line() -> None:
    with make() as backend, pytest.raises(ConfigError, match="kv_cache_max_memory_mb") as caught:
        backend.allocate(BlockGeometry(2**31 - 1, 1024))
    assert "\n" not in str(caught.value)


def test_close_is_final_and_may_be_repeated() -> None:
    backend = make()
    backend.allocate(BlockGeometry(8, 16))
    ops = backend.ops
    backend.close()
    backend.close()
    backend.abort()
    for use in (backend.rebuild, lambda: rows_of(backend, [chunk(0, 1, [0])]), lambda: ops.copy_blocks([(0, 1)])):
        with pytest.raises(BackendError) as caught:
            use()
        assert caught.value.fatal


def test_it_says_what_it_is(backend: NativeBackend) -> None:
    assert backend.describe() == f"native ({instruction_sets()[0]}), 2 threads"
    with make(threads=1, instruction_set="generic") as generic:
        assert generic.describe() == "native (generic), 1 thread"


def test_a_system_that_refuses_the_best_instructions_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make():
        assert not caplog.records
    best = instruction_sets()[0]
    monkeypatch.setattr("cllm.backends.native.backend.instruction_sets", lambda: ["amx9", best])
    with make():
        assert f"this CPU has amx9, but the system does not let this process use it; using {best}" in caplog.text


@pytest.mark.parametrize("name", ["amx", "avx512", "avxvnni"])
def test_an_instruction_set_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.backends.native.backend.instruction_sets", lambda: ["avx2", "generic"])
    with pytest.raises(ConfigError, match=rf"backend\.native\.instruction_set is {name}, .* avx2, generic; use auto"):
        make(instruction_set=name)
