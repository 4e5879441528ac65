"""The models of a configuration, each with its names, its settings and what it will take."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cllm.assemble import Kept
from cllm.choosing import Estimate, estimate
from cllm.config import Config, ModelEntry, config_of
from cllm.engine.observer import Observers
from cllm.engine.stats import EngineSnapshot
from cllm.errors import ConfigError, ModelError
from cllm.kv.ledger import Account
from cllm.llm import AsyncLLM
from cllm.models.registry import models_in

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
    last_used: float = 0.0
    loads: int = 0
    retry_at: float = 0.0
    changing: asyncio.Task[None] | None = None
    """Loads or unloads it."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.llm is not None and self.llm.ready

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
            raise ConfigError(
                f"{entry.name} is a directory of {len(paths)} models: they cannot share aliases; remove them"
            )
        for path in paths:
            single = entry.model_copy(update={"name": str(path)})
            try:
                found.append(_read_entry(config, single, at_start=entry.load == "start"))
            except ModelError as error:
                log.warning("left out: %s", error)
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
    """Names that clients see are unique. Others go to the first that has them."""
    shown = {served.name: served for served in reversed(models)}
    for served in models:
        if shown[served.name] is not served:
            raise ConfigError(f"two models are called {served.name!r}: give one of them another alias")
    named = {name: served for served in reversed(models) for name in served.names}
    return named | {name: served for served in models for name in served.entry.aliases} | shown
