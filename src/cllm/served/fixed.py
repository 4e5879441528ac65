"""Models that are there as long as their server: the only one, or those of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from prometheus_client.registry import Collector

from cllm.config import Config, ModelEntry
from cllm.llm import AsyncLLM
from cllm.loading.estimate import Estimate
from cllm.served.entries import ServedModel
from cllm.served.model_set import ModelSet, Sharing
from cllm.work.pool import Workers

_NOT_ESTIMATED = Estimate("", "fake", 0, 0, 0, is_elastic=False)


class FixedModels(ModelSet):
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
