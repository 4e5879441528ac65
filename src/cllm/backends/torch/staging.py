"""What a step sends to the device, and what comes back: one copy each way.

On a GPU both ends of a copy that is under way are pinned memory of torch's, which does not hand a piece out again
before the copy is done, however many steps are queued behind each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[Any]
"""int32 or float64."""
ALIGNED_WORDS = 4


def upload(parts: Sequence[Numbers], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """Arrays on the device, as parts of one tensor: of `into`, whose beginning they fill, or of a new one."""
    places, total = _places(parts)
    host = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    words = host.numpy()
    for part, place in zip(parts, places, strict=True):
        flat = part.reshape(-1).view(np.int32)
        words[place : place + len(flat)] = flat
    if into is not None:
        moved = into[:total]
        moved.copy_(host, non_blocking=True)
    else:
        moved = host.to(device, non_blocking=True)
    return [_part(moved, part, place) for part, place in zip(parts, places, strict=True)]


def download(values: Tensor) -> Tensor:
    """A copy on the host, there once what is queued now is done."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _places(parts: Sequence[Numbers]) -> tuple[list[int], int]:
    """Where each begins, in words of 32 bits. All at multiples of 16 bytes: a kernel is compiled anew for pointers that
    are not."""
    places, total = [], 0
    for part in parts:
        places.append(total)
        total += aligned(part.size * (2 if part.dtype == np.float64 else 1))
    return places, total


def aligned(words: int) -> int:
    return -(-words // ALIGNED_WORDS) * ALIGNED_WORDS


def _part(moved: Tensor, part: Numbers, place: int) -> Tensor:
    if part.dtype == np.float64:
        return moved[place : place + 2 * part.size].view(torch.float64).view(part.shape)
    return moved[place : place + part.size].view(part.shape)
