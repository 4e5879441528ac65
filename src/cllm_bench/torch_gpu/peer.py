"""Hugging Face transformers on the same machine: `generate`, greedy, with scaled dot product attention."""

from __future__ import annotations

import time
from typing import Any, cast

import torch

from .models import config_of
from .work import Keep, Place


async def peer(place: Place, keep: Keep) -> None:
    import transformers

    sizes = place.sizes
    for name in ("8B", "1B"):
        config = transformers.LlamaConfig(**config_of(place.shape(name)))
        with torch.device(place.device):
            model = cast(Any, transformers.AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16).eval()
        for label, rows in (("one stream", 1), ("many", sizes.many)):
            prompt = torch.randint(0, config.vocab_size, (rows, sizes.stream_in), device=place.device)
            rate = _rate(model, prompt, sizes.stream_out)
            keep(f"{name} {label} with transformers", {"tokens_per_s": rate})
        del model


def _rate(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    best = 0.0
    for _ in range(2):
        started = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
            assert found.shape[1] == prompt.shape[1] + tokens
            found.cpu()
        best = max(best, len(prompt) * tokens / (time.perf_counter() - started))
    return best
