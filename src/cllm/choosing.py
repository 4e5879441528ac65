"""Which backend runs a model, and what memory that will take, known before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cllm.backends.base import Backend
from cllm.config import Config
from cllm.errors import ConfigError, ModelError
from cllm.kv.disk.contents import Identity, identity
from cllm.kv.memory import SLOT_PADDING, bytes_per_token
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.models.registry import resolve
from cllm.models.shape import ModelShape
from cllm.on_disk import ModelFiles, files_of
from cllm.on_torch import Model, asks_for_gpu, device_of, gpu_refusal, has_gpu, torch_refusal, torch_weights
from cllm.resources import Weights
from cllm.sampling_defaults import SamplingDefaults, sampling_defaults

log = logging.getLogger("cllm")

Kind = Literal["native", "llama_cpp", "torch", "fake"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a model takes once it is loaded."""

    name: str
    kind: Kind
    weights: int
    """Bytes."""
    token_bytes: int
    """Of K/V, for each token."""
    context: int
    """Tokens of the longest sequence."""
    is_elastic: bool
    """Whether its K/V memory can grow and shrink while it is loaded."""
    device: str = "cpu"
    """In whose memory all of it lies."""
    files: ModelFiles | None = None
    """Of which all of this was read."""
    weight_type: str | None = None
    """How the weights are stored, or most of them."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def context_bytes(self) -> int:
        """K/V of one sequence with a whole context: with less than that, a model cannot do what it promises."""
        return -(-self.context // SLOT_PADDING) * SLOT_PADDING * self.token_bytes

    @property
    def is_current(self) -> bool:
        """Whether the files are still those."""
        try:
            return self.files is None or all(map(_is_same, self.files.paths, self.files.identities))
        except OSError:
            return False


def _is_same(path: Path, found: Identity) -> bool:
    return identity(path) == found


def estimate(config: Config) -> Estimate:
    """Raises `ModelError` for a model that nothing here can run, `ConfigError` for what it cannot do."""
    files, weight_type = None, None
    sampling = sampling_defaults(config, None)
    if config.backend.type == "fake":
        from cllm.backends.fake import FakeBackend

        kind: Kind = "fake"
        name, shape, weights = "fake", FakeBackend(vocab_size=config.backend.fake.vocab_size).shape, 0
    else:
        model = open_model(config)
        files = files_of(model)
        kind = choose_backend(config, model)
        name, shape = name_of(config, model), model.shape
        weights = weights_of(config, model, kind).size
        weight_type, sampling = model.weight_type, sampling_defaults(config, model)
    is_elastic = kind == "native" or (kind == "fake" and config.backend.fake.layout == "paged")
    device = device_of(config) if kind == "torch" else "cpu"
    context = context_of(config, shape, Backend.context_cap if device == "cpu" else None)
    token_bytes = token_bytes_of(config, shape)
    return Estimate(name, kind, weights, token_bytes, context, is_elastic, device, files, weight_type, sampling)


def context_of(config: Config, shape: ModelShape, cap: int | None) -> int:
    trained, asked = shape.context_length, config.resources.max_context_length
    if asked is not None and asked > trained:
        raise ConfigError(
            f"resources.max_context_length is {asked}, but the model was trained for {trained} tokens; "
            f"set it to at most {trained}"
        )
    return asked or min(trained, cap or trained)


def token_bytes_of(config: Config, shape: ModelShape) -> int:
    return bytes_per_token(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        type_k=config.resources.kv_type_k,
        type_v=config.resources.kv_type_v,
    )


def open_model(config: Config) -> Model:
    """The model's header, and what else is known without its weights."""
    path = resolve(config.model.name)
    return HFModel.open(path) if path.is_dir() else GGUFModel.open(path)


def name_of(config: Config, model: Model) -> str:
    """What clients call it, unless the configuration has an alias."""
    asked = config.model.name
    if isinstance(model, HFModel):
        return asked.rpartition("/")[2] if asked.startswith("hf:") else model.name
    return model.path.stem if Path(asked).suffix or asked.startswith("hf:") else asked


def choose_backend(config: Config, model: Model) -> Literal["native", "llama_cpp", "torch"]:
    """The backend that was asked for; with auto, torch where it has its own kind of model or a GPU, then native, then
    llama_cpp."""
    asked = config.backend.type
    if isinstance(model, HFModel) and asked not in ("auto", "torch"):
        raise ModelError(
            f"{asked} cannot run {model.name}: it is a Hugging Face directory; use --backend torch, or a .gguf file"
        )
    must = asked == "torch" or (asked == "auto" and asks_for_gpu(config))
    if isinstance(model, HFModel) or must or (asked == "auto" and has_gpu(config)):
        by_choice = not (must or isinstance(model, HFModel))
        refusal = torch_refusal(model) or (gpu_refusal(config, model) if by_choice else None)
        if refusal is None:
            return "torch"
        if isinstance(model, HFModel):
            raise ModelError(f"torch cannot run {model.name}: {refusal}")
        if must:
            raise ModelError(f"torch cannot run {model.path.name}: {refusal}; use --backend auto and --device auto")
        log.warning("the GPU is not used: torch cannot run %s: %s", model.path.name, refusal)
    assert isinstance(model, GGUFModel)
    return _choose_for_cpu(config, model)


def _choose_for_cpu(config: Config, model: GGUFModel) -> Literal["native", "llama_cpp"]:
    if config.backend.type == "llama_cpp":
        return "llama_cpp"
    refusal = _native_refusal(model)
    if refusal is None:
        return "native"
    if config.backend.type == "native":
        raise ModelError(f"native cannot run {model.path.name}: {refusal}; use --backend llama_cpp")
    _check_llama_cpp_installed(f"native cannot run {model.path.name}: {refusal}")
    log.warning("native cannot run %s: %s; using llama_cpp", model.path.name, refusal)
    return "llama_cpp"


def weights_of(config: Config, model: Model, kind: str) -> Weights:
    if kind == "torch" or isinstance(model, HFModel):
        return torch_weights(config, model, name_of(config, model))
    if kind == "native":
        from cllm.backends.native.sizes import packed_bytes

        return Weights(model.path.name, packed_bytes(model))
    settings = config.backend.llama_cpp
    return Weights(model.path.name, model.size_bytes, mapped=settings.mmap and not settings.mlock)


def _native_refusal(model: GGUFModel) -> str | None:
    """Why the native engine cannot run the model, or None."""
    try:
        from cllm.backends.native import unsupported
    except ImportError as error:
        return f"its extension does not load ({error}); install cLLM again"
    return unsupported(model)


def _check_llama_cpp_installed(otherwise: str) -> None:
    from cllm.backends.llama_cpp.library import load_library

    try:
        load_library()
    except ModelError as error:
        raise ModelError(f"{otherwise}; and {error}") from error
