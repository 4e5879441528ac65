"""Rolling windows on the native engine: the right numbers, against numpy, and the same bits in whatever way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm._native import instruction_sets
from cllm.kv.window import Window
from native_kit import TinyModel, build_model
from step_kit import FLOATS, KV_TYPES, TINY, Floats, Part, Rig, assert_same, quick, random_tokens
from thorough import slow

KEPT = 16
WINDOWS = [Window(KEPT, 64, 32), Window(0, 48, 16), Window(288, 320, 256)]
"""The last one has more sinks than one split of attention holds."""


class Stream:
    """One sequence on its way through a window, in a rig that may hold others."""

    def __init__(self, window: Window, blocks: Sequence[int]) -> None:
        self.window = window
        self._free = list(blocks)
        self._table: list[int] = []
        self.position = self.dropped = 0

    def part(self, tokens: Sequence[int], wants: bool = True) -> Part:
        """The next tokens; they must not reach beyond the next drop."""
        self._roll()
        start = self.position - self.dropped
        self.position += len(tokens)
        while len(self._table) * 16 < self.position - self.dropped:
            self._table.append(self._free.pop(0))
        kept = self.window.keep if self.dropped else 0
        return Part(tokens, start, list(self._table), wants, self.dropped, kept)

    def _roll(self) -> None:
        due = self.window.dropped_at(self.position) - self.dropped
        first, last = self.window.keep // 16, (self.window.keep + due) // 16
        self._free += self._table[first:last]
        del self._table[first:last]
        self.dropped += due

    def parts(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> list[Part]:
        """All tokens, in pieces that end at `cuts` and where something is dropped. Only the last wants logits."""
        found, begin = [], self.position
        borders = sorted({cut for cut in cuts if begin < cut < len(tokens)} | {len(tokens)})
        while begin < len(tokens):
            end = min(borders[0], begin + self.window.until_drop(begin))
            found.append(self.part(tokens[begin:end], end == len(tokens)))
            begin = end
            if begin == borders[0]:
                borders.pop(0)
        return found


def run(
    rig: Rig, window: Window, tokens: Sequence[int], cuts: Sequence[int] = (), blocks: Sequence[int] = ()
) -> Floats:
    stream = Stream(window, blocks or range(rig.blocks))
    rows = [rig.step(part) for part in stream.parts(tokens, cuts)]
    row: Floats = rows[-1][0]
    return row


# --- the right numbers ---


def rotate(x: Any, positions: Any, base: float) -> Any:
    """llama's pairs are neighbours."""
    pairs = x.shape[-1] // 2
    angles = positions[:, None, None] * base ** (-np.arange(pairs) / pairs)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned


def windowed_logits(model: TinyModel, tokens: Sequence[int], window: Window, *, heads: int, kv_heads: int) -> Any:
    """Every position's logits, in float64. A query at position p, when d tokens are gone, sees the sinks as if it stood
    at p - d, and what is left of the others from where it is."""
    weights = {name: tensor.values().astype(np.float64) for name, tensor in model.tensors.items()}
    positions = np.arange(len(tokens))
    dropped = np.array([window.dropped_at(int(p)) for p in positions])
    sinks = positions[None, :] < window.keep
    causal = positions[None, :] <= positions[:, None]
    visible = causal & (sinks | (positions[None, :] >= window.keep + dropped[:, None]))

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights[name]

    x = weights["token_embd.weight"][list(tokens)]
    layers = {name.split(".")[1] for name in weights if name.startswith("blk.")}
    for layer in sorted(layers, key=int):
        w = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"blk.{layer}.")}
        h = norm(x, f"blk.{layer}.attn_norm.weight")
        q, k, v = (
            (h @ w[f"attn_{letter}.weight"].T).reshape(len(tokens), count, -1)
            for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        keys, values = (np.repeat(each, heads // kv_heads, axis=1) for each in (rotate(k, positions, 10000.0), v))
        far, near = (rotate(q, at, 10000.0) for at in (positions, positions - dropped))
        scores = np.where(
            sinks,
            np.einsum("qhd,khd->hqk", near, keys, optimize=True),
            np.einsum("qhd,khd->hqk", far, keys, optimize=True),
        ) / np.sqrt(q.shape[-1])
        scores = np.where(visible, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, values, optimize=True).reshape(len(tokens), -1)
        x = x + attended @ w["attn_output.weight"].T
        h = norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = h @ w["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    return norm(x, "output_norm.weight") @ weights["output.weight"].T


@pytest.mark.parametrize("window", [*WINDOWS[:2], pytest.param(WINDOWS[2], marks=slow)], ids=str)
def test_against_numpy(window: Window, tmp_path: Path) -> None:
    model = build_model(weight_type="f32", n_heads=4, n_kv_heads=2, n_layers=3)
    length = window.capacity + 3 * window.step + 7
    rig = Rig(model.write(tmp_path / "model.gguf"), blocks=window.capacity // 16)
    tokens = random_tokens(rig.n_vocab, length, seed=4)
    expected = windowed_logits(model, tokens, window, heads=4, kv_heads=2)
    spread = expected.std()
    stream = Stream(window, range(rig.blocks))
    for position in range(length):
        row = rig.step(stream.part(tokens[position : position + 1]))[0]
        assert np.abs(row - expected[position]).max() < 0.02 * spread, position
    # What a mistake would look like: nothing dropped, or sinks at their distance in the text.
    unlimited = windowed_logits(model, tokens, Window(0, 1 << 20, 16), heads=4, kv_heads=2)
    assert np.abs(unlimited[-1] - expected[-1]).max() > 0.2 * spread


def test_positions_far_beyond_any_context(tmp_path: Path) -> None:
    """Only differences of positions count: a million tokens further on all is the same, up to rounding."""
    rig = Rig(build_model(weight_type="f32").write(tmp_path / "model.gguf"))
    tokens = random_tokens(rig.n_vocab, 200, seed=5)
    near = rig.step(Part(tokens, 0, rig.table(200)))
    for dropped in (8_192, 65_536, 1 << 20):
        far = rig.step(Part(tokens, 0, rig.table(200), dropped=dropped))
        assert np.abs(far - near).max() < 0.01 * near.std(), dropped


# --- the same bits ---


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("windows")
    made = {"tiny": TINY, "floats": FLOATS, "qwen3": TINY | {"arch": "qwen3"}, "qwen2": TINY | {"arch": "qwen2"}}
    return {name: build_model(**options).write(folder / f"{name}.gguf") for name, options in made.items()}


def cases() -> list[Any]:
    best, *others = instruction_sets()
    found = [("tiny", name, kind) for name in (best, *others) for kind in KV_TYPES]
    found += [("floats", best, "f16"), ("qwen2", best, "f16"), ("qwen3", best, "q8_0")]
    return [pytest.param(*case, id=", ".join(case)) for case in found]


def rig_of(path: Path, instruction_set: str, kv_type: str, threads: int) -> Rig:
    return Rig(path, instruction_set=instruction_set, threads=threads, kv_type=kv_type, blocks=192)


@pytest.mark.parametrize(("model", "instruction_set", "kv_type"), cases())
def test_however_it_is_computed(model: str, instruction_set: str, kv_type: str, paths: dict[str, Path]) -> None:
    """One token after another on one thread; in the longest chunks; on three threads; in scattered blocks; among others
    that have a window and others that have none."""
    window = Window(KEPT, 256, 64)
    tokens = random_tokens(64, window.capacity + 5 * window.step + 3, seed=6)
    alone = rig_of(paths[model], instruction_set, kv_type, threads=1)
    expected = run(alone, window, tokens)
    assert_same(run(alone, window, tokens, cuts=range(300, len(tokens))), expected, "token by token:")
    rig = rig_of(paths[model], instruction_set, kv_type, threads=3)
    assert_same(run(rig, window, tokens, cuts=[5, 37, 400, 401, 440]), expected, "three threads:")
    scattered = list(map(int, np.random.default_rng(7).permutation(rig.blocks)))
    assert_same(run(rig, window, tokens, blocks=scattered), expected, "scattered:")

    # Together: each step has a part of the sequence, one of another window, and a token without any.
    mine, other = Stream(window, scattered[:40]), Stream(Window(32, 64, 16), scattered[40:80])
    plain = scattered[80:180]
    parts = mine.parts(tokens, cuts=[200, 390, 520])
    others = other.parts(random_tokens(64, 300, seed=8))
    row = None
    for step, part in enumerate(parts):
        beside = [others[step]] if step < len(others) else []
        row = rig.step(*beside, Part([3], step, plain), part)[-1]
    assert row is not None
    assert_same(row, expected, "among others:")


@pytest.fixture(scope="module")
def tiny(paths: dict[str, Path]) -> Rig:
    return rig_of(paths["tiny"], "auto", "f16", threads=2)


@quick
@given(data=st.data())
def test_prompts_cut_anywhere(tiny: Rig, data: st.DataObject) -> None:
    window = data.draw(st.sampled_from(WINDOWS))
    length = data.draw(st.integers(1, window.capacity + 3 * window.step))
    tokens = random_tokens(tiny.n_vocab, length, seed=9)
    cuts = data.draw(st.lists(st.integers(1, length), max_size=8))
    assert_same(run(tiny, window, tokens, cuts), run(tiny, window, tokens))


def test_before_anything_is_dropped_a_window_changes_nothing(tiny: Rig) -> None:
    window = Window(KEPT, 64, 32)
    tokens = random_tokens(tiny.n_vocab, window.capacity, seed=10)
    assert_same(run(tiny, window, tokens), tiny.run(tokens, tiny.table(len(tokens))))
