"""A model among several: how it is called, when it is loaded, and settings that are its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

OWN_SECTIONS = ("backend", "resources", "kv", "scheduler", "drafts", "prompt")
"""Sections of the configuration that a model may have settings of its own in."""
OF_ALL = ("resources.max_memory_mb",)
"""Settings in these sections that all models have in common."""


class ModelEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1, description="as model.name, or a directory of .gguf files, each of which is one")
    aliases: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), strict=False, description="names for clients; the first one is shown"
    )
    chat_template: Path | None = Field(default=None, strict=False, description="as model.chat_template")
    sampling: dict[str, Any] = Field(default={}, description="as model.sampling")
    load: Literal["start", "first_use"] | None = Field(
        default=None, description="when it is loaded (null: at the start; those of a directory on first use)"
    )
    pinned: bool = Field(default=False, description="once it is loaded it stays")
    unload_after_s: float | None = Field(
        default=None, gt=0, description="idle time after which it is unloaded (null: when others need the room)"
    )
    backend: dict[str, Any] = Field(default={}, description="settings of its own")
    resources: dict[str, Any] = Field(default={}, description="settings of its own")
    kv: dict[str, Any] = Field(default={}, description="settings of its own")
    scheduler: dict[str, Any] = Field(default={}, description="settings of its own")
    drafts: dict[str, Any] = Field(default={}, description="settings of its own")
    prompt: dict[str, Any] = Field(default={}, description="settings of its own")

    @model_validator(mode="before")
    @classmethod
    def _a_name_will_do(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def shown_name(self, backend: str) -> str:
        """What clients see it as, so far as that can be said without opening its files."""
        if self.aliases or backend == "fake":
            return self.aliases[0] if self.aliases else self.name
        if self.name.endswith(".gguf"):
            return Path(self.name).stem
        return self.name.rpartition("/")[2] if self.name.startswith("hf:") else self.name

    def own(self) -> dict[str, Any]:
        """Its own settings as sections of a configuration."""
        sections = {name: getattr(self, name) for name in OWN_SECTIONS if getattr(self, name)}
        model: dict[str, Any] = {"name": self.name, "alias": self.aliases[0] if self.aliases else None}
        if self.chat_template is not None:
            model["chat_template"] = self.chat_template
        if self.sampling:
            model["sampling"] = self.sampling
        return {"model": model, **sections}


def called_alike(entries: Sequence[ModelEntry], backends: Sequence[str]) -> list[str]:
    """What is wrong with the names of the models; more may be when their files are opened."""
    first: dict[str, int] = {}
    problems = []
    for number, (entry, backend) in enumerate(zip(entries, backends, strict=True)):
        for name in dict.fromkeys((entry.shown_name(backend), *entry.aliases)):
            other = first.setdefault(name, number)
            if other != number:
                problems.append(
                    f"models[{other}] ({entries[other].name}) and models[{number}] ({entry.name}) are both called "
                    f"{name!r}: give one of them another alias"
                )
    return problems
