"""The models of a configuration, each with its names, its settings and what it will take."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cllm.choosing import Estimate, estimate
from cllm.config import Config, ModelEntry, config_of
from cllm.engine.observer import Observers
from cllm.engine.stats import EngineSnapshot
from cllm.errors import ConfigError, ModelError, ModelUnavailableError
from cllm.kv.ledger import Account
from cllm.llm import AsyncLLM
from cllm.models.registry import kv_directory, models_in
from cllm.opening import Kept

log = logging.getLogger("cllm")

State = Literal["unloaded", "loading", "ready", "unloading", "failed"]


@dataclass(slots=True, eq=False)
class Served:
    """One of several models."""

    name: str
    names: tuple[str, ...]
    """All that clients may call it."""
    config: Config
    entry: ModelEntry
    estimate: Estimate
    at_start: bool
    observers: Observers = field(default_factory=Observers)
    kept: Kept = field(default_factory=Kept)
    state: State = "unloaded"
    llm: AsyncLLM | None = None
    account: Account | None = None
    error: str | None = None
    """Why it could not be loaded."""
    users: int = 0
    waiting: int = 0
    """Those who wait for it to be loaded."""
    awaits_room: bool = False
    """It is loaded once others have made room."""
    last_used: float = 0.0
    loads: int = 0
    retry_at: float = 0.0
    changing: asyncio.Task[None] | None = None
    """Loads or unloads it."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def store(self) -> Path | None:
        """Where its K/V are kept on disk."""
        settings = self.config.kv.disk
        return kv_directory(settings.directory) if settings.enabled else None

    @property
    def is_wanted(self) -> bool:
        return self.users > 0 or self.waiting > 0

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.llm is not None and self.llm.ready

    @property
    def doing(self) -> str:
        """Instead of being ready."""
        if self.awaits_room:
            return "waits for memory that other models have in use"
        return "is still being unloaded" if self.state == "unloading" else "is still being loaded"

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Somebody waits for it: it is not unloaded again before he had it."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            self.last_used = time.monotonic()

    def snapshot(self) -> EngineSnapshot | None:
        return self.llm.snapshot() if self.llm is not None and self.ready else None

    def release(self) -> None:
        """Whoever used it does so no more."""
        self.users -= 1
        self.last_used = time.monotonic()
        if self.users == 0:
            self.idle.set()


def read_entries(config: Config) -> list[Served]:
    found: list[Served] = []
    for entry in config.models:
        paths = models_in(entry.name) if config_of(config, entry).backend.type != "fake" else None
        if paths is None:
            found.append(_read_entry(config, entry, at_start=entry.load != "first_use"))
            continue
        if entry.aliases:
            raise ConfigError(f"{entry.name} is a directory, whose models cannot share aliases; remove them")
        for path in paths:
            single = entry.model_copy(update={"name": str(path)})
            try:
                found.append(_read_entry(config, single, at_start=entry.load == "start"))
            except (ModelError, ConfigError) as error:
                log.warning("%s is left out: %s", path, error)
    if not found:
        raise ModelError("there is no model to serve")
    return found


def _read_entry(config: Config, entry: ModelEntry, *, at_start: bool) -> Served:
    own = config_of(config, entry)
    about = estimate(own)
    name = entry.aliases[0] if entry.aliases else entry.name if about.kind == "fake" else about.name
    return Served(
        name, tuple(dict.fromkeys((name, *entry.aliases, about.name, entry.name))), own, entry, about, at_start
    )


def by_name(models: Sequence[Served]) -> dict[str, Served]:
    """Names that clients see, and aliases, are unique. Others go to the first that has them."""
    own: dict[str, Served] = {}
    for served in models:
        for name in (served.name, *served.entry.aliases):
            other = own.setdefault(name, served)
            if other is not served:
                raise ConfigError(
                    f"two models are called {name!r}, {other.entry.name} and {served.entry.name}: give one of them "
                    "another alias"
                )
    return {name: served for served in reversed(models) for name in served.names} | own


def check_disk_limits(models: Sequence[Served]) -> None:
    """K/V on disk have one limit for each directory."""
    first: dict[Path, Served] = {}
    for served in models:
        settings, directory = served.config.kv.disk, served.store
        if directory is None:
            continue
        other = first.setdefault(directory, served)
        if other.config.kv.disk.max_mb != settings.max_mb:
            raise ConfigError(
                f"kv.disk.max_mb is {other.config.kv.disk.max_mb:.12g} for {other.name} and {settings.max_mb:.12g} for "
                f"{served.name}, which keep K/V in the same directory: give them one limit, or one of them another "
                "kv.disk.directory"
            )


def could_not(served: Served, why: object) -> str:
    return f"{served.name} could not be loaded: {why}"


def unavailable(served: Served, why: object, retry_after_s: float) -> ModelUnavailableError:
    """What could not be loaded, and why. Clients learn the names of its files, not where they lie."""
    message = public = could_not(served, why)
    files = served.estimate.files
    named = [Path(served.entry.name), Path(served.entry.name).expanduser(), *(files.paths if files else ())]
    for directory in sorted({str(path.parent) for path in named} - {".", "/"}, key=len, reverse=True):
        public = public.replace(f"{directory}/", "")
    return ModelUnavailableError(message, retry_after_s, public)
