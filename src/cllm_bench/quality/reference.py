"""The truth: Hugging Face transformers on a GGUF file's dequantised weights, all in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from cllm.machine import install_packages
from cllm.models.dequantise import DEQUANTISED, dequantised_rows
from cllm.models.gguf import GGUFModel, TensorFile
from cllm.models.gguf_decoder import decoder_spec, unsupported_reason
from cllm.models.gguf_rotation import FREQUENCIES
from cllm.models.spec import ModelSpec, Rotation
from cllm.models.tensors import hf_name, in_halves
from cllm_bench.errors import BenchError

Floats = NDArray[np.float32]

MAJOR = "5"
"""Versions differ in the names of parameters and modules."""
INSTALL = install_packages("torch", "transformers>=5,<6")
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FLOATS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


def check_installed() -> None:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise BenchError(
            f"cllm bench truth needs torch and transformers; {error.name} is not installed: {INSTALL}"
        ) from error
    if transformers.__version__.split(".")[0] != MAJOR:
        raise BenchError(
            f"cllm bench truth needs transformers {MAJOR}; {transformers.__version__} is installed: {INSTALL}"
        )


class Reference:
    """One model in transformers. Call `check_installed` before."""

    def __init__(self, model: GGUFModel, *, threads: int) -> None:
        import torch
        import transformers

        reason = unsupported_reason(model, DEQUANTISED | _FLOATS)
        if reason is not None:
            raise BenchError(f"{model.path}: the truth cannot be computed: {reason}")
        spec = decoder_spec(model)
        rotation, head_dim = spec.layers[0].attends.rotation, spec.layers[0].attends.head_dim_k
        if spec.architecture not in _ARCHITECTURES or rotation is None or rotation.dims < head_dim:
            raise BenchError(f"{model.path}: the truth is known of {', '.join(_ARCHITECTURES)} that turn whole heads")
        torch.set_num_threads(threads)
        self._torch = torch
        config = transformers.AutoConfig.for_model(spec.architecture, **_config(spec))
        with torch.device("meta"):  # no memory, and no random numbers, for what is loaded anyway
            network = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        weights = {name: torch.from_numpy(values) for name, values in _weights(model)}
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        network.load_state_dict(weights, strict=True, assign=True)
        network.model.rotary_emb.inv_freq = torch.from_numpy(_frequencies(rotation))
        self._network: Any = network.eval()
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}

    def logits(self, tokens: Sequence[int]) -> Floats:
        """A row for every position."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([list(tokens)])
            found: Floats = self._network(ids, use_cache=False).logits[0].numpy()
        return found


def _config(spec: ModelSpec) -> dict[str, Any]:
    attention, feed_forward = spec.layers[0].attends, spec.layers[0].feeds
    return {
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.n_embd,
        "intermediate_size": feed_forward.size,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim_k,
        "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.context_length,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        # Llama has biases of all four matrices or of none; qwen2's are always there.
        "attention_bias": attention.qkv_bias and spec.architecture == "llama",
    }


def _weights(model: GGUFModel) -> Iterator[tuple[str, Floats]]:
    spec = model.spec
    with TensorFile(model) as file:
        for name, info in model.tensors.items():
            if name == FREQUENCIES:
                continue
            values = np.concatenate(list(dequantised_rows(file, model, name))).reshape(info.shape[::-1])
            role = name.split(".")[-2]
            if role in ("attn_q", "attn_k") and spec.architecture == "llama":
                values = in_halves(values, spec.layers[0].attends.head_dim_k)
            yield hf_name(name), np.ascontiguousarray(values)
    if spec.architecture == "llama" and "blk.0.attn_q.bias" in model.tensors:
        for layer in range(spec.n_layers):
            yield f"model.layers.{layer}.self_attn.o_proj.bias", np.zeros(spec.n_embd, np.float32)


def _frequencies(rotation: Rotation) -> Floats:
    """Radians that each pair of dimensions turns from one position to the next."""
    found = rotation.base ** -(np.arange(0, rotation.dims, 2) / rotation.dims) / rotation.scale
    return (found if rotation.divisors is None else found / np.array(rotation.divisors)).astype(np.float32)
