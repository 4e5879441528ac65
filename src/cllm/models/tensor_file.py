"""The bytes of a GGUF model's tensors, one after another. Each takes the place of the one before it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cllm.models.gguf import ADVICE, GGUFModel
from cllm.models.stamped_file import StampedFile


class TensorFile(StampedFile):
    """`with TensorFile(model) as file:` fails, also at its end, if the file is not the one that `model` describes."""

    def __init__(self, model: GGUFModel) -> None:
        super().__init__(model.path, model.stamp, ADVICE)
        self._model = model

    def __enter__(self) -> TensorFile:
        super().__enter__()
        return self

    def read(self, name: str, start: int = 0, size: int | None = None) -> NDArray[np.uint8]:
        """The tensor's bytes, or `size` of them from `start` on, until the next call."""
        info = self._model.tensors[name]
        return self.read_bytes(info.offset + start, info.size - start if size is None else size, f"the tensor {name}")
