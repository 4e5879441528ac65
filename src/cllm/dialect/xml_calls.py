"""Tool calls as Qwen3-Coder writes them: `<function=name><parameter=key>value</parameter></function>`.

Texts stand there as they are, all else as JSON. What is passed on is the JSON of all arguments, as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cllm.dialect.calls import CallState, Tools
from cllm.dialect.json_scan import JsonScanner, repaired
from cllm.dialect.reader import Attempt
from cllm.dialect.reasoning import held_back
from cllm.dialect.syntax import JsonAttempt, JsonSyntax, OrJsonAttempt

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
TEXT = frozenset({"string"})
_LONGEST_TAG = 1024
_TYPES: Mapping[type, frozenset[str]] = {
    str: TEXT,
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
_ALL_TYPES = frozenset().union(*_TYPES.values())
_PLAIN_KEYS = {
    *("type", "properties", "required", "additionalProperties", "title", "description"),
    *("$defs", "$schema", "x-guidance"),
}
_PLAIN_TEXT_KEYS = {"type", "enum", "const", "title", "description", "default", "examples"}
_KEY = re.compile(r"[^\s>]([^\n>]*[^\s>])?")
_FAR_REFERENCE = re.compile(r'"\$(?:dynamic|recursive)?[rR]ef": "(?!#/\$defs/)')
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def types_of(schema: Any, nested: int = 8) -> frozenset[str] | None:
    """The JSON types that a schema allows; None: it does not say, or in more than so many nested ones."""
    if not isinstance(schema, dict) or not nested:
        return None
    given, values, branches = (schema.get(key) for key in ("type", "enum", "anyOf"))
    if isinstance(given, str | list):
        types = frozenset([given] if isinstance(given, str) else map(str, given))
        return types if types <= _ALL_TYPES else None  # "float", for example
    if "const" in schema:
        values = [schema["const"]]
    if isinstance(values, list):
        return frozenset().union(*(_TYPES.get(type(value), frozenset()) for value in values))
    if not isinstance(branches, list):
        return None
    found = [types_of(each, nested - 1) for each in branches]
    return None if None in found else frozenset().union(*filter(None, found))


def property_of(schema: Mapping[str, Any] | None, key: str) -> Any:
    """The schema of one argument. One that the tool does not have is text."""
    properties = (schema or {}).get("properties")
    return properties.get(key, {"type": "string"}) if isinstance(properties, dict) else {"type": "string"}


def plain_arguments(schema: Mapping[str, Any] | None) -> list[tuple[str, Any, bool]] | None:
    """(key, schema, required) of all arguments, where each by itself can be made to fit; None: they cannot be."""
    if schema is None:
        return []
    if not schema.keys() <= _PLAIN_KEYS or not isinstance(schema.get("properties"), dict):
        return None
    properties, required = schema["properties"], schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) and key in properties for key in required):
        return None
    shared = {key: schema[key] for key in ("$defs", "x-guidance") if key in schema}
    found = []
    for key, each in properties.items():
        types = types_of(each)
        is_text = types == TEXT
        simple = _is_plain_text(each) if is_text else bool(types) and "string" not in (types or ())
        if not simple or _KEY.fullmatch(key) is None or _FAR_REFERENCE.search(json.dumps(each)):
            return None
        found.append((key, each if is_text else {**shared, **each}, key in required))
    return found


def _is_plain_text(schema: Mapping[str, Any]) -> bool:
    """Any text, or one of some that are written as they are."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum", ["any"])
    written = isinstance(choices, list) and all(isinstance(each, str) and each for each in choices)
    return bool(choices) and written and schema.keys() <= _PLAIN_TEXT_KEYS and END_PARAMETER not in "".join(choices)


class XmlSyntax(JsonSyntax):
    """Behind the marker may also stand a call in JSON. Models sometimes leave the marker out."""

    def __init__(self) -> None:
        super().__init__("<tool_call>", FUNCTION)
        self._close = ("</tool_call>",)

    def begins(self, text: str, *, at_start: bool, after_call: bool) -> tuple[int, int, int]:
        return super().begins(text, at_start=False, after_call=False)

    def attempt(self, opening: str, tools: Tools) -> Attempt:
        return XmlAttempt(tools, FUNCTION if opening == FUNCTION else "")


class XmlAttempt(OrJsonAttempt):
    def __init__(self, tools: Tools, tag: str) -> None:
        """`tag`: the beginning of the first tag, as far as it has been read."""
        super().__init__(tools)
        self._tag = tag
        self._value: _ArgumentValue | None = None
        self._any = False
        """Whether there were arguments."""

    def feed(self, char: str) -> CallState:
        if self._json is not None:
            return self._feed_json(self._json, char)
        if self._value is not None:
            if self._value.feed(char, self.arguments):
                self._value = None
            return CallState.OPEN
        if not self._tag and char.isspace():
            return CallState.OPEN
        if not self._tag and self.name is None and char == "{":
            self._json = JsonAttempt(self._tools, bare=False)
            return self._feed_json(self._json, char)
        return self._feed_tag(char)

    def _feed_tag(self, char: str) -> CallState:
        tag = self._tag + char
        if self.name is not None and tag == END_FUNCTION:
            self.arguments.append("}" if self._any else "{}")
            self.complete = True
            return CallState.DONE
        begin = FUNCTION if self.name is None else PARAMETER
        given = tag.removeprefix(begin)
        if given == tag:
            fits = begin.startswith(tag) or (self.name is not None and END_FUNCTION.startswith(tag))
        else:
            fits = len(tag) <= _LONGEST_TAG and not (char == ">" and self._unknown(given[:-1]))
        if not fits:
            self.took_last = False
            return CallState.FAILED if self.name is None else CallState.BROKEN
        self._tag = tag
        if given != tag and char == ">":
            self._tag = ""
            self._begin(given[:-1])
        return CallState.OPEN

    def _unknown(self, given: str) -> bool:
        return not given or (self.name is None and given not in self._tools)

    def _begin(self, given: str) -> None:
        if self.name is None:
            self.name = given
            return
        types = types_of(property_of(self._tools[self.name], given))
        self.arguments.append(f"{', ' if self._any else '{'}{json.dumps(given, ensure_ascii=False)}: ")
        self._any = True
        self._value = _ArgumentValue(types)
        if self._value.is_text:
            self.arguments.append('"')


class _ArgumentValue:
    """The value of one argument, without the line breaks next to its tags."""

    def __init__(self, types: frozenset[str] | None) -> None:
        self.is_text = types == TEXT
        self._types = types
        self._held = ""
        self._first = True
        self._scanner = None if self.is_text else JsonScanner()
        """None: it is neither an object nor a list."""

    def feed(self, char: str, to: list[str]) -> bool:
        """True: this was its end."""
        first, self._first = self._first, False
        if first and char == "\n":
            return False
        if self._scanner is not None:
            in_string = self._scanner.in_string
            if not self._scanner.feed(char):
                self._scanner = None
            elif in_string:  # in which its end would be part of the string
                self._held += repaired(char)
                return False
        self._held += char
        if char == ">" and self._held.endswith(END_PARAMETER):
            value = self._held.removesuffix(END_PARAMETER).removesuffix("\n")
            to.append(f'{_escaped(value)}"' if self.is_text else _as_json(value, self._types))
            return True
        if self.is_text:
            certain = len(self._held)
            if "<" in self._held or char == "\n":  # which its end may begin with
                certain -= max(held_back(self._held, END_PARAMETER), held_back(self._held, f"\n{END_PARAMETER}"))
            if certain:
                to.append(_escaped(self._held[:certain]))
                self._held = self._held[certain:]
        return False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(written: str, types: frozenset[str] | None) -> str:
    """Text, if it is not valid JSON or has none of these types."""
    text = _PYTHONS.get(written.strip(), written.strip())
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    if types is not None and not _TYPES[type(value)] & (types - TEXT):
        return json.dumps(written, ensure_ascii=False)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")
