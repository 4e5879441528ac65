"""What an answer must look like, as a request says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StructureKind = Literal["json", "json_schema", "regex", "choice", "lark", "gbnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Structure:
    kind: StructureKind
    source: str
    """JSON text of the schema, choices or tags, or the regular expression or grammar itself."""
    param: str = "structured"
    """The request's field to name in errors."""
