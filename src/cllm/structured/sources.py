"""The grammar given to llguidance for each kind of structure. Errors are `ValueError`s that say where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, StructTag, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from cllm.structured.structure import Structure

JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""As `json.dumps` writes it. Where blanks are free, small models write them until the answer is full."""

MOST_NESTED = 200
"""Brackets within brackets,"""
MOST_RULES = 2000
"""and rules, or references: what reads a grammar goes as deep as they do."""

_RULE = re.compile(r'\$[a-zA-Z]*ref\\*"|(?:^|\\n|\n)\s*[?!]?\w+(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:', re.IGNORECASE)
_NAMED = re.compile(r"""Unimplemented keys: \["([^"]+)"|Invalid type: (\S+)|(?:Pointer|Resource) '([^']+)'""")
_ANY_OBJECT = {"type": "object"}


def source_of(structure: Structure) -> str:
    source = _GRAMMARS[structure.kind](structure.source)
    if len(_RULE.findall(source)) > MOST_RULES:
        raise ValueError(f"has more than {MOST_RULES} rules or references")
    return source


def rule_of(structure: Structure) -> str:
    """For the kinds that may be a part of a grammar: what stands behind a rule's name."""
    return RULES[structure.kind](structure.source)


def schema_rule(schema: Mapping[str, Any]) -> str:
    """An object's, or any other value's."""
    return f"%json {json.dumps({'x-guidance': JSON_STYLE, **schema})}"


def located(structure: Structure, error: str) -> str:
    """The error, and where in the schema it is, if what it names is there."""
    if structure.kind != "json_schema":
        return error
    found = _NAMED.search(error)
    if found is None:
        return error
    name = next(each for each in found.groups() if each is not None)
    waiting: list[tuple[str, Any]] = [("", _parsed(structure.source))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            if name in value or value.get("type") == name or value.get("$ref") in (name, f"#{name}"):
                return f"{error} (at {path or '/'})"
            waiting += [(f"{path}/{key}", each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{path}/{index}", each) for index, each in enumerate(value)]
    return error


def _of_schema(schema: Mapping[str, Any]) -> str:
    """As `schema_rule`; its errors quote no grammar that nobody wrote."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_STYLE)  # type: ignore[arg-type]


def _schema(source: str) -> Mapping[str, Any]:
    schema = _parsed(source)
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"must be an object, not {json.dumps(schema)[:40]}")
    if schema is False:
        raise ValueError("allows no answer at all: the schema is false")
    return {} if schema is True else schema


def _regex(source: str) -> str:
    return f"/{regex_to_lark(source, use_ascii='dw')}/"  # as in JSON schemas


def _choice(source: str) -> str:
    choices = _parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("must be a list of strings, none of them empty, at least one")
    return " | ".join(json.dumps(each) for each in choices)


def _lark(source: str) -> str:
    _check_nesting(source)
    return LLMatcher.grammar_from_lark(source)


def _gbnf(source: str) -> str:
    _check_nesting(source)
    if is_lark_syntax(source):
        return LLMatcher.grammar_from_lark(source)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(source))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:
        raise ValueError(" ".join(str(error).split())) from error


def _structural_tag(source: str) -> str:
    """What vLLM calls so: text in which tags may begin, and once one has, what follows is as its schema says."""
    described = _parsed(source)
    if not isinstance(described, dict):
        raise ValueError("must be an object")
    structures, triggers = described.get("structures"), described.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise ValueError("must have `structures` and `triggers`, lists that are not empty")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("has a trigger that is not text")
    return StructTag.to_grammar([_tag(number, each, triggers) for number, each in enumerate(structures)])


def _tag(number: int, structure: Any, triggers: list[str]) -> StructTag:
    where = f"structures[{number}]"
    if not isinstance(structure, dict):
        raise ValueError(f"has {where}, which is not an object")
    begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"has {where} without `begin` and `end`, which are texts")
    if not isinstance(schema, dict):
        raise ValueError(f"has {where}.schema, which is not an object")
    trigger = max((each for each in triggers if begin.startswith(each)), key=len, default=None)
    if trigger is None:
        raise ValueError(f"has {where}.begin, which begins with none of the triggers")
    return StructTag(trigger=trigger, begin=begin, grammar={"x-guidance": JSON_STYLE, **schema}, end=end)


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _check_nesting(source: str) -> None:
    depth = 0
    for character in source:
        if character in "([{":
            depth += 1
            if depth > MOST_NESTED:
                raise ValueError(f"has more than {MOST_NESTED} brackets within brackets")
        elif character in ")]}":
            depth = max(0, depth - 1)


RULES: dict[str, Callable[[str], str]] = {
    "json": lambda _: schema_rule(_ANY_OBJECT),
    "json_schema": lambda source: schema_rule(_schema(source)),
    "regex": _regex,
    "choice": _choice,
}
"""Kinds that may be one of several things an answer may be."""
_GRAMMARS: dict[str, Callable[[str], str]] = {
    "json": lambda _: _of_schema(_ANY_OBJECT),
    "json_schema": lambda source: _of_schema(_schema(source)),
    "regex": lambda source: LLMatcher.grammar_from_lark(f"start: {_regex(source)}"),
    "choice": lambda source: LLMatcher.grammar_from_lark(f"start: {_choice(source)}"),
    "lark": _lark,
    "gbnf": _gbnf,
    "structural_tag": _structural_tag,
}
