"""Our reader of safetensors headers beside the library's: what we accept, it accepts, with the same tensors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from cllm.errors import ModelError
from cllm.models.safetensors_file import read_header
from cllm.models.unchanged_file import UnchangedFile

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.float16),
    "c": np.array(7.0, dtype=np.float64),
    "d": np.zeros((0, 3), dtype=np.float32),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "np"})
    return tmp_path / "model.safetensors"


def test_the_librarys_files_are_read(file: Path) -> None:
    stamp, found = read_header(file)
    assert found.keys() == TENSORS.keys()
    with UnchangedFile(file, stamp, "") as opened:
        for name, tensor in TENSORS.items():
            raw = opened.read_bytes(found[name].offset, found[name].size, name).copy()
            assert found[name].shape == tensor.shape and raw.tobytes() == tensor.tobytes()


def mutated(data: bytes, random: random.Random) -> bytes:
    """A byte that is another, a cut, or a number of the header that is another."""
    kind = random.randrange(4)
    if kind == 0:
        at = random.randrange(len(data))
        return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[: random.randrange(len(data))]
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    entry = header[random.choice([name for name in header if name != "__metadata__"])]
    numbers = entry[random.choice(["shape", "data_offsets"])]
    if numbers:
        at = random.randrange(len(numbers))
        numbers[at] = random.choice([numbers[at] + 1, numbers[at] * 2, 0, 2**63, -1, numbers[at] + 8])
    if kind == 3:
        entry["dtype"] = random.choice(["F32", "F16", "BF16", "I64", "F99"])
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def test_what_the_library_refuses_is_refused(file: Path) -> None:
    data, chance, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(400):
        file.write_bytes(mutated(data, chance))
        try:
            _, found = read_header(file)
        except ModelError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        with safe_open(file, framework="np") as library:
            shapes = {name: tuple(library.get_slice(name).get_shape()) for name in library.keys()}  # noqa: SIM118
        assert {name: tensor.shape for name, tensor in found.items()} == shapes
    assert 200 < refused < 400
