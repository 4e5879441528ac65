"""What a server needs of its models, whether one or several, loaded all the time or when they are asked for."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from prometheus_client.registry import Collector

from cllm.kv.ledger import AccountStatus
from cllm.llm import AsyncLLM
from cllm.served.entries import ServedModel
from cllm.work.pool import Workers


class Sharing(Protocol):
    """What several models have in common."""

    @property
    def budget(self) -> int:
        """Bytes, of all devices together."""

    def account_status(self) -> list[AccountStatus]:
        """Memory accounts of all loaded models."""

    async def load(self, served: ServedModel) -> None:
        """Load it, unless it is loaded."""

    async def unload(self, served: ServedModel, *, wait: bool = False) -> None:
        """Unload it, unless it is unloaded. With `wait`, once its requests have ended."""


class ModelSet(ABC):
    """The models behind a server. `start` loads those that are to be there from the beginning."""

    models: Sequence[ServedModel]
    sharing: Sharing | None
    """None: there is one model, which has everything."""
    on_loaded: Callable[[ServedModel, AsyncLLM], Awaitable[None]] | None = None
    """Called after a model is loaded, before requests use it."""
    on_unloaded: Callable[[ServedModel], None] | None = None
    """Called after a model is unloaded."""

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self.models[0]

    @property
    @abstractmethod
    def workers(self) -> Workers | None:
        """None before the start, if they are those of the only model."""

    @property
    @abstractmethod
    def ready(self) -> bool: ...

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def shutdown(self, grace_s: float | None = None) -> None:
        """Let running requests finish within `grace_s`, refuse the rest, free everything. Safe to call again."""

    @abstractmethod
    def find(self, name: str | None) -> ServedModel | None:
        """The model with this name, one of its own or any other."""

    @abstractmethod
    async def acquire(self, served: ServedModel, timeout_s: float | None = None) -> AsyncLLM:
        """Load the model if need be. It stays loaded until `served.release` is called."""

    @abstractmethod
    def metrics(self, prefix: str) -> Collector:
        """What /metrics says of all models. To be called once."""

    async def refresh(self) -> None:
        """Have the numbers of all models say how things are now."""
        await asyncio.gather(*(served.llm.refresh() for served in self.models if served.llm is not None))
