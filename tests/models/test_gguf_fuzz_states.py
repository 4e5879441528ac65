"""Headers of models some of whose layers carry a state, made wrong in every place and in many ways.

As in `test_gguf_fuzz`: a mutant loads, and a token is computed with it, or it is refused with one line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from architecture_kit import TINY, write_tiny
from gguf_mutants import Parts, key_mutants, take_apart, tensor_mutants, value_mutants
from loading_kit import LoadingProcess
from test_gguf_fuzz import check

MUTANTS = 120
"""Of each kind, at random."""


@pytest.fixture(scope="module")
def loading() -> Iterator[LoadingProcess]:
    process = LoadingProcess()
    yield process
    process.close()


@pytest.fixture(scope="module", params=["qwen35", "lfm2", "nemotron_h", "falcon-h1"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return take_apart(write_tiny(tmp_path_factory.mktemp("sound") / "sound.gguf", TINY[request.param]).read_bytes())


def test_the_sound_file_computes(loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    assert check(loading, tmp_path / "m.gguf", [("sound", parts.encoded())]) == {"sound": "loaded"}


@pytest.mark.parametrize("mutants", [value_mutants, key_mutants, tensor_mutants], ids=lambda mutants: mutants.__name__)
def test_mutants(mutants: object, loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    assert callable(mutants)
    every = list(mutants(parts))
    outcomes = check(loading, tmp_path / "m.gguf", random.Random(1).sample(every, min(MUTANTS, len(every))))
    assert any(said.startswith("refused") for said in outcomes.values())
