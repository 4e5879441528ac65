"""Opening a model on torch: is torch installed, can it run this model, how much K/V memory does it get?

torch takes seconds to import, so only the functions that need it do.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cllm.config import Config
from cllm.config.consistency import check_backend_consistency
from cllm.errors import BackendError, CLLMError, ConfigError, ModelError
from cllm.loading.resources import Weights, choose_kv_bytes, kv_bytes_per_token
from cllm.machine import MemoryLimit, install_extra, mib, read_memory_limits
from cllm.models.fetch import show_progress
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel

if TYPE_CHECKING:
    import torch

    from cllm.backends.torch.backend import TorchBackend

GPU_KV_FRACTION = 0.9
"""The default of resources.kv_memory_fraction on a GPU, which nothing else uses."""
Model = GGUFModel | HFModel


def has_gpu(config: Config) -> bool:
    """Whether torch is installed and may use a GPU. The driver is looked for first: that is fast."""
    if config.backend.torch.device == "cpu" or find_spec("torch") is None:
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
        import torch
    except (OSError, ImportError):
        return False
    return bool(torch.cuda.is_available())


def asks_for_gpu(config: Config) -> bool:
    """Whether the settings name a GPU, which only torch can use."""
    return config.backend.torch.device.startswith("cuda")


def torch_refusal(model: Model) -> str | None:
    """Why torch cannot run the model, or None."""
    try:
        from cllm.backends.torch.sources import unsupported
    except ImportError as error:
        return f"torch does not load ({error}); install it with: {install_extra('torch')}"
    return unsupported(model)


def gpu_refusal(config: Config, model: Model) -> str | None:
    """Why a model that torch can run would not start with these settings on this GPU, or None. Nothing is loaded."""
    from cllm.backends.torch.device import choose_device, choose_operations, unsupported_heads
    from cllm.backends.torch.sources import spec_of

    if problems := check_backend_consistency(config, "torch"):
        return problems[0]
    if config.kv.window.recent is not None:
        return f"kv.window.recent is {config.kv.window.recent}, and torch has no rolling windows"
    try:
        device = choose_device(config.backend.torch.device)
        if reason := unsupported_heads(spec_of(model), device, config.resources.kv_type_k):
            return reason
        choose_operations(device)
        _check_device(config, model, model.path.name, device)
    except CLLMError as error:
        return str(error)
    return None


def _check_device(config: Config, model: Model, name: str, device: torch.device) -> Weights:
    """Raise, before anything is loaded, if the model cannot fit or run there."""
    from cllm.backends.torch.device import check_kv_type, choose_dtype, dtype_name, read_gpu_room

    check_kv_type(config.resources.kv_type_k, device)
    weights = torch_weights(config, model, name)
    if device.type == "cuda":
        dtype = choose_dtype(config.backend.torch.dtype, device)
        check_gpu_room(weights, dtype_name(dtype), read_gpu_room(device))
    return weights


def torch_weights(config: Config, model: Model, name: str) -> Weights:
    """Their size once loaded. Loads nothing."""
    from cllm.backends.torch.device import choose_device, choose_dtype
    from cllm.backends.torch.sources import spec_of
    from cllm.backends.torch.weights import weight_bytes

    dtype = choose_dtype(config.backend.torch.dtype, choose_device(config.backend.torch.device))
    return Weights(name, weight_bytes(spec_of(model), dtype))


def device_of(config: Config) -> str:
    """Where torch would put a model."""
    from cllm.backends.torch.device import choose_device

    return str(choose_device(config.backend.torch.device))


def gpu_room(device: str) -> MemoryLimit:
    import torch

    from cllm.backends.torch.device import read_gpu_room

    return read_gpu_room(torch.device(device))


def open_torch(
    config: Config, model: Model, name: str, threads: int, running: int, most_kv: int | None = None
) -> tuple[TorchBackend, int]:
    """The backend and its K/V budget: on a GPU what is free after loading, on a CPU as for every backend.

    `running` sequences may be computed at once. One of several models gets `most_kv` bytes; on a GPU perhaps fewer,
    since what a step takes is only known once the model is loaded.
    """
    from cllm.backends.torch.backend import TorchBackend
    from cllm.backends.torch.device import choose_device

    settings, resources = config.backend.torch, config.resources
    device = choose_device(settings.device)
    weights = _check_device(config, model, name, device)
    kv_bytes = None
    if device.type != "cuda":
        kv_bytes = choose_kv_bytes(resources, weights, read_memory_limits()) if most_kv is None else most_kv
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
            kv_bytes = kv_bytes if most_kv is None else min(kv_bytes, most_kv)
        except BaseException:
            backend.close()
            raise
    return backend, kv_bytes


def check_gpu_room(weights: Weights, dtype: str, room: MemoryLimit) -> None:
    if weights.size >= room.free:
        raise ModelError(
            f"the weights of {weights.name} take {mib(weights.size)} as {dtype}, but {mib(room.free)} of {room.name} "
            f"({mib(room.limit)}) are free; use a smaller model, a smaller backend.torch.dtype, or another "
            "backend.torch.device"
        )


def _gpu_kv_bytes(config: Config, backend: TorchBackend, weights: Weights, running: int) -> int:
    """A share of what the weights and the largest step leave, less the backend's spare blocks."""
    resources = config.resources
    if "kv_memory_fraction" not in resources.model_fields_set:
        resources = resources.model_copy(update={"kv_memory_fraction": GPU_KV_FRACTION})
    step_tokens = config.scheduler.max_step_tokens or backend.traits.preferred_step_tokens
    advice = (
        f"lower scheduler.max_step_tokens (now {step_tokens}) and scheduler.max_running (now {running}), or use a "
        "smaller model or backend.torch.dtype"
    )
    try:
        left = backend.room(step_tokens + running, running)
    except (BackendError, ConfigError) as error:
        if isinstance(error, BackendError) and error.fatal:
            raise
        raise ConfigError(
            f"the weights of {weights.name} take {mib(weights.size)} of the GPU's memory, which leaves too little "
            f"for a step of {step_tokens + running} tokens; {advice}"
        ) from error
    room = replace(left, free=left.free + weights.size)
    spare = backend.spare_blocks * resources.block_size * kv_bytes_per_token(resources, backend.spec)
    if int(left.free * resources.kv_memory_fraction) <= spare:
        raise ConfigError(
            f"{left.name} ({mib(left.limit)}) has {mib(left.free)} left for the KV cache after the weights of "
            f"{weights.name} ({mib(weights.size)}) and a step of {step_tokens + running} tokens; {advice}"
        )
    return choose_kv_bytes(resources, weights, [room]) - spare
