"""One tool call in JSON, read as it comes: `{"name": …, "arguments": {…}}`, in any order and with any more keys.

Until the name is certain, nothing is said of the call, and all of it can still become plain text. From then on its
arguments are passed on as they come, for as long as they are the beginning of a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from cllm.dialect.json_scan import JsonScanner, repaired

_ARGUMENTS = ("arguments", "parameters")
_NAME = "name"
_KEYS = frozenset({_NAME, *_ARGUMENTS, "type", "function", "id"})
"""Keys of a call, if only its keys mark an object as one."""


Tools = Mapping[str, Mapping[str, Any] | None]
"""Names of the tools that may be called, and the schemas of their arguments."""


class CallState(Enum):
    OPEN = auto()
    """More must come."""
    DONE = auto()
    """The call is whole, and the character was its last, or was not part of it: see `CallReader.took_last`."""
    FAILED = auto()
    """No call; nothing was said of it."""
    BROKEN = auto()
    """A call that was announced, whose arguments are no JSON."""


class CallReader:
    """Feed it characters. `name` is set once it is certain, `arguments` collects what is to be passed on."""

    def __init__(self, tools: Tools, *, needs_arguments: bool = False) -> None:
        """`needs_arguments`: nothing else says that this is a call, so a name alone, or other keys, make none."""
        self.name: str | None = None
        self.arguments: list[str] = []
        self.took_last = True
        """Whether the last character belonged to the call."""
        self._tools = tools
        self._needs_arguments = needs_arguments
        self._scanner = JsonScanner()
        self._seen: list[str] = []
        self._string: list[str] = []
        """The key or value that is being read, of the call itself."""
        self._key = ""
        self._named: str | None = None
        self.complete = False
        """Whether the arguments of an announced call are whole."""

    @property
    def ended(self) -> bool:
        """Whether the last bracket has been read."""
        return self._scanner.done

    def feed(self, char: str) -> CallState:
        scanner = self._scanner
        depth, was_string = len(scanner.stack), scanner.in_string
        if not scanner.feed(char):
            self.took_last = False
            return CallState.FAILED if self.name is None else CallState.DONE if self.complete else CallState.BROKEN
        clean = repaired(char) if was_string else char
        if self.name is not None:
            return self._feed_announced(clean)
        self._seen.append(clean)
        if depth == 1 and (scanner.in_string or was_string):
            self._read_string(char, clean, began=not was_string)
        if self._named is not None and self._named not in self._tools:
            return CallState.FAILED
        if self._needs_arguments and self._key and self._key not in _KEYS:
            return CallState.FAILED
        if depth == 1 and char == "{" and not was_string and self._key in _ARGUMENTS and self._named is not None:
            self.name = self._named
            self.arguments.append(char)
            return CallState.OPEN
        return self._end() if scanner.done else CallState.OPEN

    def _feed_announced(self, clean: str) -> CallState:
        if not self.complete:
            self.arguments.append(clean)
            self.complete = len(self._scanner.stack) == 1
        return CallState.DONE if self._scanner.done else CallState.OPEN

    def _read_string(self, char: str, clean: str, *, began: bool) -> None:
        """Reads strings among the call's own keys and values."""
        if began:
            self._string = [char]
            return
        self._string.append(clean)
        if self._scanner.in_string:
            return
        text: str = json.loads("".join(self._string))
        if self._scanner.is_key:
            self._key = text
        elif self._key == _NAME:
            self._named = text

    def _end(self) -> CallState:
        """All is there, and its name has not been certain before."""
        try:
            value = json.loads("".join(self._seen))
        except ValueError:  # an integer of more digits than Python reads
            return CallState.FAILED
        call = read_call(value, self._tools, needs_arguments=self._needs_arguments)
        if call is None:
            return CallState.FAILED
        self.name, arguments = call
        self.arguments.append(arguments)
        self.complete = True
        return CallState.DONE


def read_call(value: Any, tools: Tools, *, needs_arguments: bool = False) -> tuple[str, str] | None:
    """Name and arguments of a whole call, in one of the forms that models write."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get(_NAME, value.get("function"))
    if not isinstance(name, str) or name not in tools:
        return None
    arguments = next((value[key] for key in _ARGUMENTS if key in value), "" if needs_arguments else None)
    if arguments == "" and needs_arguments:
        return None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
