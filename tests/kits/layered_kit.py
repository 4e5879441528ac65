"""Tiny shapes of every architecture whose layers differ, for files with random weights."""

from __future__ import annotations

from cllm_bench.kernels.layered import gemma3, gemma4, granite_hybrid, lfm2, qwen35

N_VOCAB = 900
_HEADS = {"n_embd": 256, "n_heads": 2, "n_kv_heads": 1, "n_ff": 512, "n_vocab": N_VOCAB}
_ATTENDS = [False, True, False]

TINY_SHAPES = {
    "gemma3": gemma3(n_layers=7, window=32, **_HEADS),
    "gemma4": gemma4(n_layers=12, window=32, shared=6, per_layer=256, **_HEADS),
    "qwen35": qwen35(n_layers=4, key_heads=2, value_heads=4, **_HEADS),
    "lfm2": lfm2(attends=_ATTENDS, **_HEADS),
    "granitehybrid": granite_hybrid(attends=_ATTENDS, ssm_heads=8, **_HEADS),
}
