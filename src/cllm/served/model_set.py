"""What a server needs of its models, whether one or several, loaded all the time or when they are asked for."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from prometheus_client.registry import Collector

from cllm.config import Config, ModelEntry
from cllm.kv.ledger import AccountStatus
from cllm.llm import AsyncLLM
from cllm.loading.estimate import Estimate
from cllm.served.entries import ServedModel
from cllm.work.pool import Workers

_NOT_ESTIMATED = Estimate("", "fake", 0, 0, 0, is_elastic=False)


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


class FixedModels(ModelSet):
    """Models that are there as long as their server: the only one, or those of a cluster."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        find: Callable[[str], ServedModel | None],
        metrics: Callable[[str], Collector],
        sharing: Sharing | None = None,
    ) -> None:
        """`models` have an `llm`, started or not. `find` knows their names."""
        self.models = models
        self.sharing = sharing
        self._llms = [served.llm for served in models if served.llm is not None]
        self._find = find
        self._metrics = metrics

    @property
    def workers(self) -> Workers | None:
        return self._llms[0].workers

    @property
    def ready(self) -> bool:
        return all(llm.ready for llm in self._llms)

    async def start(self) -> None:
        try:
            for served, llm in zip(self.models, self._llms, strict=True):
                await llm.start()
                if self.on_loaded is not None:
                    await self.on_loaded(served, llm)
        except BaseException:
            await self.shutdown(0)
            raise

    async def shutdown(self, grace_s: float | None = None) -> None:
        await asyncio.gather(*(llm.shutdown(grace_s) for llm in self._llms))

    def find(self, name: str | None) -> ServedModel | None:
        return self.default if name is None else self._find(name)

    async def acquire(self, served: ServedModel, timeout_s: float | None = None) -> AsyncLLM:
        """At once. While a model of a cluster has no replica, its requests wait for one."""
        assert served.llm is not None
        served.users += 1
        return served.llm

    def metrics(self, prefix: str) -> Collector:
        return self._metrics(prefix)


def only_model(llm: AsyncLLM, config: Config) -> FixedModels:
    """A set of one, which is called as the model's file says, unless it has an alias."""
    entry = ModelEntry(name=config.model.name, pinned=True)
    served = ServedModel(
        config.model.alias,
        (entry.name,),
        config,
        entry,
        _NOT_ESTIMATED,
        at_start=True,
        observers=llm.observers,
        state="ready",
        llm=llm,
    )
    return FixedModels([served], lambda name: served if name in (served.name, entry.name) else None, llm.metrics)
