"""A model's K/V on disk, from the settings to the manager that uses them.

What blocks are called depends on the content of the model's files, which takes a second for every GB the first time. So
that is found out in the background, and until then nothing is looked for or written.
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
from cllm.kv.disk.contents import Identity, StoppedError, content_digest, identity
from cllm.kv.disk.directory import KNOWN_NAME
from cllm.kv.disk.files import Files
from cllm.kv.disk.names import fingerprint
from cllm.kv.disk.store import DiskStore
from cllm.kv.manager import KVManager
from cllm.kv.memory import MIB, most_bytes
from cllm.kv.ops import BlockBytes
from cllm.kv.paged import PagedKVManager
from cllm.kv.tier import Tier
from cllm.kv.tiered import Tiered
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import CONFIG, HFModel
from cllm.models.registry import kv_directory

log = logging.getLogger("cllm")

OPEN_WAIT_S = 0.5
"""How long the start waits until it is known what lies on disk, so that the first request finds it. Where the model's
files have to be read for that, it does not get in time, and there is nothing of them on disk yet."""

QUEUE_BYTES = 64 * MIB
"""Copies that may wait to be written."""

LEAST_BLOCKS = 16
"""A limit that holds fewer is a mistake."""

FLUSH_S = 5.0
"""At the end, for what waits to be written."""


class ModelFiles(NamedTuple):
    """What K/V follow from, as it was before it was loaded."""

    paths: tuple[Path, ...]
    identities: tuple[Identity, ...]


def files_of(model: GGUFModel | HFModel) -> ModelFiles:
    paths = (model.path,) if isinstance(model, GGUFModel) else (model.path / CONFIG, *sorted(model.stamps))
    try:
        return ModelFiles(paths, tuple(identity(path) for path in paths))
    except OSError as error:
        raise ModelError(f"{model.path}: cannot be read: {error.strerror or error}") from error


class Stores:
    """The stores of a process: one for each directory, however many models use it, so that its limit is one."""

    def __init__(self) -> None:
        self._open: dict[Path, DiskStore] = {}

    def get(self, directory: Path, *, limit: int, queue_bytes: int) -> DiskStore:
        store = self._open.get(directory)
        if store is None:
            _announce(directory, limit)
            store = self._open[directory] = DiskStore(directory, limit=limit, queue_bytes=queue_bytes)
        store.allow_queue(queue_bytes)
        return store

    def close(self) -> None:
        """When all models are gone."""
        stores, self._open = self._open, {}
        for store in stores.values():
            store.close(FLUSH_S)


def _announce(directory: Path, limit: int) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = None if os.access(directory, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        log.warning(
            "K/V cannot be kept in %s (%s): what is computed is kept in memory only; name another directory with "
            "kv.disk.directory, or switch it off with kv.disk.enabled: false",
            directory,
            reason,
        )
        return
    log.info(
        "K/V of prompts and answers are kept in %s, at most %.10g MiB (kv.disk.max_mb); "
        "kv.disk.enabled: false switches that off",
        directory,
        limit / MIB,
    )


class OnDisk:
    """A store that is open, with one of the models that use it."""

    def __init__(self, store: DiskStore, tier: Tier, directory: Path, *, shared: bool) -> None:
        """Who shares a store leaves it open."""
        self.store = store
        self._shared = shared
        self._tier = tier
        self._directory = directory
        self._stopping = threading.Event()
        self._opened = threading.Event()

    def open(self, files: ModelFiles | None, settings: Mapping[str, str | int], about: Mapping[str, str | int]) -> None:
        """In the background; returns when it is done, or after a moment."""
        args = (files, settings, about)
        threading.Thread(target=self._open, args=args, name="cllm-kv-open", daemon=True).start()
        self._opened.wait(OPEN_WAIT_S)

    def _open(
        self, files: ModelFiles | None, settings: Mapping[str, str | int], about: Mapping[str, str | int]
    ) -> None:
        try:
            content = b"no files" if files is None else self._digest(files)
            tier = self._tier
            space = self.store.space(
                fingerprint(content, settings),
                block_tokens=tier.block_tokens,
                block_bytes=tier.block_bytes,
                about=about,
            )
            while not (space.ready(1.0) or self._stopping.is_set()):
                pass
            tier.attach(space)
        except StoppedError:
            pass
        except Exception as error:
            log.warning("K/V are not kept on disk: %s", error)
        finally:
            self._opened.set()

    def _digest(self, files: ModelFiles) -> bytes:
        known = self._directory / KNOWN_NAME
        return content_digest(files.paths, known, loaded=files.identities, stopped=self._stopping.is_set)

    def close(self) -> None:
        """All that was handed over is written, unless that takes too long; if others have the store, it goes on."""
        self._stopping.set()
        if self._shared:
            self.store.flush(FLUSH_S)
        else:
            self.store.close(FLUSH_S)


def keep_on_disk(
    config: Config,
    backend: Backend,
    name: str,
    files: ModelFiles | None,
    kv: KVManager,
    token_bytes: int,
    stores: Stores | None = None,
) -> OnDisk | None:
    """Have the manager use the disk, if that is wanted and can be done. `stores` are what several models share."""
    settings, own, ops = config.kv.disk, backend.kv_identity, backend.ops
    asked = "enabled" in settings.model_fields_set
    if not settings.enabled or (files is None and not asked):
        return None
    paged = isinstance(kv, PagedKVManager)
    if own is None or not isinstance(kv, Tiered) or (paged and not isinstance(ops, BlockBytes)):
        reason = f"the backend {backend.name} cannot do that yet"
    elif Files.why_not is not None:
        reason = Files.why_not
    else:
        about: dict[str, str | int] = {
            "model": name,
            "backend": backend.name,
            "kv_type_k": config.resources.kv_type_k,
            "kv_type_v": config.resources.kv_type_v,
            "block_tokens": config.resources.block_size,
            "memory": backend.layout,
            "version": __version__,
        }
        # What people call the model does not matter: its files do.
        bits = {key: value for key, value in {**about, **own}.items() if key != "model"}
        block_bytes = ops.block_bytes if isinstance(ops, BlockBytes) else config.resources.block_size * token_bytes
        # Sequences are handed over whole, so there must be room for the longest.
        longest = 0 if paged else most_bytes(kv.max_tokens, token_bytes)
        disk = _begin(config, kv, block_bytes, QUEUE_BYTES + longest, stores)
        disk.open(files, bits, about)
        return disk
    log.log(logging.WARNING if asked else logging.DEBUG, "K/V are not kept on disk: %s", reason)
    return None


def _begin(config: Config, kv: Tiered, block_bytes: int, queue_bytes: int, stores: Stores | None) -> OnDisk:
    settings = config.kv.disk
    directory = kv_directory(settings.directory)
    store = (stores or Stores()).get(directory, limit=int(settings.max_mb * MIB), queue_bytes=queue_bytes)
    if store.limit < LEAST_BLOCKS * block_bytes:
        log.warning(
            "kv.disk.max_mb is %g, too little to be of use: %d tokens of this model take %.3g MiB",
            settings.max_mb,
            LEAST_BLOCKS * config.resources.block_size,
            LEAST_BLOCKS * block_bytes / MIB,
        )
    tier = Tier(store, block_tokens=config.resources.block_size, block_bytes=block_bytes)
    kv.use_disk(tier)
    return OnDisk(store, tier, directory, shared=stores is not None)
