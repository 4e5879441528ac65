"""How much memory a model will take, known before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cllm.backends.base import BackendTraits
from cllm.config import Config
from cllm.kv.disk.model_digest import identity
from cllm.kv.groups import GroupCost
from cllm.kv.sizing import SLOT_PADDING
from cllm.loading.backend_choice import choose_backend, name_of, open_model_file, weights_of
from cllm.loading.context import context_of
from cllm.loading.disk_cache import ModelFiles, files_of
from cllm.loading.resources import group_costs, kv_layout, local_shape
from cllm.loading.sampling_defaults import SamplingDefaults, sampling_defaults
from cllm.loading.torch_model import device_of
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec

BackendKind = Literal["native", "llama_cpp", "torch", "fake"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a model will take once it is loaded."""

    name: str
    kind: BackendKind
    weights: int
    """Bytes."""
    token_bytes: int
    """K/V bytes per token."""
    context: int
    """Tokens of the longest sequence."""
    is_elastic: bool
    """Whether its K/V memory can grow and shrink while it is loaded."""
    device: str = "cpu"
    """The device whose memory it takes."""
    files: ModelFiles | None = None
    """The files this was read from."""
    weight_type: str | None = None
    """The type of most weights."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    groups: tuple[GroupCost, ...] = ()
    """Layers with equal needs."""

    @property
    def local_bytes(self) -> int:
        """What a sequence takes however long it is."""
        return sum(group.bytes_per_sequence or 0 for group in self.groups)

    @property
    def context_bytes(self) -> int:
        """K/V of one sequence of full length. With less, a model cannot serve the context it promises."""
        return -(-self.context // SLOT_PADDING) * SLOT_PADDING * self.token_bytes + self.local_bytes

    @property
    def is_current(self) -> bool:
        """Whether the files have not changed since."""
        try:
            return self.files is None or tuple(map(identity, self.files.paths)) == self.files.identities
        except OSError:
            return False


def estimate(config: Config) -> Estimate:
    """Raises `ModelError` if no backend can run the model, `ConfigError` if the settings do not suit it."""
    files, weight_type = None, None
    sampling = sampling_defaults(config, None)
    if config.backend.type == "fake":
        from cllm.loading.fake_model import open_fake

        kind: BackendKind = "fake"
        name, spec, weights = "fake", open_fake(config).spec, 0
    else:
        model = open_model_file(config)
        files = files_of(model)
        kind = choose_backend(config, model)
        name, spec = name_of(config, model), model.spec
        if kind != "llama_cpp" and isinstance(model, GGUFModel):
            spec = decoder_spec(model)  # with the windows and states of its layers
        weights = weights_of(config, model, kind).size
        weight_type, sampling = model.weight_type, sampling_defaults(config, model)
    is_elastic = kind == "native" or (kind == "fake" and config.backend.fake.layout == "paged")
    device = device_of(config) if kind == "torch" else "cpu"
    context = context_of(config, spec)
    in_slots = kind == "llama_cpp"
    layout = kv_layout(config, spec, frees_windows=not in_slots and device == "cpu", in_slots=in_slots)
    shape = local_shape(config, layout, BackendTraits.preferred_step_tokens)
    groups = group_costs(layout, shape, context, spec.state_bytes if in_slots else 0)
    return Estimate(
        *(name, kind, weights, layout.token_bytes, context, is_elastic, device, files, weight_type, sampling, groups)
    )
