"""The kernels that choose tokens in Triton's interpreter, against the host and against plain torch; run by
`test_torch_drawing.py`, which sets TRITON_INTERPRET before anything is imported. Prints what differs, as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from array import array

import numpy as np
import torch

from cllm.backends.base import Bias, Chunk, Draw, Seen
from cllm.backends.torch import triton_sampling
from cllm.backends.torch.plain_sampling import PlainSampler
from cllm.backends.torch.sampling import choose, read_draws
from cllm.backends.torch.staging import upload
from cllm.backends.torch.triton_sampling import TritonSampler
from draw_kit import agrees, host_choice

KERNELS = TritonSampler()
SPECIAL = ("plain", "equal values", "half forbidden", "not sound", "flat", "steep")


def rows(kind: str, width: int, chance: np.random.Generator) -> np.ndarray:
    values = chance.normal(size=(4, width)).astype(np.float32)
    if kind == "equal values":
        values = np.round(values * 2)
        values[0] = -0.0
        values[0, ::3] = 0.0
    elif kind == "half forbidden":
        values[:, ::2] = -np.inf
    elif kind == "not sound":
        values[0, width // 2], values[1], values[2, width - 1] = np.nan, -np.inf, np.inf
    elif kind == "flat":
        values *= np.float32(0.01)
    elif kind == "steep":
        values *= np.float32(30)
    return values


def draws(chance: np.random.Generator) -> list[str]:
    """All kinds of rows with all kinds of parameters, in parts and tiles so small that there are several."""
    triton_sampling.PART = triton_sampling.TILE = 256
    triton_sampling.FEW, triton_sampling.RANK, triton_sampling.GROUPS = 32, 12, 64
    wrong = []
    for kind in SPECIAL:
        for width in (3, 300, 700):
            values = rows(kind, width, chance)
            params = np.stack(
                [
                    chance.choice([0.0, 0.01, 0.7, 1.5], 4),
                    chance.choice([0, 0, 1, 7, 40, width, width + 1], 4),
                    chance.choice([1.0, 0.95, 0.6, 1e-6], 4),
                    chance.choice([0.0, 0.1], 4),
                    chance.choice([0.0, chance.random(), 1 - 2**-53], 4),
                ],
                axis=1,
            )
            owners, last = torch.tensor([5, -1, 0, 3], dtype=torch.int32), torch.full((7,), 99, dtype=torch.int32)
            tokens = KERNELS.choose(torch.from_numpy(values), torch.from_numpy(params), owners, last).tolist()
            noted = [max(tokens[2], 0), 99, 99, max(tokens[3], 0), 99, max(tokens[0], 0), 99]
            if last.tolist() != noted:
                wrong.append(f"{kind} {width}: noted {last.tolist()}, not {noted}")
            for row, (token, numbers) in enumerate(zip(tokens, params.tolist(), strict=True)):
                if not agrees(token, values[row], *numbers):
                    wrong.append(f"{kind} {width} {numbers}: {token}, not {host_choice(values[row], *numbers)}")
            best = KERNELS.choose(torch.from_numpy(values), None, owners, last).tolist()
            if best != [host_choice(row, 0.0, 0, 1.0, 0.0, 0.0) for row in values]:
                wrong.append(f"{kind} {width}: best {best}")
    return wrong


def adjusted(chance: np.random.Generator) -> list[str]:
    """Biases, penalties and masks: every logit as plain torch has it."""
    triton_sampling.LIST_TILE = 16
    width, chunks = 90, []
    logits = torch.from_numpy((chance.normal(size=(12, width)) * 4).astype(np.float32))
    logits[3, 7], logits[4, 8] = torch.inf, torch.nan
    for row in range(12):
        bias = seen = None
        if row % 2:
            ids = chance.permutation(width)[: 1 + 4 * row].astype(np.int32)
            bias = Bias(ids, np.where(ids % 3, chance.normal(size=len(ids)), -np.inf))
        if row % 3:
            ids = chance.permutation(width)[: 4 * row].astype(np.int32)
            seen = Seen(
                ids, chance.integers(0, 3, len(ids)).astype(np.int32), (0.5, 1.0, 1.3)[row % 3], 0.3, -0.1 * row
            )
        draw = Draw(0.0, 0, 1.0, 0.0, 0.0, None, bias, seen, None)
        chunks.append(Chunk(array("i", [1]), 0, True, row=row, follows=row % 4 > 1, draws=(draw,)))
    last = torch.from_numpy(chance.integers(0, width, 12).astype(np.int32))
    found, expected = logits.clone(), logits.clone()
    draws = read_draws(chunks, width)
    moved = upload(draws.parts(), logits.device)
    told = choose(found, draws, moved, KERNELS, last.clone()).read()
    known = choose(expected, draws, moved, PlainSampler(), last.clone()).read()
    same = torch.equal(found.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0)) and told == known
    return [] if same and not torch.equal(found, logits) else ["adjusted logits differ"]


def prepared(chance: np.random.Generator) -> list[str]:
    counts = [0, 1, 40, 17]
    firsts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
    table = torch.from_numpy(chance.integers(0, 99, sum(counts)).astype(np.int32))
    follows, last = torch.tensor([-1, 3, 0, -1], dtype=torch.int32), torch.tensor([50, 51, 52, 53], dtype=torch.int32)
    results = []
    for chooser in (KERNELS, PlainSampler()):
        tokens, tables = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.zeros((4, 41), dtype=torch.int32)
        chooser.prepare(tokens, follows, last, table, firsts, tables)
        results.append((tokens.tolist(), tables.tolist()))
    return [] if results[0] == results[1] and results[0][0] == [1, 53, 50, 4] else [f"prepared {results}"]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    number = np.random.default_rng(7)
    json.dump(draws(number) + adjusted(number) + prepared(number), sys.stdout)
