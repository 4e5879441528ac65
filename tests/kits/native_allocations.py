"""Run by test_native_robustness.py with data/count_allocations.c preloaded: `native_allocations.py MODEL LIBRARY`.

Does steps of several kinds, each once to warm up and then 20 times. If one of these allocates, it exits with 1.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import numpy as np

from step_kit import Part, Rig, pack, random_tokens


def main() -> int:
    model, library = Path(sys.argv[1]), ctypes.CDLL(sys.argv[2])
    result = (ctypes.c_long * 2)()
    library.count_begin()
    spare = np.empty(1 << 20)
    library.count_end(result)
    assert result[0] >= 1, "allocations are not counted"
    assert result[1] >= spare.nbytes, "allocations are not counted"

    rig = Rig(model, blocks=256, threads=2)
    tokens = random_tokens(rig.n_vocab, 3000)
    kinds = {
        "a prompt": [Part(tokens[:700], 0, rig.table(700))],
        "a chunk without logits": [Part(tokens[:64], 0, rig.table(64), wants=False)],
        "one token": [Part(tokens[:1], 20, rig.table(21))],
        "one token of a long context": [Part(tokens[:1], 2900, rig.table(2901))],
        "32 tokens of sequences": [Part(tokens[i : i + 1], i, rig.table(40)) for i in range(32)],
        "a prompt beside others": [
            Part(tokens[:300], 600, rig.table(900)),
            *(Part(tokens[i : i + 1], i, rig.table(40, first=100)) for i in range(8)),
        ],
    }
    failed = 0
    for name, parts in kinds.items():
        arrays = pack(parts)
        logits = np.empty((sum(part.wants for part in parts), rig.n_vocab), np.float32)
        step = rig.engine.step
        step(*arrays, logits)
        gc.disable()
        library.count_begin()
        for _ in range(20):
            step(*arrays, logits)
        library.count_end(result)
        gc.enable()
        print(f"{name}: {result[0]} allocations of {result[1]} bytes in 20 steps")
        failed += result[0] > 0
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
