"""What is computed before anybody asks for it: the entries of `kv.warm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Role = Literal["system", "developer", "user", "assistant"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class WarmMessage(_Entry):
    role: Role
    content: str


class WarmPrefix(_Entry):
    """One of prompt, messages and file. A text by itself is a prompt."""

    prompt: str | None = Field(default=None, min_length=1)
    messages: tuple[WarmMessage, ...] | None = Field(default=None, strict=False, min_length=1)
    file: Path | None = Field(default=None, strict=False)
    """A text; or, with a name that ends in .json, messages."""
    role: Role | None = None
    """Whose message the text is; without, it is what prompts themselves begin with."""
    pin: bool = True
    ttl_s: float | None = Field(default=None, gt=0)
    shared: bool = True
    """Whether all keys find it, where each has cached prefixes of its own; otherwise it is the operator's."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_prompt(cls, data: Any) -> Any:
        return {"prompt": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _is_one_thing(self) -> WarmPrefix:
        given = [name for name in ("prompt", "messages", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise PydanticCustomError("warm", "{problem}", {"problem": f"one of prompt, messages and file, not {what}"})
        if self.role is not None and self.messages is not None:
            problem = "messages with roles of their own, or a role for a text, not both"
            raise PydanticCustomError("warm", "{problem}", {"problem": problem})
        return self
