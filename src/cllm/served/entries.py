"""The configured models, each with its names, its settings and an estimate of its memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cllm.config import Config, ModelEntry, config_of
from cllm.engine.observer import Observers
from cllm.engine.stats import EngineSnapshot
from cllm.errors import ConfigError, ModelError, ModelUnavailableError
from cllm.kv.ledger import Account
from cllm.llm import AsyncLLM
from cllm.loading.estimate import Estimate, estimate
from cllm.loading.open_model import TokenizerCache
from cllm.models.registry import kv_directory, models_in

log = logging.getLogger("cllm")

LoadState = Literal["unloaded", "loading", "ready", "unloading", "failed"]


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model behind a server, loaded or not."""

    called: str | None
    """None: as its file says, which is known once it is loaded."""
    names: tuple[str, ...]
    """All names that requests may use."""
    config: Config
    entry: ModelEntry
    estimate: Estimate
    at_start: bool
    observers: Observers = field(default_factory=Observers)
    tokenizers: TokenizerCache = field(default_factory=TokenizerCache)
    state: LoadState = "unloaded"
    llm: AsyncLLM | None = None
    account: Account | None = None
    error: str | None = None
    """Why it could not be loaded."""
    users: int = 0
    waiting: int = 0
    """Requests that wait for it to be loaded."""
    awaits_room: bool = False
    """Loading waits for other models to free memory."""
    last_used: float = 0.0
    loads: int = 0
    retry_at: float = 0.0
    changing: asyncio.Task[None] | None = None
    """The task that loads or unloads it."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        if self.called is None:
            assert self.llm is not None
            return self.llm.model_name
        return self.called

    @property
    def store(self) -> Path | None:
        """The directory of its K/V on disk."""
        settings = self.config.kv.disk
        return kv_directory(settings.directory) if settings.enabled else None

    @property
    def is_wanted(self) -> bool:
        return self.users > 0 or self.waiting > 0

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.llm is not None and self.llm.ready

    @property
    def why_not_ready(self) -> str:
        if self.awaits_room:
            return "is waiting for memory that other models are using"
        return "is still being unloaded" if self.state == "unloading" else "is still being loaded"

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Count a request that waits for it, so that it is not unloaded again before the request had it."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            self.last_used = time.monotonic()

    def snapshot(self) -> EngineSnapshot | None:
        return self.llm.executor.snapshot() if self.llm is not None and self.ready else None

    def release(self) -> None:
        """The end of an `acquire`."""
        self.users -= 1
        self.last_used = time.monotonic()
        if self.users == 0:
            self.idle.set()


def read_entries(config: Config) -> list[ServedModel]:
    found: list[ServedModel] = []
    for entry in config.models:
        paths = models_in(entry.name) if config_of(config, entry).backend.type != "fake" else None
        if paths is None:
            found.append(_read_entry(config, entry, at_start=entry.load != "first_use"))
            continue
        if entry.aliases:
            raise ConfigError(f"{entry.name} is a directory, whose models cannot share aliases; remove the aliases")
        for path in paths:
            single = entry.model_copy(update={"name": str(path)})
            try:
                found.append(_read_entry(config, single, at_start=entry.load == "start"))
            except (ModelError, ConfigError) as error:
                log.warning("skipping %s: %s", path, error)
    if not found:
        raise ModelError("no model to serve")
    return found


def _read_entry(config: Config, entry: ModelEntry, *, at_start: bool) -> ServedModel:
    own = config_of(config, entry)
    about = estimate(own)
    name = entry.aliases[0] if entry.aliases else entry.name if about.kind == "fake" else about.name
    return ServedModel(
        name, tuple(dict.fromkeys((name, *entry.aliases, about.name, entry.name))), own, entry, about, at_start
    )


def by_name(models: Sequence[ServedModel]) -> dict[str, ServedModel]:
    """Displayed names and aliases are unique; any other name means the first model that has it."""
    own: dict[str, ServedModel] = {}
    for served in models:
        for name in (served.name, *served.entry.aliases):
            other = own.setdefault(name, served)
            if other is not served:
                raise ConfigError(
                    f"two models are called {name!r}, {other.entry.name} and {served.entry.name}; give one of them "
                    "another alias"
                )
    return {name: served for served in reversed(models) for name in served.names} | own


def check_disk_limits(models: Sequence[ServedModel]) -> None:
    """A directory of K/V on disk has one limit."""
    first: dict[Path, ServedModel] = {}
    for served in models:
        settings, directory = served.config.kv.disk, served.store
        if directory is None:
            continue
        other = first.setdefault(directory, served)
        if other.config.kv.disk.max_mb != settings.max_mb:
            raise ConfigError(
                f"kv.disk.max_mb is {other.config.kv.disk.max_mb:.12g} for {other.name} and {settings.max_mb:.12g} for "
                f"{served.name}, which keep K/V in the same directory; give both the same limit or another "
                "kv.disk.directory"
            )


def load_failed(served: ServedModel, why: object) -> str:
    return f"{served.name} could not be loaded: {why}"


def unavailable(served: ServedModel, why: object, retry_after_s: float) -> ModelUnavailableError:
    """Why it could not be loaded. Clients see the names of its files, not their directories."""
    message = public = load_failed(served, why)
    files = served.estimate.files
    named = [Path(served.entry.name), Path(served.entry.name).expanduser(), *(files.paths if files else ())]
    for directory in sorted({str(path.parent) for path in named} - {".", "/"}, key=len, reverse=True):
        public = public.replace(f"{directory}/", "")
    return ModelUnavailableError(message, retry_after_s, public)
