"""What must be known of a loaded model to prepare requests for it, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass

from cllm.backends.base import BackendTraits
from cllm.kv.groups import GroupCost
from cllm.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Can be sent to another process."""

    name: str
    """The model's own, not its alias."""
    weights: str
    """Equal for equal model files, wherever they are."""
    file_bytes: int
    """The size of all its files; 0 if there are none."""
    traits: BackendTraits
    spec: ModelSpec
    max_context: int
    context_advice: str
    """For a client whose prompt is longer than that."""
    bytes_per_token: int
    """In all layers, or those that attend to everything where others are apart."""
    groups: tuple[GroupCost, ...]
    """Layers with equal needs; the first are those."""
    unit_tokens: int
    """The smallest piece of K/V memory."""
