"""From a configuration to an open model: its file, tokenizer, chat template and backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from cllm.backends.base import Backend
from cllm.choosing import choose_backend, name_of, open_model, weights_of
from cllm.config import Config, InvalidConfigError
from cllm.config.relations import check_backend_relations
from cllm.errors import ConfigError, ModelError
from cllm.kv.ledger import Account
from cllm.machine import offers_large_pages, read_cpus, read_rooms
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.on_disk import ModelFiles, Stores, files_of
from cllm.on_torch import Model, open_torch
from cllm.resources import choose_kv_bytes, choose_threads
from cllm.sampling_defaults import SamplingDefaults, sampling_defaults
from cllm.structured.vocabulary import Vocabulary
from cllm.text.chat import CHATML, ChatTemplate, load_chat_template
from cllm.text.hf_tokenizer import load_hf_chat_template, load_hf_tokenizer
from cllm.text.pairs import Pairs, pairs_of
from cllm.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

log = logging.getLogger("cllm")

PAGED_MAX_RUNNING = 256


@dataclass(slots=True)
class Kept:
    """What of a model stays in memory while it is unloaded: little, and slow to read."""

    parts: tuple[GGUFModel, Tokenizer, ChatTemplate] | None = None
    vocabulary: Vocabulary | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What a model gets among others, instead of a share of the machine."""

    kv_bytes: int
    """The most K/V memory that it can ever have."""
    account: Account | None = None
    """Says how much of that it may use, where this can change."""
    kept: Kept = field(default_factory=Kept)
    stores: Stores | None = None
    """Where K/V are kept on disk."""


@dataclass(frozen=True, slots=True)
class Opened:
    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    backend: Backend
    kv_bytes: int | None
    """The K/V budget; None where memory is only imitated."""
    sampling: SamplingDefaults
    files: ModelFiles | None = None
    text_end: tuple[int, ...] = ()
    pairs: Pairs | None = None


def open_model_of(config: Config, before_mapping: Callable[[], None] | None, place: Place | None) -> Opened:
    if config.backend.type == "fake":
        from cllm.backends.fake import FakeBackend

        fake = config.backend.fake
        backend: Backend = FakeBackend(
            vocab_size=fake.vocab_size,
            latency_s=fake.latency_ms / 1000,
            layout="slots" if fake.layout == "slots" else "blocks",
        )
        kv_bytes = None if place is None else place.kv_bytes
        template, sampling = _chat_template(config, None), sampling_defaults(config, None)
        return Opened("fake", ByteTokenizer(fake.vocab_size), template, backend, kv_bytes, sampling)
    model, tokenizer, template = _read_model(config, Kept() if place is None else place.kept)
    files = files_of(model)
    name = name_of(config, model)
    kind = choose_backend(config, model)
    _check_relations(config, kind)
    threads = choose_threads(config.backend.threads, read_cpus())
    if kind == "torch" or isinstance(model, HFModel):
        running, most = config.scheduler.max_running or PAGED_MAX_RUNNING, None if place is None else place.kv_bytes
        backend, kv_bytes = open_torch(config, model, name, threads, running, most)
    else:
        if place is not None:
            kv_bytes = place.kv_bytes
        else:
            kv_bytes = choose_kv_bytes(config.resources, weights_of(config, model, kind), read_rooms())
        if before_mapping is not None and kind == "llama_cpp" and config.backend.llama_cpp.mmap:
            before_mapping()
        backend = (_open_native if kind == "native" else _open_llama_cpp)(config, model, threads)
    pairs = pairs_of(model, tokenizer) if isinstance(model, GGUFModel) and model.ranks else None
    defaults = sampling_defaults(config, model)
    return Opened(name, tokenizer, template, backend, kv_bytes, defaults, files, _text_end(model), pairs)


def _read_model(config: Config, kept: Kept) -> tuple[Model, Tokenizer, ChatTemplate]:
    """All but the weights, from the file unless it is what it was."""
    if kept.parts is not None:
        try:
            kept.parts[0].check_unchanged()
        except ModelError as error:
            log.info("%s", error)
        else:
            return kept.parts
    model = open_model(config)
    tokenizer, template = _load_tokenizer(model), _chat_template(config, model)
    kept.parts = (model, tokenizer, template) if isinstance(model, GGUFModel) else None
    return model, tokenizer, template


def _load_tokenizer(model: Model) -> Tokenizer:
    if isinstance(model, GGUFModel) and (model.ranks or not model.is_causal):
        from cllm.backends.llama_cpp.tokenizer import LlamaTokenizer

        return LlamaTokenizer(model)
    return load_hf_tokenizer(model) if isinstance(model, HFModel) else load_tokenizer(model)


def _text_end(model: Model) -> tuple[int, ...]:
    """Models that embed a text by its last token may have been taught to do so by one of their own."""
    if isinstance(model, HFModel) or model.ranks or not model.is_causal:
        return ()
    end = model.get("tokenizer.ggml.eos_token_id", -1)
    return (end,) if end >= 0 and model.get("tokenizer.ggml.add_eos_token", False) else ()


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
    if model.ranks or not model.is_causal:
        from cllm.backends.llama_cpp.encoder import LlamaCppEncoder

        most = max(settings.n_batch, config.resources.max_context_length or 0)
        return LlamaCppEncoder(model, threads=threads, n_batch=most, mmap=settings.mmap, mlock=settings.mlock)
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
        drafts=config.drafts.enabled,
        pooling=model.pooling,
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
