"""The models of a cluster: each has replicas of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cllm import __version__
from cllm.config import Config, ModelConfig, ModelEntry, config_of
from cllm.errors import ConfigError
from cllm.models.registry import is_path, models_in

INGRESS = "ingress"
"""The deployment of ingresses."""
REPLICA = "replica"
"""The deployment of the replicas of a model, or how its name begins."""


@dataclass(frozen=True)
class ClusterModel:
    deployment: str
    """Ray Serve's name of its replicas."""
    name: str
    """As clients see it, as far as it is known without opening the model's files."""
    config: Config
    """Its own settings and the common ones."""
    most: int
    """The largest number of replicas that all models have together: those on a machine share its memory."""

    @property
    def version(self) -> str:
        """Replicas of another version are replaced in an update."""
        version = version_of(self.config, without=("server", "responses", "cluster", "models"))
        return f"{version}-{self.most}" if self._shares_memory else version

    @property
    def _shares_memory(self) -> bool:
        """Whether the number of replicas decides how much KV memory each has (`share.py`)."""
        config = self.config
        has_own = config.resources.kv_cache_max_memory_mb is not None or config.cluster.memory_mb is not None
        return not has_own and config.cluster.gpus == 0 and config.backend.type != "fake"


def cluster_models(config: Config) -> list[ClusterModel]:
    """Raises `ConfigError` for settings that make no sense in a cluster."""
    if not config.models:
        name = config.model.alias or config.model.name
        return [ClusterModel(REPLICA, name, config, config.cluster.most_replicas)]
    most = sum(config_of(config, entry).cluster.most_replicas for entry in config.models)
    found: dict[str, ClusterModel] = {}
    for number, entry in enumerate(config.models):
        own = config_of(config, entry)
        _check_entry(f"models[{number}] ({entry.name})", entry, own)
        name = entry.client_name(own.backend.type)
        plain = f"{REPLICA}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}"
        deployment = plain if plain not in found else f"{plain}-{number}"
        found[deployment] = ClusterModel(deployment, name, own, most)
    return list(found.values())


def _check_entry(place: str, entry: ModelEntry, config: Config) -> None:
    if entry.load == "first_use" or entry.unload_after_s is not None:
        key = "load: first_use" if entry.load == "first_use" else "unload_after_s"
        raise ConfigError(f"{place} has {key}: the models of a cluster stay loaded; remove it")
    if config.backend.type != "fake" and models_in(entry.name) is not None:
        raise ConfigError(f"{place} is a directory of models: name each model of a cluster")


def with_absolute_paths(config: Config) -> Config:
    """Other processes of the cluster have other working directories."""
    resolved: Config = _resolve(config)
    return resolved


def _resolve(value: Any) -> Any:
    if isinstance(value, Path):
        return value.expanduser().absolute()
    if isinstance(value, tuple):
        return tuple(map(_resolve, value))
    if not isinstance(value, BaseModel):
        return value
    changed = dict(_changed_fields(value))
    return value.model_copy(update=changed) if changed else value


def _changed_fields(section: BaseModel) -> Iterator[tuple[str, Any]]:
    """Only what changes: what was not set stays unset. A model may be named by the path of its file."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name == "name" and isinstance(section, ModelConfig | ModelEntry):
            resolved = str(_resolve(Path(value))) if is_path(value) and Path(value).expanduser().exists() else value
        else:
            resolved = _resolve(value)
        if resolved != value:
            yield name, resolved


def version_of(config: Config, *, without: tuple[str, ...]) -> str:
    """The same for the same settings, but for those sections or dotted keys."""
    tree = config.model_dump(mode="json")
    for key in without:
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place[section]
        del place[name]
    return hashlib.sha256(json.dumps([__version__, tree], sort_keys=True).encode()).hexdigest()[:16]
