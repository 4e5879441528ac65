"""Everything the native engine does, run by test_native_sanitizers.py: `native_exercise.py EXTENSION [--quick]`.

EXTENSION is a build of `cllm._native` with sanitizers, which end the process with a report when something is wrong.
What is checked here is only what a sanitizer does not see: that wrong input is refused, and that logits are numbers.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def use_extension(path: Path) -> None:
    """Make it the one that everybody imports."""
    loader = importlib.machinery.ExtensionFileLoader("cllm._native", str(path))
    spec = importlib.util.spec_from_loader("cllm._native", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cllm._native"] = module
    loader.exec_module(module)


arguments = argparse.ArgumentParser()
arguments.add_argument("extension", type=Path)
arguments.add_argument("--quick", action="store_true", help="fewer models and smaller steps")
options = arguments.parse_args()
use_extension(options.extension)

from cllm._native import RowSampler, instruction_sets, pack_roundtrip  # noqa: E402
from cllm.backends.native.loader import load_engine  # noqa: E402
from cllm.errors import ModelError  # noqa: E402
from cllm.models.gguf import GGUFModel  # noqa: E402
from layers_kit import FEATURES, MODELS, GroupRig, load, random_weights  # noqa: E402
from native_kit import ARCHITECTURES, WEIGHT_TYPES, build_model, random_matrix  # noqa: E402
from recurrence_kit import RECURRENT, StateRig  # noqa: E402
from step_kit import Part, Rig, pack, random_tokens  # noqa: E402

SHAPES: list[dict[str, Any]] = [
    {"n_embd": 256, "n_heads": 4, "n_kv_heads": 4, "n_ff": 256, "n_vocab": 53},
    {"n_embd": 256, "n_heads": 2, "n_kv_heads": 1, "n_ff": 512, "n_vocab": 33, "tied": True},
    {"n_embd": 640, "n_heads": 8, "n_kv_heads": 1, "n_ff": 256, "n_vocab": 41},
    {"n_embd": 288, "n_heads": 3, "n_kv_heads": 3, "n_ff": 96, "n_vocab": 17},
]
KV_TYPES = ("f16", "q8_0", "q4_0")


def models() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every weight type, over architectures and shapes in turn; then odd sizes, which only floats have."""
    for index, weight_type in enumerate(WEIGHT_TYPES):
        arch = ARCHITECTURES[index % 3]
        shape = SHAPES[index % len(SHAPES)]
        yield f"{arch}, {weight_type}", {"arch": arch, "weight_type": weight_type, **shape}
    odd = {"n_embd": 75, "n_heads": 3, "n_kv_heads": 1, "head_dim": 40, "n_ff": 37, "n_vocab": 3}
    for weight_type in ("f32", "f16", "bf16"):
        yield f"odd, {weight_type}", {"weight_type": weight_type, **odd}


def fits(rig_options: dict[str, Any], kv_type: str) -> bool:
    head_dim = rig_options.get("head_dim") or rig_options["n_embd"] // rig_options["n_heads"]
    return kv_type == "f16" or head_dim % 32 == 0


def steps(rig: Rig, scale: int) -> None:
    """Prompts, decoding, both together, a context of several splits, the arena's last block, copies."""
    tokens = random_tokens(rig.n_vocab, 600)
    rig.allocate(blocks=rig.blocks, block_size=rig.block_size, **rig.kv_types)  # uninitialised again
    for count in (1, 2, 5, 12, 13, 16, 17, 33, 100)[:: 1 + 2 * (scale > 1)]:
        rig.step(Part(tokens[:count], 0, rig.table(count)))
    last = rig.blocks - 1
    rig.step(Part(tokens[:3], 0, [last]), Part(tokens[:1], 20, [0, 1]), Part(tokens[:4], 7, [2], wants=False))
    rig.step(*(Part(tokens[i : i + 1], i % 16, [3 + i % 7]) for i in range(33)))
    rig.engine.copy_blocks(np.array([[0, last], [last, 1], [1, 1]], np.int32))
    end = 590 // scale
    long = rig.table(end + 6)
    rig.step(Part(tokens[:end], 0, long, wants=False))
    rig.step(Part(tokens[:1], end, long))
    rig.step(Part(tokens[:5], end + 1, long), Part(tokens[:1], end // 2, long))
    # Windows: sinks of less and of more than a split, prompts and single tokens, those that want logits and others.
    few, many = {"dropped": 4096, "kept": 16}, {"dropped": 1 << 20, "kept": 272 // scale // 16 * 16}
    rig.step(Part(tokens[:40], end - 40, long, wants=False, **few), Part(tokens[:1], end, long, **few))
    rig.step(Part(tokens[:1], end + 1, long, **many))
    rig.step(
        Part(tokens[:20], end - 20, long, **many), Part(tokens[:2], end // 2, long), Part(tokens[:1], 33, long, **few)
    )
    rig.step(*(Part(tokens[i : i + 1], 32 + i, long, **few) for i in range(20)))
    assert rig.engine.step(*pack([]), np.empty((0, rig.n_vocab), np.float32))


def layers(*, quick: bool) -> None:
    """Layers that differ, with windows, in groups of cells: prompts, pieces of them, single tokens."""
    specs = {name: of(33) for name, of in MODELS.items()} | {
        name: FEATURES[name] for name in list(FEATURES)[:: quick * 5 + 1]
    }
    for index, (name, spec) in enumerate(specs.items()):
        weights, tokens = random_weights(spec), random_tokens(spec.n_vocab, 310)
        for instruction_set in instruction_sets():
            quantised = spec.n_embd % 32 == 0 and index % 2 == 0
            engine = load(spec, weights, instruction_set=instruction_set, threads=1 + index % 3, q8=quantised)
            fitting = [kind for kind in KV_TYPES if kind == "f16" or name != "other sizes"]
            for kv_type in fitting if not quick else fitting[index % len(fitting) :][:1]:
                rig = GroupRig(spec, engine, kv_type=kv_type, grouped=index % 4 > 0 or name in MODELS)
                rig.all_logits(tokens[: 60 if quick and name in FEATURES else 310], cuts=[40, 41, 42, 260])
        print(f"layers, {name}: done", flush=True)


def states(*, quick: bool) -> None:
    """Layers that carry a state, alone and several at once; and what would read or write states out of bounds."""
    for index, (name, spec) in enumerate(RECURRENT.items()):
        weights, tokens = random_weights(spec), random_tokens(spec.n_vocab, 60)
        for instruction_set in instruction_sets():
            engine = load(spec, weights, instruction_set=instruction_set, threads=1 + index % 3)
            for kv_type in KV_TYPES if not quick else KV_TYPES[index % 3 :][:1]:
                rig = StateRig(spec, engine, kv_type=kv_type)
                rig.run(tokens, cuts=[1, 30, 31])
                mine, beside = rig.begin(20), rig.begin(20)
                rig.step((mine, tokens[:17], 1), (beside, tokens[:3], 0))
                rig.step((beside, tokens[3:9], 2), (mine, tokens[17:18], 1))
        print(f"states, {name}: done", flush=True)
    rig = StateRig(RECURRENT["qwen35"], load(RECURRENT["qwen35"], random_weights(RECURRENT["qwen35"])), cells=60)
    sequence, room = rig.begin(20), np.empty((1, rig.spec.n_vocab), np.float32)
    rig.step((sequence, [1, 2, 3], 0))
    cells = rig.state()
    arrays = rig.arrays([(sequence, [4], 1)], [cells])
    wrong = [[*cells[:-1], 60], [*cells[:-1], -1], cells[:-1], [*cells, 0], sequence.state, []]
    attempts = [rig.arrays([(sequence, [4], 1)], [each]) for each in wrong]
    attempts += [[arrays[0], arrays[1][:, :-1], arrays[2]], [arrays[0], arrays[1], arrays[2][:-1]]]
    for attempt in attempts:
        try:
            rig.engine.step(*attempt, room)
        except ValueError:
            continue
        raise AssertionError(f"a step was not refused: {attempt}")


def reads(rig: Rig) -> None:
    """Scores of all and of some rows, with more alternatives than there are tokens, and hidden states of all kinds."""
    tokens = random_tokens(rig.n_vocab, 60)
    parts = [
        Part(tokens[:40], 0, rig.table(40)), Part(tokens[:1], 0, [10], wants=0), Part(tokens[:9], 0, [11], wants=2),
        Part(tokens[:20], 16, [12, 13, 14], wants=0), Part(tokens[:1], 5, [15]), Part(tokens[:7], 0, [16], wants=0),
    ]  # fmt: skip
    wants = np.array([(39, 0), (0, 1), (3, 0), (0, 2), (0, 0), (0, 3)], np.int32)
    targets, top = np.array(tokens[:42], np.int32), rig.n_vocab + 3
    scores = np.full(42, np.nan), np.zeros(42, np.int32), np.zeros((42, top), np.int32), np.full((42, top), np.nan)
    logits, hidden = np.full((4, rig.n_vocab), np.nan, np.float32), np.zeros((3, rig.n_embd))
    assert rig.engine.read_prompts(*pack(parts), logits, wants, targets, *scores, hidden)
    assert all(np.isfinite(each).all() for each in (logits, hidden, *scores))
    assert (scores[2][:, rig.n_vocab :] == -1).all() and scores[1].min() >= 1 and scores[1].max() <= rig.n_vocab
    bad = wants.copy()
    bad[1] = 2, 0
    none = np.zeros((0, top), np.int32), np.zeros((0, top))
    for attempt in (
        (bad, targets, *scores, hidden), (-wants, targets, *scores, hidden), (wants + 1, targets, *scores, hidden),
        (wants[:, :1], targets, *scores, hidden), (wants, targets[:-1], *scores, hidden),
        (wants, targets + rig.n_vocab, *scores, hidden), (wants, targets, *scores, hidden[:2]),
        (wants, targets, *scores, hidden[:, 1:]), (wants, targets, scores[0], scores[1], *none, hidden),
    ):  # fmt: skip
        try:
            rig.engine.read_prompts(*pack(parts), logits, *attempt)
        except (ValueError, TypeError):
            continue
        raise AssertionError(f"a step was not refused: {attempt[:2]}")


def moves(rig: Rig) -> None:
    """Blocks moved over each other in every direction, pages given back and taken again."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        counts = rng.integers(0, rig.blocks, 6)
        rows = [(*rng.integers(0, rig.blocks - count, 2), count) for count in counts]
        rig.engine.move_blocks(np.array(rows, np.int32))
    rig.engine.prepare_pages(1, rig.blocks - 2)
    rig.engine.release_pages(1, rig.blocks - 1)
    assert 0 <= rig.engine.resident_bytes() <= rig.engine.kv_bytes + (2 << 20)
    rig.engine.move_blocks(np.array([(0, 1, rig.blocks - 1)], np.int32))


def refusals(rig: Rig) -> None:
    """Each of these would read or write out of bounds if it were believed."""
    wrong = [
        Part([rig.n_vocab], 0, [0]), Part([-1], 0, [0]), Part([1], 0, [rig.blocks]), Part([1], 0, [-1]),
        Part([1], -1, [0]), Part([1], 16, [0]), Part([1] * 17, 0, [0]), Part([], 0, [0]), Part([1], 2**31 - 1, [0]),
        Part([1], 0, [0], dropped=-16), Part([1], 20, [0, 1], dropped=16, kept=8), Part([1], 20, [0, 1], kept=-16),
        Part([1], 20, [0, 1], dropped=16, kept=32), Part([1], 20, [0, 1], dropped=2**31 - 1, kept=16),
    ]  # fmt: skip
    room = np.empty((2, rig.n_vocab), np.float32)
    good = Part([1, 2], 0, [0])
    attempts: list[tuple[Any, ...]] = [(*pack([good, part]), room) for part in wrong]
    tokens, chunks, blocks = pack([good])
    attempts += [
        (tokens[:1], chunks, blocks, room), (tokens, chunks[:, :3], blocks, room), (tokens, chunks, blocks[:0], room),
        (tokens, chunks + np.array([0, 0, 0, 1, 0, 0], np.int32), blocks, room), (tokens, chunks, blocks, room[:0]),
        (tokens, chunks, blocks, room[:, :-1]), (tokens, chunks, blocks, room.T), (tokens, chunks, blocks, None),
        (tokens, chunks * 2**30, blocks, room), (tokens, -chunks, blocks, room),
    ]  # fmt: skip
    for attempt in attempts:
        try:
            rig.engine.step(*attempt)
        except (ValueError, TypeError):
            continue
        raise AssertionError(f"a step was not refused: {attempt[:3]}")
    for pairs in ([[0, rig.blocks]], [[-1, 0]]):
        try:
            rig.engine.copy_blocks(np.array(pairs, np.int32))
        except ValueError:
            continue
        raise AssertionError(f"a copy was not refused: {pairs}")
    for row in ((0, rig.blocks - 1, 2), (-1, 0, 1), (0, 0, -1), (1, 0, rig.blocks)):
        try:
            rig.engine.move_blocks(np.array([row], np.int32))
        except ValueError:
            continue
        raise AssertionError(f"a move was not refused: {row}")


def aborts(rig: Rig) -> None:
    tokens = random_tokens(rig.n_vocab, 400)
    logits = np.empty((1, rig.n_vocab), np.float32)
    arrays = pack([Part(tokens, 0, rig.table(400))])
    for _ in range(5):
        worker = threading.Thread(target=rig.engine.step, args=(*arrays, logits))
        worker.start()
        while worker.is_alive():
            rig.engine.abort()
            worker.join(0.001)
    rig.engine.abort()
    assert rig.engine.step(*arrays, logits)


def damaged_files(folder: Path, count: int) -> None:
    """Files with bytes changed, cut, or put in: refused or loaded, nothing else."""
    rng = np.random.default_rng(5)
    sound = [
        build_model(arch=arch, weight_type=kind, n_embd=256, n_heads=4, n_ff=256, n_layers=1, n_vocab=40)
        .write(folder / f"sound-{arch}.gguf")
        .read_bytes()
        for arch, kind in (("llama", "q4_k"), ("qwen2", "q4_1"), ("qwen3", "f16"))
    ]
    path = folder / "damaged.gguf"
    loaded = 0
    for index in range(count):
        data = bytearray(sound[index % len(sound)])
        header = min(len(data), 3000)
        for _ in range(rng.integers(1, 4)):
            where = int(rng.integers(0, header if rng.random() < 0.7 else len(data)))
            data[where] = rng.integers(0, 256)
        if rng.random() < 0.2:
            del data[int(rng.integers(0, len(data))) :]
        path.write_bytes(data)
        try:
            engine = load_engine(GGUFModel.open(path), threads=2)
        except ModelError:
            continue
        except Exception as error:
            raise AssertionError(f"file {index}: {error!r}") from error
        loaded += 1
        del engine
    print(f"damaged files: {count - loaded} refused, {loaded} loaded", flush=True)


def samples() -> None:
    """Rows that are no whole number of vectors, in memory that ends where they end."""
    rng = np.random.default_rng(6)
    for instruction_set in instruction_sets():
        sampler = RowSampler(instruction_set)
        for width in (1, 2, 7, 31, 33, 255, 257, 4099):
            rows = rng.normal(0, 3, (3, width)).astype(np.float32)
            rows[1, rng.integers(0, width, width // 2)] = -np.inf
            for row in rows:
                assert 0 <= sampler.argmax(row) < width
                peak = float(row.max())
                if not np.isfinite(peak):
                    continue
                for top_k, top_p, min_p in ((0, 1.0, 0.0), (1, 1.0, 0.0), (5, 0.9, 0.0), (0, 0.3, 0.1), (3, 0.5, 0.2)):
                    token = sampler.draw(row, peak, 0.999, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
                    assert 0 <= token < width
                sampler.log_total(row, peak)
                for count in (1, width // 2 + 1, width, width + 3):
                    sampler.largest(row, count)


def packings() -> None:
    for weight_type, kind in WEIGHT_TYPES.items():
        for rows, cols in ((1, 256), (15, 512), (17, 256), (40, 768)):
            tensor = random_matrix(np.random.default_rng(rows), rows, cols, kind, 1.0)
            found = pack_roundtrip(int(kind), rows, cols, tensor.raw.ravel())
            assert found.shape == (rows, cols), weight_type


def lives(path: Path) -> None:
    """Engines that come and go, used or not."""
    for threads in (1, 2, 4):
        rig = Rig(path, threads=threads, blocks=4)
        rig.step(Part([1, 2, 3], 0, [0]))
        for blocks in (1, 9, 2):
            rig.allocate(blocks=blocks)
            rig.step(Part([1, 2, 3], 0, [blocks - 1]))
        load_engine(GGUFModel.open(path), threads=threads)


def together(paths: list[Path]) -> None:
    """Engines of several sizes step, move, load and end at once: one pool, larger and smaller teams in turn."""

    def live(path: Path, threads: int) -> None:
        for _ in range(2):
            rig = Rig(path, threads=threads, blocks=40)
            tokens = random_tokens(rig.n_vocab, 120)
            for at in range(100, 120):
                rig.step(Part(tokens[:at], 0, rig.table(at)))
                rig.step(*(Part(tokens[i : i + 1], i, rig.table(at)) for i in range(3)))
            moves(rig)

    with ThreadPoolExecutor(len(paths)) as workers:
        for done in [workers.submit(live, path, 1 + index) for index, path in enumerate(paths)]:
            done.result()


def main() -> None:
    quick = options.quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, (label, shape) in enumerate(models()):
            if quick and index % 3:
                continue
            path = build_model(**shape).write(folder / "model.gguf")
            for instruction_set in instruction_sets():
                kv_types = [kind for kind in KV_TYPES if fits(shape, kind)]
                if quick or index % 4:
                    kv_types = kv_types[index % len(kv_types) :][:1]
                for kv_type in kv_types:
                    rig = Rig(path, instruction_set=instruction_set, threads=1 + index % 4, blocks=72, kv_type=kv_type)
                    reads(rig)
                    steps(rig, 1 if instruction_set != "generic" and not quick else 2)
                moves(rig)
                refusals(rig)
            print(f"{label}: done", flush=True)
        path = build_model(n_layers=20, weight_type="q8_0").write(folder / "deep.gguf")
        aborts(Rig(path, threads=3))
        lives(path)
        together([path, folder / "model.gguf"] * 2)
        layers(quick=quick)
        states(quick=quick)
        samples()
        packings()
        damaged_files(folder, 60 if quick else 600)
    print("all exercises done", flush=True)


main()
