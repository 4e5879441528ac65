"""Gives a model's KV manager a store on disk.

The names of blocks depend on a digest of the model's files, which takes a second per GB the first time. It is computed
in the background, and until it is known nothing is read or written.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cllm import __version__
from cllm.backends.base import Backend
from cllm.config import Config
from cllm.errors import ModelError
from cllm.kv.block_names import fingerprint
from cllm.kv.disk.directory import KNOWN_NAME
from cllm.kv.disk.files import Files
from cllm.kv.disk.model_digest import Identity, StoppedError, content_digest, identity
from cllm.kv.disk.store import DiskStore
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockBytes
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sizing import MIB
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import CONFIG, HFModel
from cllm.models.registry import kv_directory

log = logging.getLogger("cllm")

OPEN_WAIT_S = 0.5
"""How long starting waits for the store to open, so that the first request finds what is there. It is too short to read
the model's files, but if they were never read, the store has nothing of this model."""

QUEUE_BYTES = 64 * MIB
"""Blocks that may wait to be written."""

LEAST_BLOCKS = 16
"""A limit that holds fewer is a mistake."""

FLUSH_S = 5.0
"""How long closing waits for writes."""


class ModelFiles(NamedTuple):
    """A model's files, identified before they were loaded."""

    paths: tuple[Path, ...]
    identities: tuple[Identity, ...]

    @property
    def size(self) -> int:
        return sum(each.size for each in self.identities)


def files_of(model: GGUFModel | HFModel) -> ModelFiles:
    paths = (model.path,) if isinstance(model, GGUFModel) else (model.path / CONFIG, *sorted(model.stamps))
    try:
        return ModelFiles(paths, tuple(identity(path) for path in paths))
    except OSError as error:
        raise ModelError(f"cannot read {model.path}: {error.strerror or error}") from error


class DiskStores:
    """The stores of a process: one per directory, so that models that share it share its limit."""

    def __init__(self) -> None:
        self._open: dict[Path, DiskStore] = {}

    def get(self, directory: Path, *, limit: int, queue_bytes: int) -> DiskStore:
        store = self._open.get(directory)
        if store is None:
            _check_directory(directory, limit)
            store = self._open[directory] = DiskStore(directory, limit=limit, queue_bytes=queue_bytes)
        store.allow_queue(queue_bytes)
        return store

    def close(self) -> None:
        """After all models are unloaded."""
        stores, self._open = self._open, {}
        for store in stores.values():
            store.close(FLUSH_S)


def _check_directory(directory: Path, limit: int) -> None:
    """Log where K/V are stored, or why they cannot be."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = None if os.access(directory, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        log.warning(
            "cannot store K/V in %s (%s): they are kept in memory only; choose another directory with "
            "kv.disk.directory, or disable this with kv.disk.enabled: false",
            *(directory, reason),
        )
        return
    log.info(
        "storing K/V of prompts and answers in %s, at most %.10g MiB (kv.disk.max_mb); "
        "kv.disk.enabled: false disables this",
        *(directory, limit / MIB),
    )


class DiskCache:
    """One model's use of a store."""

    def __init__(self, store: DiskStore, tier: DiskTier, directory: Path, *, shared: bool) -> None:
        """A shared store stays open when this is closed."""
        self.store = store
        self._shared = shared
        self._tier = tier
        self._directory = directory
        self._stopping = threading.Event()
        self._opened = threading.Event()

    def open(self, files: ModelFiles | None, settings: Mapping[str, str | int], about: Mapping[str, str | int]) -> None:
        """In the background; returns when that is done, or after `OPEN_WAIT_S`."""
        args = (files, settings, about)
        threading.Thread(target=self._open, args=args, name="cllm-kv-open", daemon=True).start()
        self._opened.wait(OPEN_WAIT_S)

    def _open(
        self, files: ModelFiles | None, settings: Mapping[str, str | int], about: Mapping[str, str | int]
    ) -> None:
        try:
            content = b"no files" if files is None else self._digest(files)
            tier = self._tier
            model_store = self.store.open_model(
                fingerprint(content, settings),
                block_tokens=tier.block_tokens,
                block_bytes=tier.block_bytes,
                about=about,
            )
            while not (model_store.ready(1.0) or self._stopping.is_set()):
                pass
            tier.attach(model_store)
        except StoppedError:
            pass
        except Exception as error:
            log.warning("K/V are not stored on disk: %s", error)
        finally:
            self._opened.set()

    def _digest(self, files: ModelFiles) -> bytes:
        known = self._directory / KNOWN_NAME
        return content_digest(files.paths, known, loaded=files.identities, stopped=self._stopping.is_set)

    def close(self) -> None:
        """Write what is queued, for at most `FLUSH_S`."""
        self._stopping.set()
        if self._shared:
            self.store.flush(FLUSH_S)
        else:
            self.store.close(FLUSH_S)


def attach_disk_cache(
    config: Config,
    backend: Backend,
    name: str,
    files: ModelFiles | None,
    kv: KVManager,
    token_bytes: int,
    stores: DiskStores | None = None,
) -> DiskCache | None:
    """Have the manager use the disk, if that is enabled and possible. `stores` are shared by several models."""
    settings, own, ops = config.kv.disk, backend.kv_identity, backend.ops
    asked = "enabled" in settings.model_fields_set
    if not settings.enabled or (files is None and not asked):
        return None
    paged = isinstance(kv, PagedKVManager)
    if own is None or not isinstance(kv, PagedKVManager | SlotKVManager) or (paged and not isinstance(ops, BlockBytes)):
        reason = f"the {backend.traits.name} backend does not support it"
    elif Files.why_not is not None:
        reason = Files.why_not
    else:
        about: dict[str, str | int] = {
            "model": name,
            "backend": backend.traits.name,
            "kv_type_k": config.resources.kv_type_k,
            "kv_type_v": config.resources.kv_type_v,
            "block_tokens": config.resources.block_size,
            "memory": backend.traits.layout,
            "version": __version__,
        }
        if isinstance(kv, PagedKVManager) and kv.arena.local is not None:
            shape = kv.arena.local.shape
            about |= {"local_cells": shape.cells} | ({"state_cells": shape.state} if shape.state else {})
        # The model's files matter, not its name.
        bits = {key: value for key, value in {**about, **own}.items() if key != "model"}
        block_bytes = ops.block_bytes if isinstance(ops, BlockBytes) else config.resources.block_size * token_bytes
        # Slots write whole sequences, so the queue must hold the longest.
        longest = kv.longest_bytes if isinstance(kv, SlotKVManager) else 0
        disk = _begin(config, kv, block_bytes, QUEUE_BYTES + longest, stores)
        disk.open(files, bits, about)
        return disk
    log.log(logging.WARNING if asked else logging.DEBUG, "K/V are not stored on disk: %s", reason)
    return None


def _begin(
    config: Config,
    kv: PagedKVManager | SlotKVManager,
    block_bytes: int,
    queue_bytes: int,
    stores: DiskStores | None,
) -> DiskCache:
    settings = config.kv.disk
    directory = kv_directory(settings.directory)
    store = (stores or DiskStores()).get(directory, limit=int(settings.max_mb * MIB), queue_bytes=queue_bytes)
    if store.limit < LEAST_BLOCKS * block_bytes:
        log.warning(
            "kv.disk.max_mb is %g, too little to be useful: %d tokens of this model take %.3g MiB",
            settings.max_mb,
            LEAST_BLOCKS * config.resources.block_size,
            LEAST_BLOCKS * block_bytes / MIB,
        )
    tier = DiskTier(store, block_tokens=config.resources.block_size, block_bytes=block_bytes)
    kv.use_disk(tier)
    return DiskCache(store, tier, directory, shared=stores is not None)
