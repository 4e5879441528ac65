"""From a configuration to running parts: model file, tokenizer, backend, memory plan, cache, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cllm.backends.base import Backend
from cllm.choosing import context_of, token_bytes_of
from cllm.config import Config
from cllm.drafts import Drafter
from cllm.engine.budget import StepBudget
from cllm.engine.drafting import Drafting
from cllm.engine.scheduler import Scheduler
from cllm.kv.ledger import Account
from cllm.kv.manager import KVManager
from cllm.kv.memory import MIB, plan_blocks, plan_slots
from cllm.kv.ops import BlockGeometry, BlockOps, Geometry, SlotOps
from cllm.kv.paged import PagedKVManager
from cllm.kv.slots import SlotKVManager
from cllm.kv.upkeep import UpkeepSettings
from cllm.on_disk import OnDisk, keep_on_disk
from cllm.on_host import keep_on_host
from cllm.opening import PAGED_MAX_RUNNING, Kept, Opened, Place, open_model_of
from cllm.sampling_defaults import SamplingDefaults
from cllm.structured.compiler import Compiler
from cllm.structured.vocabulary import Vocabulary
from cllm.text.chat import ChatTemplate
from cllm.text.pairs import Pairs
from cllm.text.tokenizer import Tokenizer

log = logging.getLogger("cllm")

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
    compiler: Compiler
    sampling: SamplingDefaults
    disk: OnDisk | None = None
    text_end: tuple[int, ...] = ()
    """Tokens behind a text to embed."""
    pairs: Pairs | None = None
    """A query and a document as tokens, where the model ranks documents."""

    def close(self) -> None:
        """When the engine has ended. Calling it again does nothing."""
        self.compiler.close()
        if self.disk is not None:
            self.disk.close()
        self.backend.close()


@dataclass(frozen=True, slots=True)
class _Memory:
    kv: KVManager
    geometry: Geometry
    max_running: int
    max_context: int


def assemble(config: Config, before_mapping: Callable[[], None] | None = None, place: Place | None = None) -> Parts:
    """Load the model and build the parts. Raises `ModelError` or `ConfigError`; nothing is left open then.

    `before_mapping` is called before the model file is mapped, if it is. `place` is for one of several models.
    """
    opened = open_model_of(config, before_mapping, place)
    try:
        return _build(config, opened, place)
    except BaseException:
        opened.backend.close()
        raise


def _build(config: Config, opened: Opened, place: Place | None) -> Parts:
    backend = opened.backend
    shape = backend.shape
    token_bytes = token_bytes_of(config, shape)
    context = context_of(config, shape, backend.context_cap)
    budget = opened.kv_bytes
    if budget is None:
        budget = _imitated_bytes(config, token_bytes, context)
    if backend.layout == "slots":
        memory = _slot_memory(config, backend, budget, token_bytes, context)
    else:
        account = None if place is None else place.account
        memory = _block_memory(config, backend, budget, token_bytes, context, account)
    scheduler = Scheduler(
        memory.kv,
        _step_budget(config, backend),
        max_running=memory.max_running,
        ageing_s=config.scheduler.ageing_s,
        drafting=_drafting(config, backend),
        whole_prompts=backend.no_answers is not None,
    )
    log.info(
        "%s: %d bytes of K/V a token, context %d, %d sequences at once",
        backend.describe(),
        token_bytes,
        memory.max_context,
        memory.max_running,
    )
    keep_on_host(config, backend, memory.kv)
    stores = None if place is None else place.stores
    disk = keep_on_disk(config, backend, opened.name, opened.files, memory.kv, token_bytes, stores)
    return Parts(
        opened.name,
        opened.tokenizer,
        opened.chat_template,
        backend,
        scheduler,
        token_bytes,
        memory.max_context,
        Compiler(_vocabulary(opened, Kept() if place is None else place.kept), config.structured),
        opened.sampling,
        disk,
        opened.text_end,
        opened.pairs,
    )


def _vocabulary(opened: Opened, kept: Kept) -> Vocabulary:
    if kept.vocabulary is None or kept.vocabulary.tokenizer is not opened.tokenizer:
        kept.vocabulary = Vocabulary(opened.tokenizer, opened.backend.shape.n_vocab)
    return kept.vocabulary


def _step_budget(config: Config, backend: Backend) -> StepBudget:
    settings = config.scheduler
    gap_ms = settings.max_gap_ms or max(settings.inter_token_target_ms, backend.default_gap_ms)
    return StepBudget(
        inter_token_s=settings.inter_token_target_ms / 1000,
        max_gap_s=gap_ms / 1000,
        prompt_only_s=settings.prefill_target_ms / 1000,
        max_tokens=settings.max_step_tokens or backend.preferred_step_tokens,
        chunk_gap_s=max(settings.inter_token_target_ms, backend.chunk_gap_ms) / 1000 if backend.chunk_gap_ms else 0.0,
    )


def _drafting(config: Config, backend: Backend) -> Drafting | None:
    settings = config.drafts
    if not settings.enabled or backend.most_drafts == 0:
        return None
    drafter = Drafter(
        max_tokens=settings.max_tokens,
        max_step_tokens=settings.max_step_tokens,
        recent_tokens=settings.recent_tokens,
    )
    return Drafting(drafter, backend.most_drafts)


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
        block_tokens=config.resources.block_size,
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


def _block_memory(
    config: Config, backend: Backend, budget: int, token_bytes: int, context: int, account: Account | None
) -> _Memory:
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
        account=account,
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
