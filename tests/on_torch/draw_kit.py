"""Draws as the host makes them, for whoever has to agree with it."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

import numpy_sampler as host

Row = NDArray[np.float32]
NEAR = 2e-6
"""Where a border between two tokens is nearer than this, rounding decides."""


def host_choice(values: Row, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float) -> int:
    best = host.argmax(values)
    peak = float(values[best])
    if not np.isfinite(peak):
        return -1
    if temperature == 0.0:
        return best
    options = {"temperature": temperature, "top_k": min(int(top_k), len(values)), "top_p": top_p, "min_p": min_p}
    with np.errstate(all="ignore"):
        return host.draw(values, peak, uniform, **options)


def agrees(token: int, values: Row, *params: float) -> bool:
    """Is it the host's token, or one that it would choose if the numbers were a little different?"""
    if token == host_choice(values, *params):
        return True
    temperature, top_k, top_p, min_p, uniform = params
    for p, least, u in product((-NEAR, 0.0, NEAR), repeat=3):
        moved = min(max(uniform + u, 0.0), 1 - 2**-53)
        limit = top_p if top_p == 1.0 else min(max(top_p + p, 1e-9), 1.0)
        if token == host_choice(values, temperature, top_k, limit, min(max(min_p * (1 + least), 0.0), 1.0), moved):
            return True
    # Before the first token that weighs something there may be some that weigh nothing in float32.
    return uniform < NEAR and (values.max() - values[token]) / temperature > -np.log(np.finfo(np.float32).tiny)
