"""A model among several: how it is called, when it is loaded, and settings that are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

OWN_SECTIONS = ("backend", "resources", "kv", "scheduler", "prompt")
"""Sections of the configuration that a model may have settings of its own in."""


class ModelEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1, description="as model.name, or a directory of .gguf files, each of which is one")
    aliases: tuple[str, ...] = Field(default=(), strict=False, description="names for clients; the first one is shown")
    chat_template: Path | None = Field(default=None, strict=False, description="as model.chat_template")
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
    prompt: dict[str, Any] = Field(default={}, description="settings of its own")

    @model_validator(mode="before")
    @classmethod
    def _a_name_will_do(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def own(self) -> dict[str, Any]:
        """Its own settings as sections of a configuration."""
        sections = {name: getattr(self, name) for name in OWN_SECTIONS if getattr(self, name)}
        model: dict[str, Any] = {"name": self.name, "alias": self.aliases[0] if self.aliases else None}
        if self.chat_template is not None:
            model["chat_template"] = self.chat_template
        return {"model": model, **sections}
