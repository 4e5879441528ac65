"""One of several models (`models`): its names, when it is loaded, and its own settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cllm.config.section import Section, setting

OWN_SECTIONS = ("backend", "resources", "kv", "scheduler", "drafts", "prompt", "cluster")
"""Sections that a model may override."""
SHARED_KEYS = (
    "resources.max_memory_mb",
    "cluster.ingresses",
    "cluster.address",
    "cluster.node_ip",
    "cluster.ray_port",
)
"""Settings in these sections that all models share."""


class ModelEntry(Section):
    name: str = Field(min_length=1, description="as model.name, or a directory of models")
    aliases: tuple[Annotated[str, Field(min_length=1)], ...] = setting(
        (), "names that clients may use; the first one is shown to them", strict=False
    )
    chat_template: Path | None = setting(None, "as model.chat_template", strict=False)
    sampling: dict[str, Any] = setting({}, "as model.sampling")
    load: Literal["start", "first_use"] | None = setting(
        None, "when to load it (null: at the start; models of a directory on first use)"
    )
    pinned: bool = setting(False, "never unload it")
    unload_after_s: float | None = setting(
        None, "unload it after this idle time (null: when other models need the memory)", gt=0
    )
    backend: dict[str, Any] = setting({}, "its own settings")
    resources: dict[str, Any] = setting({}, "its own settings")
    kv: dict[str, Any] = setting({}, "its own settings")
    scheduler: dict[str, Any] = setting({}, "its own settings")
    drafts: dict[str, Any] = setting({}, "its own settings")
    prompt: dict[str, Any] = setting({}, "its own settings")
    cluster: dict[str, Any] = setting({}, "its own settings, such as replicas")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def client_name(self, backend: str) -> str:
        """The name that clients see, as far as it is known without opening the model's files."""
        if self.aliases or backend == "fake":
            return self.aliases[0] if self.aliases else self.name
        if self.name.endswith(".gguf"):
            return Path(self.name).stem
        return self.name.rpartition("/")[2] if self.name.startswith("hf:") else self.name

    def overrides(self) -> dict[str, Any]:
        """The model's own settings, by section."""
        sections = {name: getattr(self, name) for name in OWN_SECTIONS if getattr(self, name)}
        model: dict[str, Any] = {"name": self.name, "alias": self.aliases[0] if self.aliases else None}
        if self.chat_template is not None:
            model["chat_template"] = self.chat_template
        if self.sampling:
            model["sampling"] = self.sampling
        return {"model": model, **sections}


def find_name_clashes(entries: Sequence[ModelEntry], backends: Sequence[str]) -> list[str]:
    """Models with the same name. Opening their files may reveal more."""
    first: dict[str, int] = {}
    problems = []
    for number, (entry, backend) in enumerate(zip(entries, backends, strict=True)):
        for name in dict.fromkeys((entry.client_name(backend), *entry.aliases)):
            other = first.setdefault(name, number)
            if other != number:
                problems.append(
                    f"models[{other}] ({entries[other].name}) and models[{number}] ({entry.name}) have the "
                    f"same name {name!r}: give one of them another alias"
                )
    return problems
