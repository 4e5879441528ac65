"""Packed weights are as small as the file's, load in pieces as at once, and give a row the same bits in any company.

Few rows read a tile as it is packed, many open it first.
"""

from __future__ import annotations

import io
import logging
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cllm._native import Engine, instruction_sets
from cllm.backends.native import loader
from cllm.backends.native.loader import load_engine
from cllm.models.gguf import GGUFModel
from cllm.models.load_progress import LoadProgress
from native_kit import WEIGHT_TYPES, build_model, write_model
from spec_kit import make_spec
from step_kit import Floats, Part, Rig, random_tokens

ALL_TYPES = pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
Q8_0 = 8


@cache
def model_of(weight_type: str, folder: Path) -> Path:
    # 13 tiles of the vocabulary, the last one ragged; 6 of the feed-forward
    options = {"n_embd": 256, "n_ff": 512, "n_vocab": 203, "n_layers": 1, "tied": False}
    return write_model(folder / f"{weight_type}.gguf", weight_type=weight_type, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@ALL_TYPES
def test_packed_weights_take_no_more_than_in_the_file(weight_type: str, folder: Path) -> None:
    model = build_model(weight_type=weight_type, n_embd=256, n_ff=512, n_vocab=1001, n_layers=1)
    header = GGUFModel.open(model.write(folder / "size.gguf"))
    raw = sum(tensor.raw.nbytes for tensor in model.tensors.values() if tensor.raw.ndim == 2)
    assert raw <= load_engine(header, threads=1).weight_bytes <= 1.03 * raw


@pytest.mark.parametrize("instruction_set", instruction_sets())
@ALL_TYPES
def test_a_row_is_the_same_bits_among_any_number_of_rows(weight_type: str, instruction_set: str, folder: Path) -> None:
    rig = Rig(model_of(weight_type, folder), instruction_set=instruction_set, blocks=40)
    tokens = random_tokens(203, 33, seed=5)
    alone = [rig.step(Part([token], 0, [0]))[0] for token in tokens]
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 33):
        together = rig.step(*(Part([token], 0, [i]) for i, token in enumerate(tokens[:count])))
        np.testing.assert_array_equal(together.view(np.uint32), np.array(alone[:count]).view(np.uint32))


def logits_of(path: Path) -> Floats:
    return Rig(path).run([3, 14, 15, 92], [0])


@ALL_TYPES
def test_pieces_are_the_whole(weight_type: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_of(weight_type, folder)
    whole = logits_of(path)
    monkeypatch.setattr(loader, "_PIECE_BYTES", 1)  # so every tile is one
    seen: list[tuple[int, int]] = []
    load_engine(GGUFModel.open(path), threads=2, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 60 and seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    np.testing.assert_array_equal(logits_of(path).view(np.uint32), whole.view(np.uint32))


def new_engine() -> Engine:
    return Engine(instruction_set="auto", threads=1, spec=make_spec(n_embd=32, n_heads=1, n_ff=32, n_vocab=40))


@pytest.mark.parametrize(
    ("rows", "first", "message"),
    [
        (40, 16, "no whole tiles"),
        (15, 0, "no whole tiles"),
        (16, 8, "no whole tiles"),
        (48, 0, "no whole tiles"),
        (0, 0, "no whole tiles"),
        (16, -16, "first_row is -16"),
        (16, 16, "does not go on at row 16"),
    ],
)
def test_a_piece_out_of_place_is_refused(rows: int, first: int, message: str) -> None:
    engine = new_engine()
    with pytest.raises(ValueError, match=message):
        engine.load(-1, "token_embd", Q8_0, 40, 32, np.zeros(rows * 34, np.uint8), first)


def test_a_matrix_of_which_rows_are_missing_is_refused() -> None:
    engine = new_engine()
    engine.load(-1, "token_embd", Q8_0, 40, 32, np.zeros(16 * 34, np.uint8), 0)
    with pytest.raises(ValueError, match="token_embd is incomplete"):
        engine.load(-1, "output", Q8_0, 40, 32, np.zeros(40 * 34, np.uint8))
    with pytest.raises(ValueError, match="token_embd is incomplete"):
        engine.seal()
    with pytest.raises(ValueError, match="does not go on at row 32"):
        engine.load(-1, "token_embd", Q8_0, 40, 32, np.zeros(8 * 34, np.uint8), 32)
    engine.load(-1, "token_embd", Q8_0, 40, 32, np.zeros(24 * 34, np.uint8), 16)
    with pytest.raises(ValueError, match="was loaded before"):
        engine.load(-1, "token_embd", Q8_0, 40, 32, np.zeros(16 * 34, np.uint8), 0)


# --- what is shown meanwhile ---


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_load_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with (
        caplog.at_level(logging.INFO),
        LoadProgress("some.gguf", console=Console(file=io.StringIO()), clock=clock) as progress,
    ):
        for second in range(11):
            clock.now = float(second)
            progress(second * 10**8, 10**9)
    assert [record.getMessage() for record in caplog.records] == [
        "Loading some.gguf: 200 of 1000 MB (20%)",
        "Loading some.gguf: 700 of 1000 MB (70%)",
    ]


@pytest.mark.parametrize(("seconds", "shown"), [(1.0, False), (2.0, True)])
def test_a_terminal_shows_a_bar_if_it_takes_long(seconds: float, shown: bool) -> None:
    clock, screen = Clock(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with LoadProgress("some.gguf", console=console, clock=clock) as progress:
        clock.now = seconds
        progress(5 * 10**8, 10**9)
        progress(9 * 10**8, 10**9)
    assert ("Loading some.gguf" in screen.getvalue()) is shown
