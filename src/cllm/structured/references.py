"""References within a JSON schema."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def opens_a_document(schema: Mapping[str, Any]) -> bool:
    """Whether references in it are no longer to the document around it."""
    return isinstance(schema.get("$id"), str) or isinstance(schema.get("id"), str)


def index_of(step: str) -> int:
    """In a list; past the end of any if it is no number."""
    return int(step) if step.isdecimal() and len(step) < len(str(sys.maxsize)) else sys.maxsize


class References:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def target(self, reference: Any) -> Any:
        """What is at `#/...`; None: nothing is, or it is not plain that it is meant."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return None
        found: Any = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and (index := index_of(name)) < len(found):
                found = found[index]
            else:
                return None
            if isinstance(found, Mapping) and opens_a_document(found):
                return None
        return found
