"""A row's logits are the same bits whatever else is in the step, however its prompt was cut, wherever its blocks lie,
on any number of threads.

The reference is always the same: the sequence alone, in one chunk, in blocks one after another, on one thread, in an
arena that holds nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm._native import instruction_sets
from cllm.models.registry import resolve
from native_kit import build_model, float_tensor
from step_kit import FLOATS, KV_TYPES, TINY, Floats, Part, Rig, assert_same, pack, quick, random_tokens, spans
from thorough import exhaustive, only_exhaustive, slow, some

BLOCKS = 192
THREADS = (1, 2, 3)


@dataclass(frozen=True)
class Case:
    """A model on one instruction set with one K/V type. Rigs on all thread counts are made once and kept."""

    model: str
    instruction_set: str
    kv_type: str
    paths: dict[str, Path] = field(repr=False, compare=False, hash=False)

    def rig(self, threads: int = 2, **arena: Any) -> Rig:
        """With an empty arena."""
        rig = load(self.paths[self.model], self.instruction_set, threads)
        usual: dict[str, Any] = {"blocks": BLOCKS, "type_k": self.kv_type, "type_v": self.kv_type}
        rig.allocate(**(usual | arena))
        return rig

    def tokens(self, count: int, seed: int) -> list[int]:
        return random_tokens(load(self.paths[self.model], self.instruction_set, 1).n_vocab, count, seed)

    def alone(self, tokens: Sequence[int]) -> Floats:
        """What all others must equal."""
        rig = self.rig(threads=1)
        return rig.run(tokens, rig.table(len(tokens)))


@cache
def load(path: Path, instruction_set: str, threads: int) -> Rig:
    return Rig(path, instruction_set=instruction_set, threads=threads)


def cases() -> list[Any]:
    best, *others = instruction_sets()
    found = [("tiny", name, kind) for name in (best, *others) for kind in KV_TYPES]
    found += [("floats", name, "f16") for name in (best, *others)]
    # The generic kernels need a tenth of a second for a token of the real model: they get one test of their own.
    real = [("smollm2", best, kind) for kind in KV_TYPES if best != "generic"]
    real += [("smollm2", name, "q8_0") for name in others if name != "generic"]
    # Types of K/V are the tiny model's matter: of the real one, one type stands for all in a sample.
    marks = {kind: [pytest.mark.model, *([] if kind == "q8_0" else only_exhaustive)] for kind in KV_TYPES}
    return [pytest.param(case, id=", ".join(case)) for case in found] + [
        pytest.param(case, id=", ".join(case), marks=[*marks[case[2]], *([] if case[1] == best else [slow])])
        for case in real
    ]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tiny": build_model(**TINY).write(folder / "tiny.gguf"),
        "floats": build_model(**FLOATS).write(folder / "floats.gguf"),
        "poison": poisonous_model().write(folder / "poison.gguf"),
    }


@pytest.fixture(params=cases())
def case(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Case:
    model, instruction_set, kv_type = request.param
    if model == "smollm2":
        paths["smollm2"] = resolve("smollm2")
    return Case(model, instruction_set, kv_type, paths)


def lay_out(rng: np.random.Generator, rig: Rig, lengths: Sequence[int]) -> list[list[int]]:
    """Block tables for sequences of these lengths, scattered over the arena."""
    free = list(map(int, rng.permutation(rig.blocks)))
    return [[free.pop() for _ in rig.table(length)] for length in lengths]


# --- one thing at a time ---


def test_again_gives_the_same_bits(case: Case) -> None:
    tokens = case.tokens(33, 1)
    assert_same(case.alone(tokens), case.alone(tokens))


@pytest.mark.parametrize("threads", THREADS)
def test_any_number_of_threads(case: Case, threads: int) -> None:
    tokens = case.tokens(45, 2)
    rig = case.rig(threads)
    blocks = rig.table(len(tokens))
    assert_same(rig.run(tokens[:44], blocks), case.alone(tokens[:44]), "prompt:")
    rig = case.rig(threads)
    assert_same(rig.run(tokens, blocks, cuts=[44]), case.alone(tokens), "decode:")


@pytest.mark.parametrize("place", [0, 13, 32])
def test_among_32_others(case: Case, place: int) -> None:
    """The others are prompts and running answers, some of them at the same positions."""
    tokens = case.tokens(38, 3)
    prompt, last = case.alone(tokens[:37]), case.alone(tokens)
    others = [case.tokens(1 + 3 * (i % 7), 100 + i) for i in range(32)]
    rig = case.rig()
    own, *tables = lay_out(np.random.default_rng(place), rig, [38] + [len(other) + 1 for other in others])

    def step(mine: Part, start: bool) -> Floats:
        parts = [
            Part(other if start else other[:1], 0 if start else len(other), blocks, wants=bool(index % 3))
            for index, (other, blocks) in enumerate(zip(others, tables, strict=True))
        ]
        parts.insert(place, mine)
        row: Floats = rig.step(*parts)[sum(part.wants for part in parts[:place])]
        return row

    assert_same(step(Part(tokens[:37], 0, own), start=True), prompt, "prompt:")
    assert_same(step(Part(tokens[37:], 37, own), start=False), last, "decode:")


@quick
@given(data=st.data())
def test_prompts_cut_anywhere(case: Case, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 60), "length")
    cuts = data.draw(st.lists(st.integers(1, max(1, length - 1)), max_size=8), "cuts")
    tokens = case.tokens(length, length)
    rig = case.rig()
    assert_same(rig.run(tokens, rig.table(length), cuts), case.alone(tokens))


@quick
@given(seed=st.integers(0, 2**16), length=st.integers(17, 60))
def test_blocks_anywhere(case: Case, seed: int, length: int) -> None:
    tokens = case.tokens(length, length)
    rig = case.rig()
    (blocks,) = lay_out(np.random.default_rng(seed), rig, [length])
    assert_same(rig.run(tokens, blocks, cuts=[length // 2]), case.alone(tokens))


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_blocks_of_any_size(case: Case, block_size: int) -> None:
    tokens = case.tokens(50, 4)
    rig = case.rig(blocks=8, block_size=block_size)
    assert_same(rig.run(tokens, [5, 2, 7, 0][: -(-50 // block_size)], cuts=[31]), case.alone(tokens))


def test_a_prefix_that_another_sequence_computed(case: Case) -> None:
    """Two sequences go on from its blocks, in one step; what they share is read only."""
    prefix = case.tokens(32, 5)
    endings = [case.tokens(9, 6), case.tokens(14, 7)]
    rig = case.rig()
    rig.run([*prefix, *case.tokens(10, 8)], [9, 4, 30], cuts=[7, 20])
    rows = rig.step(*(Part(ending, 32, [9, 4, 50 + i]) for i, ending in enumerate(endings)))
    for row, ending in zip(rows, endings, strict=True):
        assert_same(row, case.alone([*prefix, *ending]))


def test_copied_blocks(case: Case) -> None:
    """Copies serve as the originals do, and the two do not share anything afterwards."""
    shared, mine, other = case.tokens(24, 9), case.tokens(12, 10), case.tokens(12, 11)
    rig = case.rig()
    rig.run(shared, [3, 8, 0])
    rig.engine.copy_blocks(np.array([[3, 100], [8, 61]], np.int32))
    assert_same(rig.step(Part(other, 24, [100, 61, 12]))[0], case.alone([*shared, *other]), "copy:")
    assert_same(rig.step(Part(mine, 24, [3, 8, 0]))[0], case.alone([*shared, *mine]), "original:")


def test_what_blocks_held_before(case: Case) -> None:
    """Every slot of the arena was in use, by other tokens, at other positions."""
    rig = case.rig(blocks=12)
    rig.step(*(Part(case.tokens(64, 20 + i), 0, range(4 * i, 4 * i + 4), wants=False) for i in range(3)))
    for length in (1, 16, 31, 50):
        tokens = case.tokens(length, length)
        assert_same(rig.run(tokens, [7, 2, 11, 5][: -(-length // 16)]), case.alone(tokens), f"{length} tokens:")


@quick
@given(data=st.data())
def test_rows_of_drafts(case: Case, data: st.DataObject) -> None:
    """Every row of a chunk is that of its token alone: whatever is behind it, beside other chunks, and where something
    else was computed at the same positions before."""
    longest = 24 if case.model == "smollm2" else 60
    begin, count = data.draw(st.integers(0, longest), "begin"), data.draw(st.integers(1, 12), "tokens")
    tokens, wrong = case.tokens(begin + count, 30), case.tokens(count, 31)
    wanted = data.draw(st.integers(1, count), "wanted")
    rig = case.rig(data.draw(st.sampled_from(THREADS), "threads"))
    other, another, own = lay_out(np.random.default_rng(count), rig, [20, 9, begin + count])
    if begin:
        rig.step(Part(tokens[:begin], 0, own, wants=0))
    rig.step(Part(wrong, begin, own, wants=count))
    parts = [Part(case.tokens(20, 32), 0, other, wants=0), Part(case.tokens(9, 33), 0, another, wants=3)]
    parts = parts[: data.draw(st.integers(0, 2), "others")]
    mine = Part(tokens[begin:], begin, own, wants=wanted)
    rows = rig.step(*(parts if data.draw(st.booleans(), "comes last") else []), mine)[-wanted:]
    for place, row in enumerate(rows, begin + count - wanted + 1):
        assert_same(row, case.alone(tokens[:place]), f"row of position {place - 1}:")


# --- everything together ---


@quick
@given(data=st.data())
def test_any_mix(case: Case, data: st.DataObject) -> None:
    """Sequences of any length, each cut anywhere, their chunks mixed into common steps, blocks scattered."""
    longest = 24 if case.model == "smollm2" else 60
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=6), "lengths")
    rig = case.rig(data.draw(st.sampled_from(THREADS), "threads"))
    tables = lay_out(np.random.default_rng(data.draw(st.integers(0, 99), "placing")), rig, lengths)
    sequences = [case.tokens(length, length) for length in lengths]
    waiting = [
        [Part(tokens[a:b], a, blocks, wants=b == length) for a, b in spans(length, data.draw(cut_list(length), "cuts"))]
        for tokens, blocks, length in zip(sequences, tables, lengths, strict=True)
    ]
    found: dict[int, Floats] = {}
    while any(waiting):
        ready = [index for index, parts in enumerate(waiting) if parts]
        chosen = data.draw(st.permutations(ready), "order")[: data.draw(st.integers(1, len(ready)), "how many")]
        parts = [waiting[index].pop(0) for index in chosen]
        finished = [index for index, part in zip(chosen, parts, strict=True) if part.wants]
        found |= zip(finished, rig.step(*parts), strict=True)
    for index, tokens in enumerate(sequences):
        assert_same(found[index], case.alone(tokens), f"sequence {index}:")


def cut_list(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, max(1, length - 1)), max_size=4)


@pytest.mark.model
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_the_real_model_on_every_instruction_set(instruction_set: str, paths: dict[str, Path]) -> None:
    case = Case("smollm2", instruction_set, "q8_0", paths | {"smollm2": resolve("smollm2")})
    tokens, other = case.tokens(6, 1), case.tokens(3, 2)
    rig = case.rig(threads=3)
    rig.step(Part(other[:1], 0, [9]), Part(tokens[:2], 0, [150], wants=False))
    row = rig.step(Part(tokens[2:], 2, [150]), Part(other[1:], 1, [9]))[0]
    assert_same(row, case.alone(tokens))


# --- long contexts: attention is computed in splits, which begin at multiples of 256 positions ---


@exhaustive
@pytest.mark.parametrize("border", some([512, 2048], 2))
def test_long_contexts(case: Case, border: int) -> None:
    """Decoding over the border of two splits, a prompt in one chunk, a prompt in many, alone and with others."""
    if case.model == "smollm2" and border > 512:
        pytest.skip("too slow here; the tiny models cover it")
    steps = 18 if case.model != "smollm2" else 4
    begin, end = border - steps // 2, border + steps - steps // 2
    tokens = case.tokens(end, 12)
    rig = case.rig(threads=1)
    blocks = rig.table(end)
    rig.step(Part(tokens[:begin], 0, blocks, wants=False))
    one_by_one = [rig.step(Part(tokens[p : p + 1], p, blocks))[0] for p in range(begin, end)]

    rig = case.rig(threads=3)
    (scattered,) = lay_out(np.random.default_rng(1), rig, [end])
    assert_same(rig.run(tokens, scattered), one_by_one[-1], "in one chunk:")
    drafted = rig.step(Part(tokens[begin:], begin, scattered, wants=end - begin))
    assert_same(drafted, np.stack(one_by_one), "as drafts:")

    other = case.tokens(20, 13)
    rig = case.rig(threads=2)
    apart = [block for block in range(BLOCKS) if block not in blocks][: len(rig.table(20))]
    for first, last in spans(begin, [37, 100, 489, 511, 513, 1024, 1600]):
        rig.step(Part(tokens[first:last], first, blocks, wants=False), Part(other[:9], 0, apart))
    rows = [rig.step(Part(other, 0, apart), Part(tokens[p : p + 1], p, blocks))[1] for p in range(begin, end)]
    for index, row in enumerate(rows):
        assert_same(row, one_by_one[index], f"position {begin + index}, in chunks and beside another:")


# --- NaN in slots that are not in use ---

POISON = 5  # a token


def poisonous_model() -> Any:
    """A model in which one token has infinite K and V (or the largest), so that its blocks are full of poison.

    Only this token has a value in the embedding's last column, attn_k and attn_v weigh that column beyond what f16 can
    hold (as a value or as a scale), and no layer adds anything to it.
    """
    model = build_model(n_layers=2, n_embd=65, n_heads=2, n_kv_heads=1, head_dim=64, n_ff=64, n_vocab=71)
    changed = {}
    for name, tensor in model.tensors.items():
        values = tensor.values()
        if name == "token_embd.weight":
            values[:, -1] = 0
            values[POISON, -1] = 4
        elif name.endswith(("attn_k.weight", "attn_v.weight")):
            values[:, -1] = 1e30
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            values[-1] = 0
        changed[name] = float_tensor(values)
    return model.with_tensors(changed)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_garbage_in_unused_slots(instruction_set: str, kv_type: str, paths: dict[str, Path]) -> None:
    case = Case("poison", instruction_set, kv_type, paths)
    rig = case.rig(blocks=8)
    logits = np.empty((1, rig.n_vocab), np.float32)
    poison = Part([POISON] * 128, 0, range(8))
    assert rig.engine.step(*pack([poison]), logits)
    if kv_type == "f16":  # scales are kept finite
        assert not np.isfinite(logits).any(), "this token was to spoil everything that sees it"
    for length in (1, 15, 16, 17, 33, 60):
        tokens = [token for token in case.tokens(length + 20, length) if token != POISON][:length]
        assert_same(rig.run(tokens, [6, 1, 4, 3], cuts=[length // 2]), case.alone(tokens), f"{length} tokens:")
        assert rig.engine.step(*pack([poison]), logits)
