"""How well a model reads on behind a rolling window, and what rotating its keys again would cost.

    python src/cllm_bench/scripts/window_quality.py --tokens 50000 --context 8192 --plot FILE
    python src/cllm_bench/scripts/window_quality.py --rotation

The text is Python's own reference manual, as `pydoc` carries it. It is read token by token, each given what the window
remembers, and the perplexity of a stretch of tokens is written down every so often. Beside it stands the same stretch
after the first and the most recent tokens were computed again from nothing, which is the best that can be had for so
many tokens of memory; and two windows that are built in another way: without the first tokens, and with them at
their distance in the text.

--rotation: keys that are rotated to new positions at every drop, instead of staying as they are. What that costs in
time (llama.cpp does it, if it is installed) and in accuracy, for each type of K.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp.library import load_library
from cllm.backends.native.backend import NativeBackend
from cllm.errors import ModelError
from cllm.kv.ops import BlockGeometry
from cllm.kv.window import Window
from cllm.machine import default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text.tokenizer import load_tokenizer

BLOCK = 16
TOGETHER = 64
"""Tokens whose probabilities are computed in one step."""


class Reader:
    """A model that reads one sequence and says how likely it found the tokens."""

    def __init__(self, model: GGUFModel, tokens: int, kv_type: str) -> None:
        threads = default_threads(read_cpus()).count
        self.backend = NativeBackend(
            model, threads=threads, instruction_set="auto", kv_type_k=kv_type, kv_type_v=kv_type
        )
        self.backend.allocate(BlockGeometry(-(-tokens // BLOCK), BLOCK))
        self.forget()

    def forget(self) -> None:
        self._free = list(range(self.backend._geometry.blocks))  # type: ignore[union-attr]
        self._table: list[int] = []
        self._held = self._dropped = self._kept = 0

    def drop(self, start: int, count: int, *, at_their_distance: bool) -> None:
        first, last = start // BLOCK, (start + count) // BLOCK
        self._free += self._table[first:last]
        del self._table[first:last]
        self._held -= count
        self._dropped += count
        self._kept = 0 if at_their_distance else start

    def read(self, tokens: Sequence[int], following: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Take tokens in; with what follows each of them, minus the logarithms of how likely that was."""
        start = self._held
        self._held += len(tokens)
        while len(self._table) * BLOCK < self._held:
            self._table.append(self._free.pop(0))
        self.backend.collect([self._chunk(tokens, start, wants=False)])
        found = np.empty(len(following or ()))
        for begin in range(0, len(found), TOGETHER):
            rows = range(begin, min(begin + TOGETHER, len(found)))
            logits = self.backend.collect([self._chunk(tokens[i : i + 1], start + i, wants=True) for i in rows]).logits
            assert logits is not None
            logits = logits.astype(np.float64)
            totals = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
            assert following is not None
            found[rows.start : rows.stop] = totals - logits[np.arange(len(rows)), following[rows.start : rows.stop]]
        return found

    def _chunk(self, tokens: Sequence[int], start: int, *, wants: bool) -> Chunk:
        return Chunk(array("i", tokens), start, wants, 0, self._table, self._dropped, self._kept)


@dataclass(frozen=True)
class Plan:
    tokens: int
    every: int
    stretch: int

    def points(self) -> Iterator[int]:
        return iter(range(self.every, self.tokens - self.stretch, self.every))


def through_a_window(
    reader: Reader, text: Sequence[int], window: Window, plan: Plan, *, at_their_distance: bool = False
) -> dict[int, float]:
    """The perplexity of each stretch, read in one go."""
    reader.forget()
    points = list(plan.points())
    found: dict[int, list[float]] = {point: [] for point in points}
    position = dropped = 0
    while position < plan.tokens:
        if due := window.dropped_at(position) - dropped:
            reader.drop(window.keep, due, at_their_distance=at_their_distance)
            dropped += due
        end = min(position + window.until_drop(position), position + 256, plan.tokens)
        inside = next((point for point in points if point <= position < point + plan.stretch), None)
        border = min((b for p in points for b in (p, p + plan.stretch) if b > position), default=end)
        end = min(end, border)
        if inside is None:
            reader.read(text[position:end])
        else:
            found[inside] += reader.read(text[position:end], text[position + 1 : end + 1]).tolist()
        position = end
    return {point: float(np.exp(np.mean(values))) for point, values in found.items()}


def computed_again(reader: Reader, text: Sequence[int], window: Window, plan: Plan) -> dict[int, float]:
    """Each stretch after its context was computed from nothing: the first tokens and the most recent ones."""
    found: dict[int, float] = {}
    for point in plan.points():
        reader.forget()
        before = text[:point] if point <= window.keep + window.recent else None
        context = before if before is not None else [*text[: window.keep], *text[point - window.recent : point]]
        for begin in range(0, len(context), 256):
            reader.read(context[begin : begin + 256])
        end = point + plan.stretch
        found[point] = float(np.exp(np.mean(reader.read(text[point:end], text[point + 1 : end + 1]))))
    return found


def compare(options: argparse.Namespace) -> None:
    model = GGUFModel.open(resolve(options.model))
    text = load_tokenizer(model).encode("\n\n".join(topics.values()))[: options.tokens + 1]
    plan = Plan(len(text) - 1, options.every, options.stretch)
    step = Window.fit(options.keep, 1 << 16, BLOCK).step
    recent = (options.context - options.keep - step) // BLOCK * BLOCK
    window, bare = Window.fit(options.keep, recent, BLOCK), Window.fit(0, recent, BLOCK)
    reader = Reader(model, options.context + plan.stretch + BLOCK, options.kv_type)
    print(f"{plan.tokens} tokens of text, {window}, K/V {options.kv_type}", flush=True)
    ways: dict[str, Callable[[], dict[int, float]]] = {
        "rolling window": lambda: through_a_window(reader, text, window, plan),
        "computed again": lambda: computed_again(reader, text, window, plan),
        "first tokens at their distance": lambda: through_a_window(reader, text, window, plan, at_their_distance=True),
        "no first tokens": lambda: through_a_window(reader, text, bare, plan),
    }
    found: dict[str, dict[int, float]] = {}
    for name in options.ways or ways:
        run = ways[name]
        started = time.perf_counter()
        found[name] = run()
        print(f"{name:32} {summary(found[name], window)}, {time.perf_counter() - started:.0f} s", flush=True)
    base = found.get("computed again", {})
    for name, values in found.items() if base else ():
        ratios = [values[point] / base[point] for point in values if point > window.capacity]
        print(f"{name:32} beside computed again: {np.exp(np.mean(np.log(ratios))):.4f}x", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"window": str(window), "perplexity": found}, indent=1))
    if options.plot:
        draw(found, window, options.plot)


def summary(values: dict[int, float], window: Window) -> str:
    beyond = [value for point, value in values.items() if point > window.capacity]
    half = len(beyond) // 2
    means = [float(np.exp(np.mean(np.log(part)))) for part in (beyond, beyond[:half], beyond[half:]) if part]
    return "perplexity beyond the context " + ", ".join(f"{mean:.3f}" for mean in means) + " (all, 1st half, 2nd half)"


def draw(found: dict[str, dict[int, float]], window: Window, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"rolling window": "#1f5fa8", "computed again": "#c9973f", "no first tokens": "#a33"}
    figure, axes = plt.subplots(figsize=(9, 4))
    for name, values in found.items():
        if name in colours:
            axes.plot(list(values), list(values.values()), label=name, color=colours[name], linewidth=1.4)
    axes.axvline(window.capacity, color="#777", linestyle=":", linewidth=1)
    axes.text(window.capacity, axes.get_ylim()[1], " the context is full", va="top", fontsize=9, color="#555")
    axes.set_yscale("log")
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("perplexity of the next tokens")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    print(f"written: {file}")


# --- rotating keys again ---


def rotation(options: argparse.Namespace) -> None:
    rounds = (options.context - options.keep) // 256
    print(f"keys that are rotated {rounds} times, by 256 positions each, and rounded to their type every time:")
    for kind in ("f16", "q8_0", "q4_0"):
        once, often = rotated_error(kind, 1), rotated_error(kind, rounds)
        print(
            f"  {kind:5} error of scores, of their spread: {100 * once:.2f} % stored once, {100 * often:.2f} % rotated"
        )
    try:
        load_library()
    except ModelError as error:
        print(f"what rotating costs in llama.cpp is not measured: {error}")
        return
    llama_cost(options)


def rotated_error(kind: str, rounds: int, tokens: int = 512, dim: int = 64) -> float:
    """Random keys with a mean, as models have them, stored `rounds` times with a rotation between."""
    rng = np.random.default_rng(1)
    keys = rng.normal(0, 1, (tokens, dim)) + rng.normal(0, 2, dim)
    queries = rng.normal(0, 1, (256, dim))
    angles = 256 * 10_000.0 ** (-np.arange(dim // 2) / (dim // 2))
    stored, exact = rounded(keys, kind), keys
    for _ in range(rounds - 1):
        stored, exact = rounded(turned(stored, -angles), kind), turned(exact, -angles)
    scores = queries @ exact.T
    return float(np.std(queries @ stored.T - scores) / np.std(scores))


def turned(x: Any, angles: Any) -> Any:
    out = np.empty_like(x)
    even, odd = x[:, 0::2], x[:, 1::2]
    out[:, 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[:, 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return out


def rounded(x: Any, kind: str) -> Any:
    if kind == "f16":
        return x.astype(np.float16).astype(np.float64)
    levels = 127 if kind == "q8_0" else 7
    groups = x.reshape(len(x), -1, 32)
    scales = (np.abs(groups).max(-1, keepdims=True) / levels).astype(np.float16).astype(np.float64)
    return (np.round(groups / scales) * scales).reshape(x.shape)


def llama_cost(options: argparse.Namespace) -> None:
    from cllm.backends.llama_cpp.backend import LlamaCppBackend
    from cllm.kv.ops import SlotGeometry

    threads = default_threads(read_cpus()).count
    backend = LlamaCppBackend(
        resolve(options.model), threads=threads, n_batch=2048, n_ubatch=512, kv_type_k="f16", kv_type_v="f16",
        flash_attention=True, mmap=True, mlock=False,
    )  # fmt: skip
    backend.allocate(SlotGeometry(1, options.context))
    rng = np.random.default_rng(2)
    tokens = array("i", rng.integers(10, 40_000, options.context - 1).tolist())
    for begin in range(0, len(tokens), 512):
        backend.collect([Chunk(tokens[begin : begin + 512], begin, False, 0)])
    plain, after_shift = [], []
    for _ in range(5):
        end = backend.ops.length(0)
        started = time.perf_counter()
        backend.collect([Chunk(array("i", [7]), end, True, 0)])
        plain.append(time.perf_counter() - started)
        backend.ops.remove(0, options.keep, options.keep + 256)
        backend.ops.shift(0, options.keep + 256, None, -256)
        started = time.perf_counter()
        backend.ops.settle()
        after_shift.append(time.perf_counter() - started)
        end = backend.ops.length(0)
        backend.collect([Chunk(tokens[:256], end, False, 0)])
    backend.close()
    each = (min(after_shift) - min(plain)) / 256
    print(
        f"llama.cpp, a context of {options.context}: a token takes {1e3 * min(plain):.1f} ms, rotating after a drop "
        f"{1e3 * (min(after_shift) - min(plain)):.1f} ms, which is {1e3 * each:.2f} ms for each of 256 tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--keep", type=int, default=16)
    parser.add_argument("--every", type=int, default=2048, help="tokens from one stretch to the next")
    parser.add_argument("--stretch", type=int, default=256, help="tokens whose perplexity is measured there")
    parser.add_argument("--kv-type", default="f16", choices=("f16", "q8_0", "q4_0"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--way", dest="ways", action="append", help="only this one, by its name below; may be repeated")
    parser.add_argument("--rotation", action="store_true")
    options = parser.parse_args()
    if options.rotation:
        rotation(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
