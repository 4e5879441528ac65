"""The models of a cluster as a server's. Each has replicas of its own, always loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from cllm.cluster.collector import ClusterCollector
from cllm.cluster.remote import RemoteExecutor
from cllm.config import Config, ModelEntry
from cllm.errors import ModelBusyError, ModelUnavailableError
from cllm.kv.ledger import AccountStatus
from cllm.llm import AsyncLLM
from cllm.loading.estimate import BackendKind, Estimate
from cllm.served import FixedModels, ServedModel, only_model
from cllm.served.entries import by_name


def remote_models(config: Config, llms: Sequence[AsyncLLM]) -> FixedModels:
    """`llms`: those of `config.models`, started. Raises `ConfigError` if two of them have the same name."""
    if not config.models:
        return only_model(llms[0], config)
    models = [_served(entry, llm) for entry, llm in zip(config.models, llms, strict=True)]
    executors = [llm.executor for llm in llms]
    return FixedModels(
        models,
        by_name(models).get,
        lambda prefix: ClusterCollector(
            [partial(each.metric_families, prefix) for each in executors if isinstance(each, RemoteExecutor)]
        ),
        _NothingShared(),
    )


class _NothingShared:
    """Replicas have memory of their own."""

    budget = 0

    def account_status(self) -> list[AccountStatus]:
        return []

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
    about = Estimate(
        *(facts.name, cast("BackendKind", backend), 0, facts.bytes_per_token, facts.max_context),
        is_elastic=False,
        groups=facts.groups,
    )
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
