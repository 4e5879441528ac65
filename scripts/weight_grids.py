"""Write csrc/weight_grids.h: what the codes of GGUF's types IQ2 and IQ3 stand for, as the package gguf has it.

    python scripts/weight_grids.py [--check]

With --check nothing is written, and the exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import numpy as np
from gguf import quants

FILE = Path(__file__).resolve().parent.parent / "csrc" / "weight_grids.h"
HEAD = """\
// What the codes of GGUF's types IQ2 and IQ3 stand for; written by scripts/weight_grids.py.
//
// A code of IQ2 is of 8 columns, one of IQ3 of 4. Its word has the level of each column, the first in the lowest bits:
// 2 bits each, or 3.
#pragma once

#include <cstdint>

namespace cllm {
"""
GRIDS = (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S)


def text() -> str:
    return "\n".join([HEAD, *(part for grid in GRIDS for part in _tables(grid)), "}  // namespace cllm", ""])


def _tables(grid: type[quants.IQ2_XXS]) -> list[str]:
    grid.init_grid()
    assert grid.grid is not None
    levels = np.array(grid.grid_map)
    found = np.searchsorted(levels, grid.grid.reshape(grid.grid_shape))
    words = (found << (len(levels) - 1).bit_length() * np.arange(grid.grid_shape[1])).sum(axis=1)
    name = grid.__name__.replace("_", "").lower().replace("iq", "kIq")
    return [
        f"constexpr uint8_t {name}Levels[] = {{{', '.join(map(str, levels))}}};",
        f"constexpr uint16_t {name}Words[] = {{",
        textwrap.fill(
            ", ".join(f"{word:#06x}" for word in words) + ",", 126, initial_indent="    ", subsequent_indent="    "
        ),
        "};",
        "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return 0 if FILE.read_text() == text() else 1
    FILE.write_text(text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
