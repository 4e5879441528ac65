"""The structure that a request requires of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StructureKind = Literal["json", "json_schema", "regex", "choice", "lark", "gbnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Structure:
    kind: StructureKind
    source: str
    """The JSON text of a schema, of a list of choices or of structural tags; a regular expression; a grammar. For
    `json`, any object, it says nothing."""
    param: str = "structured"
    """The request's field that errors name."""
