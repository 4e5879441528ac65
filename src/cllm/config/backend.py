"""Settings of the backends: what runs the model, and how."""

from __future__ import annotations

from typing import Literal

from cllm.config.section import Section, setting

BackendType = Literal["auto", "native", "llama_cpp", "torch", "fake"]
InstructionSet = Literal["auto", "amx", "avx512", "avxvnni", "avx2", "generic"]
LLAMA_CPP_MAX_SEQ = 256
"""llama.cpp's compiled-in limit of sequences per context."""


class NativeConfig(Section):
    instruction_set: InstructionSet = setting(
        "auto", "CPU instruction set for the native engine and for sampling; auto: the best one the CPU has"
    )


class LlamaCppConfig(Section):
    n_seq_max: int = setting(
        8, "maximum number of concurrent sequences, each with a slot for a full context", ge=1, le=LLAMA_CPP_MAX_SEQ
    )
    slots_on_demand: bool = setting(
        True, "allocate memory for slots when they are needed and free it when idle; false: allocate all at the start"
    )
    n_batch: int = setting(2048, "maximum number of tokens per llama_decode call", ge=1, le=1 << 20)
    n_ubatch: int = setting(512, "maximum number of tokens llama.cpp computes at a time", ge=1, le=1 << 20)
    flash_attention: bool = setting(True, "use flash attention; required for a quantised kv_type_v")
    mmap: bool = setting(True, "map the model file into memory instead of reading it")
    mlock: bool = setting(False, "lock the model in memory, so that it is never swapped out")


class TorchConfig(Section):
    device: str = setting(
        "auto", "auto, cpu, cuda or cuda:1; auto: a GPU if there is one", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$"
    )
    dtype: Literal["auto", "bf16", "f16", "f32", "fp8"] = setting(
        "auto",
        "type of the weights in memory; auto: bf16 on a GPU (f16 below compute capability 8.0), f32 on a "
        "CPU; fp8: half the size of bf16 (a GPU needs compute capability 8.9)",
    )
    batch_invariant: bool = setting(
        False, "make answers bit-identical whatever else runs in the batch; slower (native always does this)"
    )


class FakeConfig(Section):
    layout: Literal["paged", "slots"] = setting("paged", "layout of the KV cache to imitate")
    latency_ms: float = setting(0.0, "duration of every step", ge=0, le=60_000)
    vocab_size: int = setting(320, "size of the vocabulary: 256 bytes, BOS, EOS and fillers", ge=258, le=1 << 20)
    window: int = setting(0, "has two more layers, which attend to the last so many tokens (0: none)", ge=0)
    states: int = setting(0, "has one more layer, which carries a state of about so many blocks (0: none)", ge=0, le=64)


class BackendConfig(Section):
    type: BackendType = setting(
        "auto",
        "engine that runs the model; auto: torch for Hugging Face directories or with a GPU, otherwise "
        "native, or llama_cpp for models that native cannot run",
    )
    threads: int | None = setting(
        None, "number of compute threads (null: based on the CPUs available to cLLM)", ge=1, le=1024
    )
    native: NativeConfig = NativeConfig()
    llama_cpp: LlamaCppConfig = LlamaCppConfig()
    torch: TorchConfig = TorchConfig()
    fake: FakeConfig = FakeConfig()
