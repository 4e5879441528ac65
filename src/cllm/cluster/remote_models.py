"""Several models of a cluster, with the interface of `ServedModels`. Each has replicas of its own, always loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import cast

from prometheus_client.registry import Collector

from cllm.cluster.collector import ClusterCollector
from cllm.cluster.remote import RemoteExecutor
from cllm.config import Config, ModelEntry
from cllm.errors import ModelBusyError, ModelUnavailableError
from cllm.kv.ledger import AccountStatus
from cllm.llm import AsyncLLM
from cllm.loading.estimate import Estimate, Kind
from cllm.served import ServedModel, ServedModels
from cllm.served.entries import by_name
from cllm.served.memory import DeviceMemory


class RemoteModels(ServedModels):
    def __init__(self, config: Config, llms: Sequence[AsyncLLM]) -> None:
        """`llms`: those of `config.models`, started. Raises `ConfigError` if two of them have the same name."""
        self.models = [_served(entry, llm) for entry, llm in zip(config.models, llms, strict=True)]
        self._by_name = by_name(self.models)
        self.memories: dict[str, DeviceMemory] = {}  # replicas have their own
        self.on_loaded = None
        self.on_unloaded = lambda served: None
        self.workers = llms[0].workers if llms else None
        self._llms = llms

    @property
    def ready(self) -> bool:
        return all(llm.ready for llm in self._llms)

    async def start(self) -> None:
        """They are started."""

    async def shutdown(self, grace_s: float | None = None) -> None:
        await asyncio.gather(*(llm.shutdown(grace_s) for llm in self._llms))
        if self.workers is not None:
            self.workers.close()

    @property
    def budget(self) -> int:
        return 0

    def metrics(self, prefix: str) -> Collector:
        executors = [llm.executor for llm in self._llms]
        return ClusterCollector(
            [partial(each.metric_families, prefix) for each in executors if isinstance(each, RemoteExecutor)]
        )

    def account_status(self) -> list[AccountStatus]:
        return []

    async def acquire(self, served: ServedModel, timeout_s: float | None = None) -> AsyncLLM:
        """While a model has no replica, its requests wait for one, as in a cluster with a single model."""
        assert served.llm is not None
        served.users += 1
        return served.llm

    async def load(self, served: ServedModel) -> None:
        if not served.ready:
            raise ModelUnavailableError(f"{served.name} has no replica now; the cluster starts them by itself")

    async def unload(self, served: ServedModel, *, wait: bool = False) -> None:
        raise ModelBusyError(
            f"{served.name} cannot be unloaded: the models of a cluster stay loaded; remove it from the configuration "
            "and run `cllm cluster up` again"
        )


def _served(entry: ModelEntry, llm: AsyncLLM) -> ServedModel:
    facts, backend = llm.text.facts, llm.text.facts.traits.name
    name = entry.client_name(backend) if backend == "fake" or entry.aliases else facts.name
    about = Estimate(facts.name, cast("Kind", backend), 0, facts.bytes_per_token, facts.max_context, is_elastic=False)
    return ServedModel(
        name,
        tuple(dict.fromkeys((name, *entry.aliases, facts.name, entry.name))),
        llm.config,
        entry,
        about,
        at_start=True,
        observers=llm.observers,
        state="ready",
        llm=llm,
    )
