"""The same llama.cpp context on both sides, where cLLM is compared with the bare library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cllm.kv.memory import MIB
from cllm.models.gguf import GGUFModel

_STORE_MIB = 16
"""What cLLM may keep of finished sequences beside the slots: little, so that growth beyond it is a leak."""


@dataclass(frozen=True, slots=True)
class ContextSize:
    slots: int = 8
    slot_tokens: int = 2048

    def settings(self, model: Path) -> dict[str, Any]:
        """What makes cLLM take exactly these slots."""
        per_token = GGUFModel.open(model).shape.kv_bytes_per_token("f16", "f16")
        return {
            "backend.llama_cpp.n_seq_max": self.slots,
            "backend.llama_cpp.slots_on_demand": False,
            "resources.max_context_length": self.slot_tokens,
            "resources.kv_cache_max_memory_mb": self.slots * self.slot_tokens * per_token / MIB + _STORE_MIB,
        }
