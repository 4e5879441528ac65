"""What chat templates read besides the conversation, as llama-server and transformers give it to them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import UndefinedError, meta, nodes

from cllm.text.sandbox import environment

_DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
"""Today, as llama-server writes it. Templates that call `strftime_now` write it themselves."""
_UNDEFINED = re.compile(r"'(\w+)' is undefined")


class TemplateVariables:
    def __init__(self, source: str) -> None:
        tree = environment().parse(source)
        self.read = frozenset(meta.find_undeclared_variables(tree))
        """The names that the template reads and does not always set."""
        self._set = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "store")
        self._has_defaults = frozenset(_names_with_defaults(tree))

    def values(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        now = datetime.now()
        values: dict[str, Any] = {name: now.strftime(form) for name, form in _DATES.items() if name in self.read}
        values["documents"] = None
        if "functions" in self.read:
            values["functions"] = json.dumps(tools, indent=2, ensure_ascii=False) if tools else ""
        if "enable_thinking" not in self._has_defaults:
            values["enable_thinking"] = True
        return values

    def missing(self, error: Exception) -> str | None:
        """The variable without which a template has failed, if nobody gives it."""
        found = _UNDEFINED.fullmatch(str(error)) if isinstance(error, UndefinedError) else None
        return found[1] if found is not None and found[1] in self.read - self._set else None


def _names_with_defaults(tree: nodes.Template) -> list[str]:
    """The variables for which the template itself says what holds without them."""
    asked = [
        test.node
        for test in tree.find_all((nodes.Test, nodes.Filter))
        if test.name in (("defined", "undefined") if isinstance(test, nodes.Test) else ("default", "d"))
    ]
    return [node.name for node in asked if isinstance(node, nodes.Name)]
