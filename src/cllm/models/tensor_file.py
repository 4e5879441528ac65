"""The bytes of a model's tensors, one after another.

They are read and not mapped, so that a file which another process cuts short or a disk that fails is an error and not
a deadly signal, and so that nothing of the file stays in our memory. Each tensor takes the place of the one before it.
"""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel, unreadable


class TensorFile:
    """`with TensorFile(model) as file:` fails, also at its end, if the file is not the one that `model` describes."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self._room = np.empty(0, np.uint8)

    def __enter__(self) -> TensorFile:
        try:
            self._file = self._model.path.open("rb", buffering=0)
        except OSError as error:
            raise unreadable(self._model.path, error) from error
        try:
            self._model.check_unchanged(os.fstat(self._file.fileno()))
        except BaseException:
            self._file.close()
            raise
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            # A change explains what else went wrong with the data better than that does.
            if kind is None or issubclass(kind, ModelError):
                self._model.check_unchanged(os.fstat(self._file.fileno()))

    def read(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, until the next call."""
        info = self._model.tensors[name]
        if info.size > self._room.size:
            self._room = np.empty(0, np.uint8)  # not both at once
            self._room = np.empty(info.size, np.uint8)
        data = self._room[: info.size]
        view, have = memoryview(data.data), 0
        try:
            self._file.seek(info.offset)
            while have < info.size:
                count = self._file.readinto(view[have:])
                if not count:
                    raise ModelError(
                        f"{self._model.path}: was cut short while it was being loaded, inside the tensor {name}; "
                        "start again when it is complete"
                    )
                have += count
        except OSError as error:
            raise unreadable(self._model.path, error) from error
        return data
