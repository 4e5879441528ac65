"""Settings of the backends: what runs the model, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cllm.config.section import Section

BackendType = Literal["auto", "native", "llama_cpp", "torch", "fake"]
InstructionSet = Literal["auto", "amx", "avx512", "avxvnni", "avx2", "generic"]
LLAMA_CPP_MAX_SEQ = 256
"""llama.cpp's compiled-in limit of sequences per context."""


class NativeConfig(Section):
    instruction_set: InstructionSet = Field(
        default="auto",
        description="CPU instruction set for the native engine and for sampling; auto: the best one the CPU has",
    )


class LlamaCppConfig(Section):
    n_seq_max: int = Field(
        default=8,
        ge=1,
        le=LLAMA_CPP_MAX_SEQ,
        description="maximum number of concurrent sequences, each with a slot for a full context",
    )
    slots_on_demand: bool = Field(
        default=True,
        description="allocate memory for slots when they are needed and free it when idle; false: allocate all at the "
        "start",
    )
    n_batch: int = Field(default=2048, ge=1, le=1 << 20, description="maximum number of tokens per llama_decode call")
    n_ubatch: int = Field(
        default=512, ge=1, le=1 << 20, description="maximum number of tokens llama.cpp computes at a time"
    )
    flash_attention: bool = Field(default=True, description="use flash attention; required for a quantised kv_type_v")
    mmap: bool = Field(default=True, description="map the model file into memory instead of reading it")
    mlock: bool = Field(default=False, description="lock the model in memory, so that it is never swapped out")


class TorchConfig(Section):
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="auto, cpu, cuda or cuda:1; auto: a GPU if there is one",
    )
    dtype: Literal["auto", "bf16", "f16", "f32", "fp8"] = Field(
        default="auto",
        description="type of the weights in memory; auto: bf16 on a GPU (f16 below compute capability 8.0), f32 on a "
        "CPU; fp8: half the size of bf16 (a GPU needs compute capability 8.9)",
    )
    batch_invariant: bool = Field(
        default=False,
        description="make answers bit-identical whatever else runs in the batch; slower (native always does this)",
    )


class FakeConfig(Section):
    layout: Literal["paged", "slots"] = Field(default="paged", description="layout of the KV cache to imitate")
    latency_ms: float = Field(default=0.0, ge=0, le=60_000, description="duration of every step")
    vocab_size: int = Field(
        default=320, ge=258, le=1 << 20, description="size of the vocabulary: 256 bytes, BOS, EOS and fillers"
    )


class BackendConfig(Section):
    type: BackendType = Field(
        default="auto",
        description="engine that runs the model; auto: torch for Hugging Face directories or with a GPU, otherwise "
        "native, or llama_cpp for models that native cannot run",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="number of compute threads (null: based on the CPUs available to cLLM)"
    )
    native: NativeConfig = NativeConfig()
    llama_cpp: LlamaCppConfig = LlamaCppConfig()
    torch: TorchConfig = TorchConfig()
    fake: FakeConfig = FakeConfig()
