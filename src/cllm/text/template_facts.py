"""What must be known of a chat template before it renders anything for a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

EXAMPLE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_example",
        "description": "An example",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "A key"}},
            "required": ["key"],
        },
    },
}
EXAMPLE_ARGUMENTS: Mapping[str, Any] = {"key": "value"}
"""A tool, and arguments of a call, that show what a template writes."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    source: str
    variables: frozenset[str]
    """The variables that the template uses."""
    takes_system: bool
    """Whether a conversation may begin with a system message."""
    takes_calls: bool
    """Whether a message may have several calls."""
    example_call: str | None
    """What the template writes for a call of the example tool, or all of it; None: it takes no calls."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "variables": sorted(self.variables)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TemplateFacts:
        return cls(**{**content, "variables": frozenset(content["variables"])})
