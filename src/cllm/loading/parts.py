"""Loads a model and builds everything around it: K/V cache, scheduler, grammar compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from cllm.backends.base import Backend
from cllm.config import Config
from cllm.drafts import Drafter
from cllm.engine.budget import StepBudget
from cllm.engine.plan import Drafting
from cllm.engine.row_sampler import RowSampler, open_sampler
from cllm.engine.scheduler import Scheduler
from cllm.kv.groups import KVLayout
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockOps, SlotOps
from cllm.kv.paged.local import MOST_STATES, LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.sizing import MIB, plan_blocks, plan_slots, slot_tokens_within
from cllm.kv.slots.manager import SlotKVManager
from cllm.loading.context import ENOUGH_TOKENS, ContextLimit, Memory, context_of, context_within, limit_of
from cllm.loading.disk_cache import DiskCache, ModelFiles, attach_disk_cache, files_of
from cllm.loading.facts import ModelFacts
from cllm.loading.host_cache import attach_host_cache
from cllm.loading.open_model import (
    PAGED_MAX_RUNNING,
    ModelShare,
    OpenedText,
    open_backend,
    open_text,
    paged_max_running,
)
from cllm.loading.resources import (
    check_local_room,
    group_costs,
    kv_layout,
    local_bytes,
    local_shape,
    state_bytes,
    window_bytes,
)
from cllm.loading.text_model import TextModel
from cllm.loading.weights_id import weights_id
from cllm.machine import mib
from cllm.work.pool import Workers

log = logging.getLogger("cllm")

AHEAD_BYTES = 64 * MIB
"""K/V memory that an idle server keeps ready for the next requests."""


@dataclass(slots=True)
class ModelParts:
    """A loaded model, without the engine's thread."""

    text: TextModel
    row_sampler: RowSampler
    backend: Backend
    scheduler: Scheduler
    disk: DiskCache | None

    def close(self) -> None:
        """Once the engine has ended. Calling it again does nothing."""
        self.text.close()
        if self.disk is not None:
            self.disk.close()
        self.backend.close()


@dataclass(frozen=True, slots=True)
class _Memory:
    kv: KVManager
    max_running: int
    context: ContextLimit


def load_model(
    config: Config, workers: Workers, share: ModelShare | None = None, before_mapping: Callable[[], None] | None = None
) -> ModelParts:
    """On another thread than the event loop's. Raises `ModelError` or `ConfigError`, and then leaves nothing open.

    `share` is for one of several models. `before_mapping` is called before the model file is mapped, if it is.
    """
    share = share or ModelShare()
    row_sampler = open_sampler(config.backend.native.instruction_set)
    text = open_text(config, share.tokenizers)
    files = None if text.model is None else files_of(text.model)
    backend, budget = open_backend(config, text, share, before_mapping)
    try:
        return _build(config, text, files, backend, budget, share, row_sampler, workers)
    except BaseException:
        backend.close()
        raise


def _build(
    config: Config,
    opened: OpenedText,
    files: ModelFiles | None,
    backend: Backend,
    budget: int | None,
    share: ModelShare,
    row_sampler: RowSampler,
    workers: Workers,
) -> ModelParts:
    spec, step_tokens = backend.spec, backend.traits.preferred_step_tokens
    in_slots = backend.traits.layout == "slots"
    layout = kv_layout(config, spec, frees_windows=backend.traits.frees_windows, in_slots=in_slots)
    token_bytes = layout.token_bytes
    context = min(context_of(config, spec, backend.traits.context_cap), share.context or spec.context_length)
    if budget is None:
        local = local_bytes(local_shape(config, layout, step_tokens), layout, context)
        budget = _fake_bytes(config, context * token_bytes + local)
    if in_slots:
        memory = _slot_memory(config, backend, budget, token_bytes, context)
    else:
        memory = _block_memory(config, backend, budget, layout, context, share)
    facts = ModelFacts(
        name=opened.name,
        weights="fake" if files is None else weights_id(files.paths),
        file_bytes=0 if files is None else files.size,
        traits=backend.traits,
        spec=spec,
        max_context=memory.context.tokens,
        context_advice=memory.context.advice,
        bytes_per_token=token_bytes,
        groups=group_costs(
            layout, local_shape(config, layout, step_tokens), context, spec.state_bytes if in_slots else 0
        ),
        unit_tokens=memory.kv.unit_tokens,
    )
    text = TextModel(config, opened, facts, share.tokenizers, workers)
    scheduler = Scheduler(
        memory.kv,
        _step_budget(config, backend),
        max_running=memory.max_running,
        ageing_s=config.scheduler.ageing_s,
        drafting=_drafting(config, backend),
        whole_prompts=backend.traits.no_answers is not None,
    )
    log.info("%s: up to %d sequences at once", backend.describe(), memory.max_running)
    log.info(
        "context: %s tokens (%s); the KV cache of %s holds %s tokens of %s bytes",
        f"{memory.context.tokens:,}",
        memory.context.reason,
        mib(budget),
        f"{budget // token_bytes:,}",
        f"{token_bytes:,}",
    )
    _tell_local(local_shape(config, layout, step_tokens), layout, context)
    attach_host_cache(config, backend, memory.kv)
    disk = attach_disk_cache(config, backend, facts.name, files, memory.kv, token_bytes, share.stores)
    return ModelParts(text=text, row_sampler=row_sampler, backend=backend, scheduler=scheduler, disk=disk)


def _tell_local(shape: LocalShape | None, layout: KVLayout, context: int) -> None:
    if shape is not None and shape.cells:
        log.info(
            "layers with a sliding window of %d tokens take up to %s more for each request",
            *(shape.window, mib(window_bytes(shape, layout, context))),
        )
    if shape is not None and shape.state:
        log.info(
            "layers that carry a state take %s more for each request: %d states of %s; a cached prompt keeps one at "
            "each place where others can go on",
            *(mib(state_bytes(shape, layout)), MOST_STATES, mib(shape.state * layout.cell_bytes)),
        )


def _step_budget(config: Config, backend: Backend) -> StepBudget:
    settings, traits = config.scheduler, backend.traits
    gap_ms = settings.max_gap_ms or max(settings.inter_token_target_ms, traits.default_gap_ms)
    return StepBudget(
        inter_token_s=settings.inter_token_target_ms / 1000,
        max_gap_s=gap_ms / 1000,
        prompt_only_s=settings.prefill_target_ms / 1000,
        max_tokens=settings.max_step_tokens or traits.preferred_step_tokens,
        chunk_gap_s=max(settings.inter_token_target_ms, traits.chunk_gap_ms) / 1000 if traits.chunk_gap_ms else 0.0,
    )


def _drafting(config: Config, backend: Backend) -> Drafting | None:
    settings = config.drafts
    if not settings.enabled or backend.traits.most_drafts == 0 or backend.spec.recurrent:
        return None  # a state cannot be rewound
    drafter = Drafter(
        max_tokens=settings.max_tokens,
        max_step_tokens=settings.max_step_tokens,
        recent_tokens=settings.recent_tokens,
    )
    return Drafting(drafter, backend.traits.most_drafts)


def _fake_bytes(config: Config, sequence_bytes: int) -> int:
    asked = config.resources.kv_cache_max_memory_mb
    return PAGED_MAX_RUNNING * sequence_bytes if asked is None else int(asked * MIB)


def _slot_memory(config: Config, backend: Backend, budget: int, token_bytes: int, context: int) -> _Memory:
    llama = config.backend.llama_cpp
    asked = config.scheduler.max_running
    is_asked = asked is not None or "n_seq_max" in llama.model_fields_set
    on_demand = llama.slots_on_demand and backend.resizes_slots
    state = backend.spec.state_bytes
    if config.resources.max_context_length is None:
        running = asked or llama.n_seq_max
        context = context_within(context, slot_tokens_within(budget, token_bytes, running, state))
    plan = plan_slots(
        budget_bytes=budget,
        bytes_per_token=token_bytes,
        context=context,
        running=asked or llama.n_seq_max,
        running_is_asked=is_asked,
        on_demand=on_demand,
        state_bytes=state,
    )
    for note in plan.notes:
        log.warning("%s", note)
    if llama.slots_on_demand and plan.geometry.at_start is None:
        why = "this model's sequences cannot be moved"
        if on_demand:
            advice = "raise resources.kv_cache_max_memory_mb or lower n_seq_max"
            why = f"the KV budget has no room to move a sequence; {advice}"
        log.warning("all %d slots are allocated at the start and stay allocated: %s", plan.geometry.slots, why)
    backend.allocate(plan.geometry)
    ops = backend.ops
    assert isinstance(ops, SlotOps)
    kv = SlotKVManager(
        ops,
        plan.geometry,
        bytes_per_token=token_bytes,
        state_bytes=state,
        store_bytes=plan.store_bytes,
        block_tokens=config.resources.block_size,
        max_sequences=config.resources.kv_cache_max_size,
        eviction_threshold=config.scheduler.kv_cache_eviction_threshold,
        eviction_policy=config.scheduler.eviction_policy,
        pin_limit=config.kv.pin_limit,
        release_after_s=config.kv.release_after_s,
        idle_bytes=_idle_bytes(config, budget, plan.geometry.slot_tokens * token_bytes + state),
    )
    if kv.states is not None and not kv.places.snapshots.most:
        log.warning(
            "beside the slots there is no room to keep states of %s: a prompt that parts from what was computed before "
            "is computed from its beginning; raise resources.kv_cache_max_memory_mb or lower n_seq_max",
            mib(state),
        )
    elif kv.states is not None:
        log.info(
            "layers that carry a state take %s for each sequence; a cached prompt keeps up to %d states, at places "
            "where others can go on",
            *(mib(state), kv.places.snapshots.most),
        )
    return _Memory(kv, plan.running, _limit(config, backend, min(context, plan.geometry.slot_tokens), "slots"))


def _limit(config: Config, backend: Backend, tokens: int, memory: Memory) -> ContextLimit:
    allowed = context_of(config, backend.spec, backend.traits.context_cap)
    return limit_of(config, backend.spec, allowed=allowed, tokens=tokens, memory=memory)


def _idle_bytes(config: Config, budget: int, least: int) -> int:
    """K/V memory that may stay allocated while nothing runs."""
    asked = config.kv.idle_mb
    return min(budget, max(budget // 4, least) if asked is None else int(asked * MIB))


def _upkeep(config: Config, backend: Backend, budget: int, sequence_bytes: int) -> UpkeepSettings:
    if not backend.traits.gives_memory_back:
        return UpkeepSettings(compaction="always" if config.kv.compaction == "always" else "off")
    idle = _idle_bytes(config, budget, sequence_bytes)
    return UpkeepSettings(
        release_after_s=config.kv.release_after_s,
        idle_bytes=idle,
        ahead_bytes=min(AHEAD_BYTES, idle // 4),
        compaction=config.kv.compaction,
    )


def _block_memory(
    config: Config, backend: Backend, budget: int, layout: KVLayout, context: int, share: ModelShare
) -> _Memory:
    token_bytes, local = layout.token_bytes, local_shape(config, layout, backend.traits.preferred_step_tokens)
    if local is not None and not backend.traits.rebuilds_windows:
        local = local._replace(reach=None)
    geometry = plan_blocks(budget_bytes=budget, bytes_per_token=token_bytes, block_size=layout.block_size)
    if local is not None:
        geometry = replace(geometry, layout=layout)
        windows, states = window_bytes(local, layout, context), state_bytes(local, layout)
        check_local_room(budget, windows, states, context * token_bytes)
    backend.allocate(geometry)
    ops = backend.ops
    assert isinstance(ops, BlockOps)
    kv = PagedKVManager(
        ops,
        geometry,
        local,
        bytes_per_token=token_bytes,
        max_sequences=config.resources.kv_cache_max_size,
        eviction_threshold=config.scheduler.kv_cache_eviction_threshold,
        eviction_policy=config.scheduler.eviction_policy,
        pin_limit=config.kv.pin_limit,
        watermark=config.scheduler.watermark,
        placement=config.kv.placement,
        upkeep=_upkeep(
            config,
            backend,
            geometry.tokens * token_bytes,
            min(context, ENOUGH_TOKENS) * token_bytes + local_bytes(local, layout, context),
        ),
        account=share.account,
    )
    memory: Memory = "blocks" if share.context is None else "shared"
    return _Memory(kv, paged_max_running(config), _limit(config, backend, min(context, kv.max_tokens), memory))
