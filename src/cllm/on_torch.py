"""Opening a model on torch: whether it is there, whether it runs this model, and how much memory K and V get.

torch takes seconds to import, so this module does not, until one of its functions must.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cllm.config import Config
from cllm.errors import ModelError
from cllm.kv.memory import bytes_per_token
from cllm.machine import Room, mib, read_rooms
from cllm.models.fetch import show_progress
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.resources import Weights, choose_kv_bytes

if TYPE_CHECKING:
    from cllm.backends.torch.backend import TorchBackend

GPU_KV_FRACTION = 0.9
"""A GPU is there for the model alone."""
Model = GGUFModel | HFModel


def has_gpu(config: Config) -> bool:
    """Whether torch is there and may use a GPU. The driver is asked for first."""
    if config.backend.torch.device == "cpu" or find_spec("torch") is None:
        return False
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        import torch
    except (OSError, ImportError):
        return False
    return bool(torch.cuda.is_available())


def asks_for_gpu(config: Config) -> bool:
    """Whether a GPU was asked for by name, which only torch can use."""
    return config.backend.torch.device.startswith("cuda")


def torch_refusal(model: Model) -> str | None:
    """Why torch cannot run the model, or None."""
    try:
        from cllm.backends.torch.sources import unsupported
    except ImportError as error:
        return f'torch does not load ({error}); install it with: pip install "cllm[torch]"'
    return unsupported(model)


def torch_weights(config: Config, model: Model, name: str) -> Weights:
    """What they will take; nothing is loaded."""
    from cllm.backends.torch.device import choose_device, choose_dtype
    from cllm.backends.torch.sources import decoder_of
    from cllm.backends.torch.weights import weight_bytes

    dtype = choose_dtype(config.backend.torch.dtype, choose_device(config.backend.torch.device))
    return Weights(name, weight_bytes(decoder_of(model), dtype))


def open_torch(config: Config, model: Model, name: str, threads: int, running: int) -> tuple[TorchBackend, int]:
    """The backend and its K/V budget: on a GPU what is free there after loading, otherwise as on every CPU.

    `running` sequences may be computed at once.
    """
    from cllm.backends.torch.backend import TorchBackend
    from cllm.backends.torch.device import choose_device, choose_dtype, dtype_name, read_gpu_room

    settings, resources = config.backend.torch, config.resources
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    weights = torch_weights(config, model, name)
    kv_bytes: int | None = None
    if device.type == "cuda":
        check_gpu_room(weights, dtype_name(dtype), read_gpu_room(device))
    else:
        kv_bytes = choose_kv_bytes(resources, weights, read_rooms())
    with show_progress(f"Loading {name}", None) as report:
        backend = TorchBackend(
            model,
            device=str(device),
            dtype=settings.dtype,
            kv_type=resources.kv_type_k,
            invariant=settings.batch_invariant,
            threads=threads,
            rows=running,
            progress=report,
        )
    if kv_bytes is None:
        try:
            kv_bytes = _gpu_kv_bytes(config, backend, weights, running)
        except BaseException:
            backend.close()
            raise
    return backend, kv_bytes


def check_gpu_room(weights: Weights, dtype: str, room: Room) -> None:
    """Raise before anything is loaded if it cannot end well."""
    if weights.size >= room.free:
        raise ModelError(
            f"the weights of {weights.name} take {mib(weights.size)} as {dtype}, but {mib(room.free)} of {room.name} "
            f"({mib(room.limit)}) are free; use a smaller model, a smaller backend.torch.dtype, or another "
            "backend.torch.device"
        )


def _gpu_kv_bytes(config: Config, backend: TorchBackend, weights: Weights, running: int) -> int:
    """A share of what the weights and the largest step leave, less the blocks that are nobody's."""
    resources = config.resources
    if "kv_memory_fraction" not in resources.model_fields_set:
        resources = resources.model_copy(update={"kv_memory_fraction": GPU_KV_FRACTION})
    left = backend.room((config.scheduler.max_step_tokens or backend.preferred_step_tokens) + running, running)
    room = replace(left, free=left.free + weights.size)
    shape = backend.shape
    token_bytes = bytes_per_token(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        type_k=resources.kv_type_k,
        type_v=resources.kv_type_v,
    )
    spare = backend.spare_blocks * resources.block_size * token_bytes
    return choose_kv_bytes(resources, weights, [room]) - spare
