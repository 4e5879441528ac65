"""Where schemas are in a schema."""

from __future__ import annotations

LITERAL = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords whose values are no schemas, whatever they look like."""
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose values are schemas by name."""
