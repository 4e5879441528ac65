"""The native engine when it is used wrongly, interrupted, or watched for what it allocates."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm._native import Engine, instruction_sets
from cllm.models.spec import FeedForwardSpec, Rotation, Temperature
from native_kit import WEIGHT_TYPES, build_model
from repository import DATA, KITS
from spec_kit import make_spec
from step_kit import Floats, Part, Rig, pack, random_tokens

N_VOCAB, BLOCKS = 71, 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_model(n_layers=12, n_heads=2, n_kv_heads=1, n_vocab=N_VOCAB, weight_type="q8_0")
    return model.write(tmp_path_factory.mktemp("models") / "model.gguf")


@pytest.fixture(scope="module")
def module_rig(path: Path) -> Rig:
    return Rig(path, blocks=BLOCKS)


@pytest.fixture
def rig(module_rig: Rig) -> Iterator[Rig]:
    """After whatever a test does, the engine computes what it computed before."""
    tokens = random_tokens(N_VOCAB, 40, seed=1)
    module_rig.allocate(blocks=BLOCKS)
    before = module_rig.run(tokens, [0, 1, 2])
    module_rig.allocate(blocks=BLOCKS)
    yield module_rig
    assert np.array_equal(module_rig.run(tokens, [0, 1, 2]), before)


def logits_for(rows: int) -> Floats:
    return np.empty((rows, N_VOCAB), np.float32)


# --- wrong arguments of a step ---

GOOD = Part([3, 4, 5], 0, [1])

WRONG_PARTS = {
    "a token beyond the vocabulary": Part([3, N_VOCAB, 5], 0, [1]),
    "a negative token": Part([3, -1, 5], 0, [1]),
    "the largest token": Part([2**31 - 1], 0, [1]),
    "a block beyond the arena": Part([3], 0, [BLOCKS]),
    "a negative block": Part([3], 0, [-1]),
    "a wrong block that is not reached": Part([3], 0, [1, BLOCKS]),
    "a negative position": Part([3], -1, [1]),
    "no tokens": Part([], 0, [1]),
    "no blocks": Part([3], 0, []),
    "a token more than its blocks hold": Part([3] * 17, 0, [1]),
    "tokens dropped, less than none": Part([3], 16, [1, 2], dropped=-1),
    "tokens kept, less than none": Part([3], 16, [1, 2], dropped=16, kept=-16),
    "kept tokens that are no whole tiles": Part([3], 20, [1, 2], dropped=16, kept=8),
    "more kept than computed": Part([3], 16, [1, 2, 3], dropped=16, kept=32),
    "a position beyond all numbers": Part([3], 16, [1, 2], dropped=2**31 - 17, kept=16),
    "a position after its blocks": Part([3], 16, [1]),
    "a position far beyond": Part([3], 2**31 - 1, [1]),
    "more tokens than fit after its position": Part([3, 4], 31, [1, 2]),
    "fewer rows than none": Part([3, 4], 0, [1], wants=-1),
    "more rows than tokens": Part([3, 4], 0, [1], wants=3),
}


@pytest.mark.parametrize("wrong", WRONG_PARTS.values(), ids=WRONG_PARTS)
@pytest.mark.parametrize("place", ["alone", "first", "last"])
def test_a_wrong_part_is_refused(rig: Rig, wrong: Part, place: str) -> None:
    parts = {"alone": [wrong], "first": [wrong, GOOD], "last": [GOOD, wrong]}[place]
    with pytest.raises(ValueError, match=r"\w"):
        rig.engine.step(*pack(parts), logits_for(4))


def changed(index: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], None]:
    def apply(arrays: list[Any]) -> None:
        arrays[index] = change(arrays[index])

    return apply


WRONG_ARRAYS: dict[str, Callable[[list[Any]], None]] = {
    "a token too many": changed(0, lambda tokens: np.append(tokens, np.int32(1))),
    "a token too few": changed(0, lambda tokens: tokens[:-1].copy()),
    "tokens of two dimensions": changed(0, lambda tokens: tokens.reshape(1, -1)),
    "tokens that are text": changed(0, lambda tokens: "abc"),
    "chunks of three columns": changed(1, lambda chunks: chunks[:, :3].copy()),
    "chunks of one dimension": changed(1, lambda chunks: chunks.ravel()),
    "a chunk with a negative count": changed(1, lambda chunks: chunks * np.array([-1, 1, 1, 1, 1, 1], np.int32)),
    "a chunk that claims more blocks": changed(1, lambda chunks: chunks + np.array([0, 0, 0, 1, 0, 0], np.int32)),
    "a chunk that claims the most blocks": changed(
        1, lambda chunks: chunks + np.array([0, 0, 0, 2**31 - 2, 0, 0], np.int32)
    ),
    "a block too many": changed(2, lambda blocks: np.append(blocks, np.int32(1))),
    "no blocks": changed(2, lambda blocks: blocks[:0].copy()),
    "no row of logits": changed(3, lambda logits: logits[:0].copy()),
    "too narrow logits": changed(3, lambda logits: logits[:, :-1].copy()),
    "too wide logits": changed(3, lambda logits: np.empty((1, N_VOCAB + 1), np.float32)),
    "logits of one dimension": changed(3, lambda logits: logits[0]),
    "logits of another type": changed(3, lambda logits: logits.astype(np.float64)),
    "logits with gaps": changed(3, lambda logits: np.empty((2, 2 * N_VOCAB), np.float32)[:, ::2]),
    "logits by columns": changed(3, lambda logits: np.empty((2, N_VOCAB), np.float32, order="F")),
    "logits that cannot be written": changed(3, lambda logits: np.broadcast_to(np.float32(0), (1, N_VOCAB))),
    "no logits": changed(3, lambda logits: None),
}


@pytest.mark.parametrize("spoil", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_wrong_arrays_are_refused(rig: Rig, spoil: Callable[[list[Any]], None]) -> None:
    """By value, or, if they are not even arrays of the right kind, by type."""
    arrays: list[Any] = [*pack([GOOD]), logits_for(1)]
    spoil(arrays)
    with pytest.raises((ValueError, TypeError)):
        rig.engine.step(*arrays)


def test_nothing_but_the_wanted_rows_is_written(rig: Rig) -> None:
    room = np.full((4, N_VOCAB), 7, np.float32)
    assert rig.engine.step(*pack([GOOD, Part([9], 0, [2], wants=False)]), room[1:3])
    assert (room[[0, 2, 3]] == 7).all()
    assert not (room[1] == 7).any()


def test_inputs_with_gaps_are_read_right_or_refused(rig: Rig) -> None:
    tokens, chunks, blocks = pack([Part(random_tokens(N_VOCAB, 20, seed=2), 0, [3, 5])])
    expected, found = logits_for(1), logits_for(1)
    rig.engine.step(tokens, chunks, blocks, expected)
    spread = np.zeros(40, np.int32)
    spread[::2] = tokens
    try:
        rig.engine.step(spread[::2], np.asfortranarray(chunks), blocks, found)
    except (TypeError, ValueError):
        return
    assert np.array_equal(found, expected)


def test_a_step_of_nothing(rig: Rig) -> None:
    assert rig.engine.step(*pack([]), logits_for(0))


@pytest.mark.parametrize("pairs", [[[0, BLOCKS]], [[BLOCKS, 0]], [[-1, 0]], [[0, 1, 2]], [[0, 1], [2, -(2**31)]]])
def test_wrong_copies_are_refused(rig: Rig, pairs: list[list[int]]) -> None:
    rig.run([1, 2, 3], [0])
    with pytest.raises(ValueError, match=r"\w"):
        rig.engine.copy_blocks(np.array(pairs, np.int32))


def test_copies_of_nothing_and_onto_itself(rig: Rig) -> None:
    tokens = random_tokens(N_VOCAB, 20, seed=3)
    before = rig.run(tokens, [4, 2])
    rig.engine.copy_blocks(np.empty((0, 2), np.int32))
    rig.engine.copy_blocks(np.array([[4, 4], [2, 2]], np.int32))
    assert np.array_equal(rig.step(Part(tokens[-1:], 19, [4, 2]))[0], before)


# --- the engine's life ---

NUMBERS: dict[str, Any] = {
    "instruction_set": "auto", "threads": 1, "n_layers": 1, "n_embd": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32,
    "n_ff": 64, "n_vocab": 50, "rms_eps": 1e-5, "rope_base": 10000.0, "rope_dims": 32, "rope_scale": 1.0,
    "rope_divisors": None,
}  # fmt: skip


def engine_of(**changes: Any) -> Engine:
    numbers = NUMBERS | changes
    base, dims, scale, divisors = (numbers.pop(f"rope_{name}") for name in ("base", "dims", "scale", "divisors"))
    rope = Rotation(base, dims, True, scale, divisors)
    on = {name: numbers.pop(name) for name in ("instruction_set", "threads")}
    return Engine(**on, spec=make_spec(**numbers, rotation=rope))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("instruction_set", "sse9"), ("threads", 0), ("threads", -1), ("threads", 10**6), ("n_layers", 0),
        ("n_layers", -1), ("n_embd", 0), ("n_heads", 0), ("n_heads", 3 * 10**8), ("n_kv_heads", 0), ("n_kv_heads", 4),
        ("head_dim", 0),
        ("head_dim", 33), ("head_dim", 1 << 20), ("n_ff", -5), ("n_vocab", 0), ("n_vocab", 2**31 - 1),
        ("rms_eps", float("nan")), ("rms_eps", -1.0), ("rope_base", 0.0), ("rope_base", float("inf")),
        ("rope_dims", 0), ("rope_dims", 31), ("rope_dims", 64), ("rope_scale", float("nan")), ("rope_scale", 0.0),
        ("rope_divisors", (1.0,) * 15), ("rope_divisors", (*[1.0] * 15, 0.0)),
        ("rope_divisors", (*[1.0] * 15, float("nan"))),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        engine_of(**{name: value})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_dim_v": 64}, "64 dimensions"), ({"qk_norm": "all"}, "qk_norm all"), ({"window": -1}, "window"),
        ({"softcap": -1.0}, "softcap"), ({"scale": 0.0}, "scale"), ({"v_is_k": True, "qkv_bias": True}, "v_is_k"),
        ({"v_is_k": True, "qk_norm": "row"}, "v_is_k"), ({"temperature": Temperature(0.1, 0)}, "temperature"),
        ({"kv_from": 1}, "kv_from"), ({"kv_from": -1}, "kv_from"), ({"kv_from": 0, "n_kv_heads": 2}, "layer 0"),
    ],
)  # fmt: skip
def test_impossible_attention_is_refused(changes: dict[str, Any], why: str) -> None:
    spec = make_spec(n_layers=2)
    other = replace(spec.layers[0], attention=replace(spec.layers[0].attention, **changes))
    with pytest.raises(ValueError, match=why):
        Engine(instruction_set="auto", threads=1, spec=replace(spec, layers=(spec.layers[0], other)))


@pytest.mark.parametrize(
    "changes",
    [
        {"feed_forward": FeedForwardSpec(64, "relu")}, {"feed_forward": FeedForwardSpec()}, {"norms": "none"},
    ],
)  # fmt: skip
def test_impossible_layers_are_refused(changes: dict[str, Any]) -> None:
    spec = make_spec()
    with pytest.raises(ValueError, match=r"relu|n_ff|norms"):
        Engine(instruction_set="auto", threads=1, spec=replace(spec, layers=(replace(spec.layers[0], **changes),)))


def test_nothing_works_out_of_order(path: Path) -> None:
    engine = engine_of()
    step = (*pack([GOOD]), np.empty((1, 50), np.float32))
    with pytest.raises(ValueError, match="missing"):
        engine.seal()
    with pytest.raises(ValueError, match="sealed"):
        engine.step(*step)
    engine.allocate(cells=2, block_size=16, type_k="f16", type_v="f16")
    with pytest.raises(ValueError, match="sealed"):
        engine.step(*step)
    rig = Rig(path)
    with pytest.raises(ValueError, match="sealed"):
        rig.engine.load(-1, "output_norm", 0, 1, 64, np.zeros(256, np.uint8))
    assert Rig(path).engine.weight_bytes > 0


@pytest.mark.parametrize(
    ("layer", "role", "kind", "rows", "cols", "size"),
    [
        (-1, "output_norm", 0, 1, 64, 255),
        (-1, "output_norm", 0, 1, 63, 252),
        (-1, "output_norm", 0, 2, 64, 512),
        (-1, "nonsense", 0, 1, 64, 256),
        (0, "token_embd", 0, 50, 64, 50 * 256),
        (1, "attn_norm", 0, 1, 64, 256),
        (-2, "attn_norm", 0, 1, 64, 256),
        (0, "attn_norm", 99, 1, 64, 256),
        (0, "attn_norm", -1, 1, 64, 256),
        (0, "attn_q", 8, 64, 63, 64 * 68),
        (0, "attn_q", 12, 64, 64, 64 * 36),
        (0, "attn_q", 0, -64, -64, 64 * 256),
        (0, "attn_q", 0, 2**62, 4, 0),
        (0, "attn_q", 0, 0, 0, 0),
    ],
)
def test_tensors_that_do_not_fit_are_refused(layer: int, role: str, kind: int, rows: int, cols: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        engine_of().load(layer, role, kind, rows, cols, np.zeros(size, np.uint8))


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_values_that_are_no_numbers_are_refused(kind: str) -> None:
    """0xff everywhere is NaN in every float format, and in the scale of every quantised one."""
    model = build_model(weight_type=kind, n_embd=256, n_vocab=50)
    tensor = model.tensors["token_embd.weight"]
    engine = engine_of(n_embd=256)
    with pytest.raises(ValueError, match="not finite"):
        engine.load(-1, "token_embd", int(tensor.type), 50, 256, np.full(tensor.raw.size, 255, np.uint8))
    engine.load(-1, "token_embd", int(tensor.type), 50, 256, tensor.raw.ravel())


@pytest.mark.parametrize(
    "arena",
    [
        {"cells": 0}, {"cells": -1}, {"cells": 2**40}, {"block_size": 0}, {"block_size": 8}, {"block_size": -16},
        {"block_size": 2**31 - 16}, {"type_k": "q5_0"}, {"type_v": ""},
    ],
)  # fmt: skip
def test_impossible_arenas_are_refused(rig: Rig, arena: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"cells": BLOCKS, "block_size": 16, "type_k": "f16", "type_v": "f16"}
    with pytest.raises((ValueError, MemoryError)):
        rig.engine.allocate(**(sound | arena))
    rig.allocate(blocks=BLOCKS)


def test_an_arena_too_large_for_the_machine(rig: Rig) -> None:
    """Either nothing can be reserved, or no memory is taken until it is used; never a crash."""
    try:
        rig.allocate(blocks=2**31 - 1)
    except MemoryError:
        with pytest.raises(ValueError, match="allocated"):
            rig.engine.step(*pack([GOOD]), logits_for(1))
    else:
        rig.run([1, 2, 3], [2**31 - 2])
    rig.allocate(blocks=BLOCKS)


def test_a_new_arena_is_empty(rig: Rig) -> None:
    """Nothing of the old one is to be seen: what was never written counts as zero."""
    tokens = random_tokens(N_VOCAB, 17, seed=4)
    last = Part(tokens[-1:], 16, [6, 3])
    rig.run(tokens, [6, 3])
    used = rig.step(last)
    rig.allocate(blocks=BLOCKS)
    fresh = rig.step(last)
    rig.allocate(blocks=BLOCKS)
    assert np.array_equal(rig.step(last), fresh)
    assert not np.array_equal(fresh, used)


@pytest.mark.parametrize("name", instruction_sets())
def test_numbers_are_as_asked(path: Path, name: str) -> None:
    rig = Rig(path, instruction_set=name, threads=3, blocks=10, block_size=32, kv_type="q8_0")
    assert (rig.engine.instruction_set, rig.engine.threads) == (name, 3)
    tokens, layers, values = 10 * 32, 12, 2 * 32
    assert rig.engine.kv_bytes == tokens * layers * values * 34 // 32
    with pytest.raises(ValueError, match="head_dim is 80"):
        odd = build_model(n_embd=80, n_heads=1, n_kv_heads=1).write(path.with_name("odd.gguf"))
        Rig(odd, instruction_set=name, kv_type="q4_0")


# --- aborting ---


def abort_until_it_ends(rig: Rig, parts: list[Part]) -> bool:
    """Run the step in another thread and abort it, again and again, so that no luck with time is needed.

    Returns what the step returned.
    """
    returned: list[bool] = []
    logits = logits_for(sum(part.wants for part in parts))
    started = threading.Event()

    def run() -> None:
        arrays = pack(parts)
        started.set()
        returned.append(rig.engine.step(*arrays, logits))

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    while thread.is_alive():
        rig.engine.abort()
        thread.join(0.0005)
    return returned[0]


def test_an_aborted_step_says_so_and_can_be_repeated(module_rig: Rig) -> None:
    module_rig.allocate(blocks=256)
    tokens = random_tokens(N_VOCAB, 4000, seed=5)
    blocks = module_rig.table(4000)
    whole = module_rig.run(tokens, blocks)
    module_rig.allocate(blocks=256)
    for _ in range(3):
        assert abort_until_it_ends(module_rig, [Part(tokens, 0, blocks)]) is False
    assert np.array_equal(module_rig.run(tokens, blocks), whole)


def test_an_abort_without_a_step_does_nothing(rig: Rig) -> None:
    for _ in range(3):
        rig.engine.abort()
        rig.run([1, 2, 3], [0])


# --- allocation ---


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and glibc")
def test_a_step_allocates_nothing_after_warm_up(path: Path, tmp_path: Path) -> None:
    """A library that is preloaded counts the calls; native_allocations.py does the steps."""
    library = tmp_path / "count.so"
    source = DATA / "count_allocations.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    command = [sys.executable, str(KITS / "native_allocations.py"), str(path), str(library)]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, text=True, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
