"""K/V in the host's memory beside a GPU's, from the settings to the manager that uses them."""

from __future__ import annotations

import logging

from cllm.backends.base import Backend, OpensHostRows
from cllm.config import Config
from cllm.errors import ConfigError
from cllm.kv.host import HostTier
from cllm.kv.manager import KVManager
from cllm.kv.memory import MIB
from cllm.kv.ops import BlockBytes
from cllm.kv.paged import PagedKVManager
from cllm.machine import mib, read_rooms, tightest

log = logging.getLogger("cllm")

FREE_SHARE = 0.25
"""Of the host's free memory, unless the settings say how much."""


def keep_on_host(config: Config, backend: Backend, kv: KVManager) -> None:
    """Have the manager use the host's memory, if that is wanted and can be done."""
    asked = config.kv.host.max_mb
    if asked == 0:
        return
    ops = backend.ops
    if not (isinstance(kv, PagedKVManager) and isinstance(ops, BlockBytes) and isinstance(backend, OpensHostRows)):
        if asked is not None:
            log.warning("kv.host.max_mb is %g, but K/V are in the host's memory already (%s)", asked, backend.name)
        return
    if asked is None and not backend.on_gpu:
        return
    free = tightest(read_rooms()).free
    limit = min(int(free * FREE_SHARE), backend.kv_bytes) if asked is None else int(asked * MIB)
    if asked is not None and limit > free:
        raise ConfigError(f"kv.host.max_mb is {asked:g}, but {mib(free)} of memory are free; lower it")
    if limit < ops.block_bytes:
        return
    kv.use_host(HostTier(backend.open_host_rows(limit), block_tokens=config.resources.block_size))
    log.info(
        "K/V that leave %s are kept in the host's memory, at most %s (kv.host.max_mb)",
        "the GPU" if backend.on_gpu else "the cache",
        mib(limit),
    )
