"""From a configuration to running parts: model file, tokenizer, backend, memory plan, cache, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cllm.backends.base import Backend
from cllm.config import Config, InvalidConfigError
from cllm.config.relations import check_backend_relations
from cllm.engine.budget import StepBudget
from cllm.engine.scheduler import Scheduler
from cllm.errors import ConfigError, ModelError
from cllm.kv.manager import KVManager
from cllm.kv.memory import MIB, bytes_per_token, plan_blocks, plan_slots
from cllm.kv.ops import BlockGeometry, BlockOps, Geometry, SlotOps
from cllm.kv.paged import PagedKVManager
from cllm.kv.slots import SlotKVManager
from cllm.kv.upkeep import UpkeepSettings
from cllm.machine import offers_large_pages, read_cpus, read_rooms
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.models.registry import resolve
from cllm.on_disk import ModelFiles, OnDisk, files_of, keep_on_disk
from cllm.on_host import keep_on_host
from cllm.on_torch import Model, asks_for_gpu, gpu_refusal, has_gpu, open_torch, torch_refusal
from cllm.resources import Weights, choose_kv_bytes, choose_threads
from cllm.text.chat import CHATML, ChatTemplate, load_chat_template
from cllm.text.hf_tokenizer import load_hf_chat_template, load_hf_tokenizer
from cllm.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

log = logging.getLogger("cllm")

PAGED_MAX_RUNNING = 256
AHEAD_BYTES = 64 * MIB
"""K/V memory that an idle server has ready for who comes next."""


@dataclass(slots=True)
class Parts:
    """Everything a server needs for one model."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    backend: Backend
    scheduler: Scheduler
    bytes_per_token: int
    max_context: int
    disk: OnDisk | None = None

    def close(self) -> None:
        """When the engine has ended. Calling it again does nothing."""
        if self.disk is not None:
            self.disk.close()
        self.backend.close()


@dataclass(frozen=True, slots=True)
class _Opened:
    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    backend: Backend
    kv_bytes: int | None
    """The K/V budget; None where memory is only imitated."""
    files: ModelFiles | None = None


@dataclass(frozen=True, slots=True)
class _Memory:
    kv: KVManager
    geometry: Geometry
    max_running: int
    max_context: int


def assemble(config: Config, before_mapping: Callable[[], None] | None = None) -> Parts:
    """Load the model and build the parts. Raises `ModelError` or `ConfigError`; nothing is left open then.

    `before_mapping` is called before the model file is mapped, if it is.
    """
    opened = _open_model(config, before_mapping)
    try:
        return _build(config, opened)
    except BaseException:
        opened.backend.close()
        raise


def _open_model(config: Config, before_mapping: Callable[[], None] | None) -> _Opened:
    if config.backend.type == "fake":
        from cllm.backends.fake import FakeBackend

        fake = config.backend.fake
        backend: Backend = FakeBackend(
            vocab_size=fake.vocab_size,
            latency_s=fake.latency_ms / 1000,
            layout="slots" if fake.layout == "slots" else "blocks",
        )
        return _Opened("fake", ByteTokenizer(fake.vocab_size), _chat_template(config, None), backend, None)
    path = resolve(config.model.name)
    model = HFModel.open(path) if path.is_dir() else GGUFModel.open(path)
    files = files_of(model)
    name, tokenizer, template = _name(config, model), _load_tokenizer(model), _chat_template(config, model)
    kind = _choose_backend(config, model)
    _check_relations(config, kind)
    threads = choose_threads(config.backend.threads, read_cpus())
    if kind == "torch" or isinstance(model, HFModel):
        backend, kv_bytes = open_torch(config, model, name, threads, config.scheduler.max_running or PAGED_MAX_RUNNING)
    else:
        kv_bytes = choose_kv_bytes(config.resources, _weights(config, model, kind), read_rooms())
        if before_mapping is not None and kind == "llama_cpp" and config.backend.llama_cpp.mmap:
            before_mapping()
        backend = (_open_native if kind == "native" else _open_llama_cpp)(config, model, threads)
    return _Opened(name, tokenizer, template, backend, kv_bytes, files)


def _name(config: Config, model: Model) -> str:
    """What clients call it, unless the configuration has an alias."""
    asked = config.model.name
    if isinstance(model, HFModel):
        return asked.rpartition("/")[2] if asked.startswith("hf:") else model.name
    return asked if not Path(asked).suffix else model.path.stem


def _load_tokenizer(model: Model) -> Tokenizer:
    return load_hf_tokenizer(model) if isinstance(model, HFModel) else load_tokenizer(model)


def _choose_backend(config: Config, model: Model) -> Literal["native", "llama_cpp", "torch"]:
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


def _weights(config: Config, model: GGUFModel, kind: str) -> Weights:
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


def _check_relations(config: Config, kind: str) -> None:
    """What `backend.type` auto left open."""
    if problems := check_backend_relations(config, kind):
        raise InvalidConfigError(problems)


def _open_native(config: Config, model: GGUFModel, threads: int) -> Backend:
    from cllm.backends.native import NativeBackend

    return NativeBackend(
        model,
        threads=threads,
        instruction_set=config.backend.native.instruction_set,
        kv_type_k=config.resources.kv_type_k,
        kv_type_v=config.resources.kv_type_v,
        large_pages=_use_large_pages(config.kv.large_pages),
    )


def _use_large_pages(setting: str) -> bool:
    offered = offers_large_pages()
    if setting == "always" and not offered:
        log.warning("kv.large_pages is always, but the system offers none: KV memory takes its usual pages")
    use = offered and setting != "never"
    log.debug("KV memory asks for %s pages", "2 MiB" if use else "the system's usual")
    return use


def _open_llama_cpp(config: Config, model: GGUFModel, threads: int) -> Backend:
    from cllm.backends.llama_cpp import LlamaCppBackend

    settings = config.backend.llama_cpp
    model.check_unchanged()  # llama.cpp maps the file and would be killed by one that has become shorter
    return LlamaCppBackend(
        model.path,
        threads=threads,
        n_batch=settings.n_batch,
        n_ubatch=settings.n_ubatch,
        kv_type_k=config.resources.kv_type_k,
        kv_type_v=config.resources.kv_type_v,
        flash_attention=settings.flash_attention,
        mmap=settings.mmap,
        mlock=settings.mlock,
    )


def _chat_template(config: Config, model: Model | None) -> ChatTemplate:
    if config.model.chat_template is not None:
        try:
            source = config.model.chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"model.chat_template: cannot read {config.model.chat_template}: {error}") from error
    else:
        source = None
    if model is None:
        return ChatTemplate(source or CHATML, bos="", eos="")
    return load_hf_chat_template(model, source) if isinstance(model, HFModel) else load_chat_template(model, source)


def _build(config: Config, opened: _Opened) -> Parts:
    backend, resources = opened.backend, config.resources
    shape = backend.shape
    token_bytes = bytes_per_token(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        type_k=resources.kv_type_k,
        type_v=resources.kv_type_v,
    )
    context = resources.max_context_length or min(shape.context_length, backend.context_cap or shape.context_length)
    if context > shape.context_length:
        raise ConfigError(
            f"resources.max_context_length is {context}, but the model was trained for {shape.context_length} tokens; "
            f"set it to at most {shape.context_length}"
        )
    budget = opened.kv_bytes
    if budget is None:
        budget = _imitated_bytes(config, token_bytes, context)
    take_memory = _slot_memory if backend.layout == "slots" else _block_memory
    memory = take_memory(config, backend, budget, token_bytes, context)
    scheduler = Scheduler(
        memory.kv,
        _step_budget(config, backend),
        max_running=memory.max_running,
        ageing_s=config.scheduler.ageing_s,
    )
    log.info(
        "%s: %d bytes of K/V a token, context %d, %d sequences at once",
        backend.describe(),
        token_bytes,
        memory.max_context,
        memory.max_running,
    )
    keep_on_host(config, backend, memory.kv)
    disk = keep_on_disk(config, backend, opened.name, opened.files, memory.kv, token_bytes)
    return Parts(
        opened.name,
        opened.tokenizer,
        opened.chat_template,
        backend,
        scheduler,
        token_bytes,
        memory.max_context,
        disk,
    )


def _step_budget(config: Config, backend: Backend) -> StepBudget:
    settings = config.scheduler
    gap_ms = settings.max_gap_ms or max(settings.inter_token_target_ms, backend.preferred_gap_ms)
    return StepBudget(
        inter_token_s=settings.inter_token_target_ms / 1000,
        max_gap_s=gap_ms / 1000,
        prompt_only_s=settings.prefill_target_ms / 1000,
        max_tokens=settings.max_step_tokens or backend.preferred_step_tokens,
    )


def _imitated_bytes(config: Config, token_bytes: int, context: int) -> int:
    asked = config.resources.kv_cache_max_memory_mb
    return context * PAGED_MAX_RUNNING * token_bytes if asked is None else int(asked * MIB)


def _slot_memory(config: Config, backend: Backend, budget: int, token_bytes: int, context: int) -> _Memory:
    llama = config.backend.llama_cpp
    asked = config.scheduler.max_running
    is_asked = asked is not None or "n_seq_max" in llama.model_fields_set
    on_demand = llama.slots_on_demand and backend.resizes_slots
    plan = plan_slots(
        budget_bytes=budget,
        bytes_per_token=token_bytes,
        context=context,
        running=asked or llama.n_seq_max,
        running_is_asked=is_asked,
        on_demand=on_demand,
    )
    for note in plan.notes:
        log.warning("%s", note)
    if llama.slots_on_demand and plan.geometry.at_start is None:
        why = "this model's sequences cannot be moved"
        if on_demand:
            advice = "raise resources.kv_cache_max_memory_mb or lower n_seq_max"
            why = f"the KV budget has no room to move a sequence; {advice}"
        log.warning("all %d slots are taken at the start and stay: %s", plan.geometry.slots, why)
    backend.allocate(plan.geometry)
    ops = backend.ops
    assert isinstance(ops, SlotOps)
    kv = SlotKVManager(
        ops,
        plan.geometry,
        bytes_per_token=token_bytes,
        store_bytes=plan.store_bytes,
        max_sequences=config.resources.kv_cache_max_size,
        eviction_threshold=config.scheduler.kv_cache_eviction_threshold,
        eviction_policy=config.scheduler.eviction_policy,
        pin_limit=config.kv.pin_limit,
        release_after_s=config.kv.release_after_s,
        idle_bytes=_idle_bytes(config, budget, plan.geometry.slot_tokens * token_bytes),
    )
    return _Memory(kv, plan.geometry, plan.running, min(context, plan.geometry.slot_tokens))


def _idle_bytes(config: Config, budget: int, context_bytes: int) -> int:
    """K/V memory that may stay taken while nothing runs."""
    asked = config.kv.idle_mb
    return min(budget, max(budget // 4, context_bytes) if asked is None else int(asked * MIB))


def _upkeep(
    config: Config, backend: Backend, geometry: BlockGeometry, token_bytes: int, context: int
) -> UpkeepSettings:
    if not backend.gives_memory_back:
        return UpkeepSettings(compaction="always" if config.kv.compaction == "always" else "off")
    idle = _idle_bytes(config, geometry.tokens * token_bytes, context * token_bytes)
    return UpkeepSettings(
        release_after_s=config.kv.release_after_s,
        idle_bytes=idle,
        ahead_bytes=min(AHEAD_BYTES, idle // 4),
        compaction=config.kv.compaction,
    )


def _block_memory(config: Config, backend: Backend, budget: int, token_bytes: int, context: int) -> _Memory:
    geometry = plan_blocks(budget_bytes=budget, bytes_per_token=token_bytes, block_size=config.resources.block_size)
    backend.allocate(geometry)
    ops = backend.ops
    assert isinstance(ops, BlockOps)
    kv = PagedKVManager(
        ops,
        geometry,
        bytes_per_token=token_bytes,
        max_sequences=config.resources.kv_cache_max_size,
        eviction_threshold=config.scheduler.kv_cache_eviction_threshold,
        eviction_policy=config.scheduler.eviction_policy,
        pin_limit=config.kv.pin_limit,
        watermark=config.scheduler.watermark,
        placement=config.kv.placement,
        upkeep=_upkeep(config, backend, geometry, token_bytes, context),
    )
    if geometry.tokens < context:
        log.warning(
            "the KV budget of %.0f MiB holds %d tokens: max_context_length is that instead of %d",
            budget / MIB,
            geometry.tokens,
            context,
        )
    max_running = config.scheduler.max_running or PAGED_MAX_RUNNING
    return _Memory(kv, geometry, max_running, min(context, geometry.tokens))
