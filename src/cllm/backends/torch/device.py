"""Which device computes, in which type, and what it means when torch fails there."""

from __future__ import annotations

import os

import torch

from cllm.backends.torch.amx import avoid_broken_amx
from cllm.backends.torch.linear import FP8
from cllm.backends.torch.operations import Operations, PlainOperations
from cllm.backends.torch.plain_sampling import PlainSampler
from cllm.backends.torch.sampling import Sampler
from cllm.errors import ConfigError
from cllm.machine import MemoryLimit, install_extra
from cllm.models.spec import ModelSpec

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "fp8": FP8}
CAPABILITIES = {"bf16": (8, 0), "fp8": (8, 9)}
"""The compute capability that a GPU must have for a type, if not every one has it."""
_NO_MEMORY = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory"),
    "cublas_status_alloc_failed",
)


def choose_device(asked: str) -> torch.device:
    """The device with this name; auto is the first GPU, or else the CPU."""
    if asked == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(asked)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        why = "this torch is built for the CPU alone" if torch.version.cuda is None else "torch finds no GPU"
        raise ConfigError(f"backend.torch.device is {asked}, but {why}; use auto or cpu")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f"backend.torch.device is {asked}, but the last one is cuda:{count - 1}; use that or auto")
    return torch.device("cuda", device.index or 0)


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """The type with this name; auto is bf16 on a GPU that has it, f16 on an older one, and f32 on the CPU."""
    if asked != "auto":
        _check_capability("backend.torch.dtype", asked, device)
        if device.type == "cpu" and asked in ("bf16", "fp8"):
            avoid_broken_amx()
        return DTYPES[asked]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if _has_type("bf16", device) else torch.float16


def check_kv_type(kv_type: str, device: torch.device) -> None:
    _check_capability("resources.kv_type_k", kv_type, device)


def _has_type(name: str, device: torch.device) -> bool:
    needed = CAPABILITIES.get(name)
    return needed is None or device.type == "cpu" or torch.cuda.get_device_capability(device) >= needed


def _check_capability(setting: str, name: str, device: torch.device) -> None:
    if not _has_type(name, device):
        found = torch.cuda.get_device_capability(device)
        has, needs = (".".join(map(str, each)) for each in (found, CAPABILITIES[name]))
        raise ConfigError(
            f"{setting} is {name}, which needs compute capability {needs}, but {device_name(device)} has {has}; use f16"
        )


def unsupported_heads(spec: ModelSpec, device: torch.device, kv_type: str) -> str | None:
    """Why the device cannot compute heads of these sizes, or None."""
    sizes = {dim for own in spec.attentions for dim in (own.head_dim_k, own.head_dim_v)}
    wrong = next((dim for dim in sizes if dim < 16 or dim & (dim - 1)), None)
    if not uses_kernels(device):
        return None
    if wrong is not None:
        return f"its heads have {wrong} dimensions, but the kernels need a power of two, at least 16 (use --device cpu)"
    if any(own.head_dim_k != own.head_dim_v for own in spec.attentions):
        return "its keys and values differ in size, which the kernels cannot compute (use --device cpu)"
    if spec.recurrent and kv_type == "int8":
        return "it carries states, beside which the kernels cannot store int8 (use f16)"
    if len(sizes) > 1 and kv_type == "int8":
        return "its layers differ in the size of their heads, which the kernels cannot store as int8 (use f16)"
    return None


def values_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of what is computed with such weights, and of those that are no matrices."""
    return torch.bfloat16 if dtype == FP8 else dtype


def choose_operations(device: torch.device) -> Operations:
    """Kernels on a GPU, plain torch elsewhere; Triton's interpreter runs the kernels anywhere, for tests."""
    if not uses_kernels(device):
        return PlainOperations()
    try:
        from cllm.backends.torch.triton_operations import TritonOperations
    except ImportError as error:
        raise ConfigError(
            f"the GPU's kernels need torch 2.8 or newer, with its Triton ({error}); install it with: "
            f"{install_extra('torch')}, or use --device cpu"
        ) from error
    return TritonOperations()


def choose_sampler(device: torch.device) -> Sampler:
    if not uses_kernels(device):
        return PlainSampler()
    from cllm.backends.torch.triton_sampling import TritonSampler

    return TritonSampler()


def uses_kernels(device: torch.device) -> bool:
    return bool(device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def read_gpu_room(device: torch.device) -> MemoryLimit:
    """Free GPU memory."""
    free, total = torch.cuda.mem_get_info(device)
    return MemoryLimit(f"the memory of {device_name(device)}", total, free, hard=True)


def device_name(device: torch.device) -> str:
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _NO_MEMORY)
