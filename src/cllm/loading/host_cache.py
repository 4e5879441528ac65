"""Gives the KV manager of a model on a GPU a second tier in the host's memory."""

from __future__ import annotations

import logging

from cllm.backends.base import Backend, OpensHostRows
from cllm.config import Config
from cllm.errors import ConfigError
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockBytes
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sizing import MIB
from cllm.kv.tiers.host_tier import HostTier
from cllm.machine import mib, read_memory_limits, tightest

log = logging.getLogger("cllm")

FREE_SHARE = 0.25
"""The share of the host's free memory that is taken by default."""


def attach_host_cache(config: Config, backend: Backend, kv: KVManager) -> None:
    """Have the manager use the host's memory, if that is enabled and possible."""
    asked = config.kv.host.max_mb
    if asked == 0:
        return
    ops = backend.ops
    if not (isinstance(kv, PagedKVManager) and isinstance(ops, BlockBytes) and isinstance(backend, OpensHostRows)):
        if asked is not None:
            log.warning("kv.host.max_mb has no effect: %s keeps its K/V in host memory", backend.traits.name)
        return
    if asked is None and not backend.on_gpu:
        return
    if kv.arena.local is not None:
        log.warning("evicted K/V are not kept in host memory: that is not supported for layers that carry a state")
        return
    free = tightest(read_memory_limits()).free
    limit = min(int(free * FREE_SHARE), backend.kv_bytes) if asked is None else int(asked * MIB)
    if asked is not None and limit > free:
        raise ConfigError(f"kv.host.max_mb is {asked:g}, but only {mib(free)} of memory are free; lower it")
    if limit < ops.block_bytes:
        return
    kv.use_host(HostTier(backend.open_host_rows(limit), block_tokens=config.resources.block_size))
    log.info(
        "K/V evicted from %s are kept in the host's memory, at most %s (kv.host.max_mb)",
        *("the GPU" if backend.on_gpu else "the cache", mib(limit)),
    )
