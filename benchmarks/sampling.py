"""What choosing tokens costs, in milliseconds per row of logits.

Rows are shaped like a language model's: a bulk of unlikely tokens and a few dozen likely ones. Every figure is
the minimum over the repeats, so that other work on the machine does not count.

    python benchmarks/sampling.py [--rows 1 32] [--vocab 49152] [--repeats 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cllm.engine.params import SamplingParams
from cllm.engine.sampling import TokenChooser, choose

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_k 40 + top_p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties, greedy": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5
    ),
    "logprobs 5, greedy": SamplingParams(temperature=0.0, logprobs=5),
}
PROMPT_TOKENS = 500
"""Distinct tokens that the penalties have to deal with at first."""


def make_logits(rows: int, vocab: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(0)
    logits = generator.normal(0.0, 2.0, (rows, vocab)).astype(np.float32)
    for row in logits:
        row[generator.integers(0, vocab, 40)] += 10.0
    return logits


def measure(params: SamplingParams, logits: NDArray[np.float32], repeats: int) -> float:
    """The least time of one call, in milliseconds per row."""
    rows, vocab = logits.shape
    prompt = range(min(PROMPT_TOKENS, vocab))
    wanted = [
        (row, TokenChooser(params, prompt, end_ids=frozenset(), seed=row, vocab_size=vocab)) for row in range(rows)
    ]
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        choose(logits, wanted)
        best = min(best, time.perf_counter() - started)
    return best / len(logits) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(f"{'ms per row':24}" + "".join(f"{rows:>8} rows" for rows in options.rows))
    for name, params in CASES.items():
        results[name] = {
            str(rows): measure(params, make_logits(rows, options.vocab), options.repeats) for rows in options.rows
        }
        print(f"{name:24}" + "".join(f"{ms:13.4f}" for ms in results[name].values()))
    if options.json:
        report = {"vocab": options.vocab, "unit": "ms per row", "cases": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
