"""Opens a model: its file, tokenizer, chat template and backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cllm.backends.base import Backend
from cllm.config import Config, InvalidConfigError
from cllm.config.consistency import check_backend_consistency
from cllm.engine.time_sharing import TimeSharing
from cllm.errors import ConfigError, ModelError
from cllm.kv.ledger import Account
from cllm.loading.backend_choice import choose_backend, name_of, open_model_file, weights_of
from cllm.loading.context import context_of
from cllm.loading.disk_cache import DiskStores
from cllm.loading.resources import choose_kv_bytes, choose_threads
from cllm.loading.sampling_defaults import SamplingDefaults, sampling_defaults
from cllm.loading.torch_model import Model, open_torch
from cllm.machine import has_huge_pages, read_cpus, read_memory_limits
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.structured.vocabulary import Vocabulary
from cllm.text.hf_tokenizer import load_hf_chat_template, load_hf_tokenizer
from cllm.text.rerank import PairEncoder, load_pair_encoder
from cllm.text.template_source import CHATML, TemplateSource, load_chat_template
from cllm.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from cllm.work.pool import Workers

log = logging.getLogger("cllm")

PAGED_MAX_RUNNING = 256


@dataclass(slots=True)
class TokenizerCache:
    """What stays in memory while a model is unloaded: small, but slow to read."""

    opened: tuple[GGUFModel, Tokenizer, TemplateSource] | None = None
    vocabulary: Vocabulary | None = None


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What one of several models gets of the process. The only model of a process gets the defaults."""

    kv_bytes: int | None = None
    """The most K/V memory it may ever have; None: what the machine leaves."""
    account: Account | None = None
    """Says how much of that it may use now, if other models need some of it, too."""
    tokenizers: TokenizerCache = field(default_factory=TokenizerCache)
    stores: DiskStores | None = None
    """The K/V stores on disk that the models share."""
    time_sharing: TimeSharing | None = None
    """Turns on the CPU."""
    workers: Workers | None = None
    """The worker processes that the models share; None: the model gets its own."""
    context: int | None = None
    """The longest sequence that its part of the memory holds; None: what the machine leaves."""


@dataclass(frozen=True, slots=True)
class OpenedText:
    """A model file's contents, all but the weights."""

    name: str
    tokenizer: Tokenizer
    chat_template: TemplateSource
    sampling: SamplingDefaults
    text_end: tuple[int, ...] = ()
    """Tokens that the model expects after a text to embed."""
    pairs: PairEncoder | None = None
    model: Model | None = None
    """None: the fake backend's."""


def open_text(config: Config, cache: TokenizerCache) -> OpenedText:
    """Raises `ModelError` or `ConfigError`."""
    if config.backend.type == "fake":
        byte_tokenizer = ByteTokenizer(config.backend.fake.vocab_size)
        return OpenedText("fake", byte_tokenizer, _chat_template(config, None), sampling_defaults(config, None))
    model, tokenizer, template = _read_model(config, cache)
    pairs = load_pair_encoder(model, tokenizer) if isinstance(model, GGUFModel) and model.ranks else None
    defaults = sampling_defaults(config, model)
    return OpenedText(name_of(config, model), tokenizer, template, defaults, _text_end(model), pairs, model)


def open_backend(
    config: Config, text: OpenedText, share: ModelShare, before_mapping: Callable[[], None] | None
) -> tuple[Backend, int | None]:
    """The backend with the model's weights, and its K/V budget; None for the fake backend, which has no memory."""
    model = text.model
    if model is None:
        from cllm.loading.fake_model import open_fake

        return open_fake(config), share.kv_bytes
    context_of(config, model.spec)  # before the weights are loaded
    kind = choose_backend(config, model)
    if problems := check_backend_consistency(config, kind):  # those that `backend.type: auto` left open
        raise InvalidConfigError(problems)
    threads = choose_threads(config.backend.threads, read_cpus())
    if model.left_aside:
        layers, verb = ("layer that predicts", "is") if model.left_aside == 1 else ("layers that predict", "are")
        log.info("%s: its %d %s further tokens (MTP) %s not used", text.name, model.left_aside, layers, verb)
    if kind == "torch" or isinstance(model, HFModel):
        return open_torch(config, model, text.name, threads, paged_max_running(config), share.kv_bytes)
    kv_bytes = share.kv_bytes
    if kv_bytes is None:
        kv_bytes = choose_kv_bytes(config.resources, weights_of(config, model, kind), read_memory_limits())
    if before_mapping is not None and kind == "llama_cpp" and config.backend.llama_cpp.mmap:
        before_mapping()
    return (_open_native if kind == "native" else _open_llama_cpp)(config, model, threads), kv_bytes


def paged_max_running(config: Config) -> int:
    """How many sequences may run at once where memory is paged."""
    most = min(config.resources.kv_cache_max_size or PAGED_MAX_RUNNING, PAGED_MAX_RUNNING)
    return config.scheduler.max_running or most


def _read_model(config: Config, cache: TokenizerCache) -> tuple[Model, Tokenizer, TemplateSource]:
    """Everything but the weights, from the cache if the file has not changed."""
    if cache.opened is not None:
        try:
            cache.opened[0].check_unchanged()
        except ModelError as error:
            log.info("%s", error)
        else:
            return cache.opened
    model = open_model_file(config)
    tokenizer, template = _load_tokenizer(model), _chat_template(config, model)
    cache.opened = (model, tokenizer, template) if isinstance(model, GGUFModel) else None
    return model, tokenizer, template


def _load_tokenizer(model: Model) -> Tokenizer:
    if isinstance(model, GGUFModel) and (model.ranks or not model.is_causal):
        from cllm.backends.llama_cpp.tokenizer import LlamaTokenizer

        return LlamaTokenizer(model)
    return load_hf_tokenizer(model) if isinstance(model, HFModel) else load_tokenizer(model)


def _text_end(model: Model) -> tuple[int, ...]:
    """Models that embed a text by its last token may have been trained with a special one."""
    if isinstance(model, HFModel) or model.ranks or not model.is_causal:
        return ()
    end = model.get("tokenizer.ggml.eos_token_id", -1)
    return (end,) if end >= 0 and model.get("tokenizer.ggml.add_eos_token", False) else ()


def _open_native(config: Config, model: GGUFModel, threads: int) -> Backend:
    from cllm.backends.native import NativeBackend

    return NativeBackend(
        model,
        threads=threads,
        instruction_set=config.backend.native.instruction_set,
        kv_type_k=config.resources.kv_type_k,
        kv_type_v=config.resources.kv_type_v,
        large_pages=_use_large_pages(config.kv.large_pages),
        context=config.resources.max_context_length,
    )


def _use_large_pages(setting: str) -> bool:
    offered = has_huge_pages()
    if setting == "always" and not offered:
        log.warning("kv.large_pages is always, but the system has none: using its default pages")
    use = offered and setting != "never"
    log.debug("KV memory uses %s pages", "2 MiB" if use else "the system's default")
    return use


def _open_llama_cpp(config: Config, model: GGUFModel, threads: int) -> Backend:
    from cllm.backends.llama_cpp import LlamaCppBackend

    settings = config.backend.llama_cpp
    model.check_unchanged()  # llama.cpp maps the file, and a shorter one would kill the process
    if model.ranks or not model.is_causal:
        from cllm.backends.llama_cpp.encoder import LlamaCppEncoder

        most = max(settings.n_batch, config.resources.max_context_length or 0)
        return LlamaCppEncoder(model, threads=threads, n_batch=most, mmap=settings.mmap, mlock=settings.mlock)
    backend = LlamaCppBackend(
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
        whole_windows=config.kv.window.recent is not None,
        pooling=model.pooling,
    )
    if not backend.spec.recurrent:
        backend.spec = replace(backend.spec, layers=model.spec.layers)  # llama.cpp tells of the first one only
    return backend


def _chat_template(config: Config, model: Model | None) -> TemplateSource:
    if config.model.chat_template is not None:
        try:
            source = config.model.chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"model.chat_template: cannot read {config.model.chat_template}: {error}") from error
    else:
        source = None
    if model is None:
        return TemplateSource(source or CHATML)
    return load_hf_chat_template(model, source) if isinstance(model, HFModel) else load_chat_template(model, source)
