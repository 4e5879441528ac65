"""What all sections are made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Strict: `port: true` or `port: "8000"` is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field of a section; `limits` as for pydantic's `Field`."""
    return Field(default, description=description, **limits)


def must_be(wanted: str) -> PydanticCustomError:
    """The error for a value that its type and limits cannot refuse; the message says "it must be ..."."""
    return PydanticCustomError("pattern", "{wanted}", {"wanted": wanted})
