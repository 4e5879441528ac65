"""What choosing the tokens of a step costs, in numpy and in the extension, and the share of a native step that it is.

Rows are shaped like a language model's: a bulk of unlikely tokens and a few dozen likely ones. Every figure is CPU
time, the minimum over the repeats, so that other work on the machine counts little.

    python src/cllm_bench/scripts/sampling.py [--rows 1 32] [--step-ms 4.5 30] [--vocab 49152] [--repeats 50]

`--step-ms` says how long the model takes for a step of so many rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.engine import draw
from cllm.engine.params import SamplingParams
from cllm.engine.row_sampler import RowSampler, fastest_sampler
from cllm.engine.sampling import TokenChooser, choose

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_k 40, top_p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "top_k 5000": SamplingParams(temperature=0.8, top_k=5000),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top_p 0.95, hot": SamplingParams(temperature=1.5, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "logprobs 5, greedy": SamplingParams(temperature=0.0, logprobs=5),
    "penalties, greedy": SamplingParams(temperature=0.0, **PENALTIES),
    "penalties, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95, **PENALTIES),
    "logit_bias, greedy": SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(300), -1.0)),
}
PROMPT_TOKENS = 1000
"""Distinct tokens that the penalties have to deal with."""


def make_logits(rows: int, vocab: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(0)
    logits = generator.normal(0.0, 2.0, (rows, vocab)).astype(np.float32)
    for row in logits:
        row[generator.integers(0, vocab, 40)] += 10.0
    return logits


def measure(sampler: RowSampler, params: SamplingParams, logits: NDArray[np.float32], repeats: int) -> float:
    """The least time of one call, in milliseconds."""
    rows, vocab = logits.shape
    prompt = range(min(PROMPT_TOKENS, vocab))
    wanted = [
        (row, TokenChooser(params, prompt, end_ids=frozenset(), seed=row, vocab_size=vocab, rows=sampler))
        for row in range(rows)
    ]
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        choose(logits, wanted)
        best = min(best, time.thread_time() - started)
    return best * 1e3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[4.5, 30.0])
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if len(options.rows) != len(options.step_ms):
        parser.error(f"--rows has {len(options.rows)} numbers, --step-ms has {len(options.step_ms)}")
    return options


def main() -> None:
    options = parse()
    if fastest_sampler() is draw:
        raise SystemExit("the extension is not built, so there is nothing to compare")
    samplers: dict[str, RowSampler] = {"numpy": draw, "native": fastest_sampler()}
    results: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'ms a step':24}" + "".join(f"{rows:>8} rows: numpy   native  of step" for rows in options.rows))
    for name, params in CASES.items():
        results[name] = {}
        line = f"{name:24}"
        for rows, step_ms in zip(options.rows, options.step_ms, strict=True):
            logits = make_logits(rows, options.vocab)
            ms = {each: measure(samplers[each], params, logits, options.repeats) for each in samplers}
            results[name][str(rows)] = ms
            line += f"{ms['numpy']:20.3f}{ms['native']:9.3f}{ms['native'] / step_ms:9.1%}"
        print(line, flush=True)
    if options.json:
        report = {"vocab": options.vocab, "unit": "ms a step", "step_ms": options.step_ms, "cases": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
