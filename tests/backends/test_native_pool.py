"""Several native engines in one process: one pool of threads, a turn each, and the same bits as alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cllm._native import Engine
from native_kit import build_model
from repository import KITS
from spec_kit import make_spec
from step_kit import Floats, Part, Rig, generate_while_moving, pack, random_tokens


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    small = build_model(n_layers=3, n_heads=2, n_kv_heads=1, n_vocab=71, weight_type="q8_0")
    other = build_model(
        arch="qwen2", n_layers=5, n_embd=256, n_heads=4, n_kv_heads=2, n_ff=512, n_vocab=90, weight_type="q4_k"
    )
    return small.write(folder / "small.gguf"), other.write(folder / "other.gguf")


@pytest.fixture(scope="module")
def alone(paths: tuple[Path, Path]) -> dict[Path, Floats]:
    """What each model answers on one thread, which no pool has a part in."""
    return {path: generate_while_moving(Rig(path, threads=1)) for path in paths}


SCRIPT = """
import os, sys, threading
from pathlib import Path
import numpy as np
from step_kit import Rig
from step_kit import generate_while_moving

def threads():
    return len(os.listdir("/proc/self/task"))
"""


def run_script(text: str, paths: tuple[Path, Path]) -> None:
    """In a process of its own, where no other test has left an engine."""
    if sys.platform != "linux":
        pytest.skip("counts threads in /proc")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(KITS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT + text, *map(str, paths)]
    done = subprocess.run(command, text=True, capture_output=True, env=environment, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def running(*works: Callable[[], None]) -> Iterator[None]:
    """All of them at once, each in a thread of its own; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


# --- how many threads there are ---


COUNTED = """
first, second = map(Path, sys.argv[1:3])
before = threads()
for sizes in ((3, 3), (4, 2), (2, 4), (1, 3), (3, 1, 2, 3)):
    rigs = [Rig((first, second)[index % 2], threads=size) for index, size in enumerate(sizes)]
    assert [rig.engine.threads for rig in rigs] == list(sizes)
    for _ in range(2):
        assert threads() - before == max(sizes) - 1, (sizes, threads(), before)
        for rig in rigs:
            rig.run([1, 2, 3], [0])
    del rigs[0], rig  # the others keep what there is
    assert threads() - before == max(sizes) - 1, (sizes, threads(), before)
    rigs.clear()
    assert threads() == before, sizes
"""


def test_engines_have_the_threads_of_the_largest_together(paths: tuple[Path, Path]) -> None:
    run_script(COUNTED, paths)


# --- at once ---


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 5), (1, 3), (1, 1)])
def test_engines_that_step_at_once_compute_what_they_compute_alone(
    paths: tuple[Path, Path], alone: dict[Path, Floats], sizes: tuple[int, int]
) -> None:
    rigs = [Rig(path, threads=size) for path, size in zip(paths, sizes, strict=True)]

    def work(rig: Rig, expected: Floats) -> Callable[[], None]:
        def run() -> None:
            for _ in range(4):
                assert np.array_equal(generate_while_moving(rig), expected)

        return run

    with running(*(work(rig, alone[path]) for rig, path in zip(rigs, paths, strict=True))):
        pass


def test_more_engines_than_one_machine_has_use_for(paths: tuple[Path, Path], alone: dict[Path, Floats]) -> None:
    rigs = [(path, Rig(path, threads=2 + index)) for index, path in enumerate(paths * 3)]

    def work(path: Path, rig: Rig) -> Callable[[], None]:
        return lambda: np.testing.assert_array_equal(generate_while_moving(rig), alone[path])

    with running(*(work(path, rig) for path, rig in rigs)):
        pass


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)])
def test_engines_come_and_go_while_another_steps(
    paths: tuple[Path, Path], alone: dict[Path, Floats], sizes: tuple[int, int]
) -> None:
    """Whoever goes last, the first or the one that came later, ends the pool, and nobody else does."""
    done = threading.Event()

    def steps() -> None:
        try:
            rig = Rig(paths[0], threads=sizes[0])
            for _ in range(6):
                assert np.array_equal(generate_while_moving(rig), alone[paths[0]])
        finally:
            done.set()

    with running(steps):
        while not done.is_set():
            rig = Rig(paths[1], threads=sizes[1])
            assert np.array_equal(rig.run([1, 2, 3], [0]), rig.run([1, 2, 3], [1]))
            del rig
    assert np.array_equal(generate_while_moving(Rig(paths[1], threads=sizes[1])), alone[paths[1]])


def test_nobody_starves(paths: tuple[Path, Path]) -> None:
    """Beside an engine that takes the next turn as soon as it has ended one, and its steps are the longer ones."""
    busy, other = Rig(paths[1], threads=2), Rig(paths[0], threads=2)
    tokens = random_tokens(busy.n_vocab, 600)
    ended, started = threading.Event(), threading.Event()

    def run() -> None:
        arrays, logits = pack([Part(tokens, 0, busy.table(600))]), np.empty((1, busy.n_vocab), np.float32)
        while not ended.is_set():
            busy.engine.step(*arrays, logits)
            started.set()

    with running(run):
        started.wait()
        for _ in range(20):
            other.run([1, 2, 3], [0])
        ended.set()


# --- what goes wrong ---


def test_a_step_that_fails_leaves_the_others_their_threads(paths: tuple[Path, Path], alone: dict[Path, Floats]) -> None:
    broken, sound = Rig(paths[1], threads=2), Rig(paths[0], threads=2)
    wrong = (*pack([Part([1], 0, [broken.blocks])]), np.empty((1, broken.n_vocab), np.float32))
    with pytest.raises(ValueError, match="block"):
        broken.engine.step(*wrong)
    tensor = np.full(71 * 64 * 4, 255, np.uint8)
    with pytest.raises(ValueError, match="not finite"):
        half_loaded().load(-1, "token_embd", 0, 71, 64, tensor)
    assert np.array_equal(generate_while_moving(sound), alone[paths[0]])
    assert np.array_equal(generate_while_moving(broken), alone[paths[1]])


def half_loaded() -> Engine:
    return Engine(instruction_set="auto", threads=2, spec=make_spec(n_vocab=71))


def test_steps_are_aborted_while_they_wait_and_while_they_run(
    paths: tuple[Path, Path], alone: dict[Path, Floats]
) -> None:
    rigs = [Rig(paths[1], threads=2), Rig(paths[1], threads=2)]
    tokens = random_tokens(rigs[0].n_vocab, 900)
    finished: list[bool] = []

    def work(rig: Rig) -> Callable[[], None]:
        def run() -> None:
            arrays, logits = pack([Part(tokens, 0, rig.table(900))]), np.empty((1, rig.n_vocab), np.float32)
            finished.extend(rig.engine.step(*arrays, logits) for _ in range(5))

        return run

    with running(*map(work, rigs)):
        while len(finished) < 10:
            for rig in rigs:
                rig.engine.abort()
    assert not all(finished)
    for rig in rigs:
        assert np.array_equal(generate_while_moving(rig), alone[paths[1]])


FORKED = """
first, second = (Rig(Path(path), threads=2) for path in sys.argv[1:3])
expected = generate_while_moving(first)
ended = threading.Event()
def keep_busy():
    while not ended.is_set():
        generate_while_moving(second)
busy = threading.Thread(target=keep_busy)
busy.start()
for attempt in range(10):
    child = os.fork()
    if child == 0:  # whoever had the turn is not here, and neither are the threads
        right = np.array_equal(generate_while_moving(first), expected)
        own = Rig(Path(sys.argv[1]), threads=3)
        right = right and threads() == 3 and np.array_equal(generate_while_moving(own), expected)
        del own, first, second
        os._exit(0 if right else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
ended.set()
busy.join()
assert np.array_equal(generate_while_moving(first), expected)
"""


def test_a_forked_process_waits_for_nobody(paths: tuple[Path, Path]) -> None:
    run_script(FORKED, paths)
