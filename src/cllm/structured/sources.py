"""The grammar given to llguidance for each kind of structure. Errors are `ValueError`s that say where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from cllm.structured.effort import check_expressions
from cllm.structured.gbnf import for_the_converter
from cllm.structured.nodes import by_name, schemas_in
from cllm.structured.places import place_of
from cllm.structured.schemas import prepared
from cllm.structured.structure import Structure

JSON_STYLE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""As `json.dumps` writes it. Where blanks are free, small models write them until the answer is full. There are no
escapes by number: with them, a property that has a schema could be written as if it were another one."""

MOST_NESTED = 200
"""Brackets within brackets,"""
MOST_RULES = 2000
"""and rules, or references: what reads a grammar goes as deep as they do."""

_RULE = re.compile(r'\$[a-zA-Z]*ref\\*"|(?:^|\\n|\n)[^\S\n]*[?!]?\w+(?:\.-?\d+)?\s*[\[:]', re.IGNORECASE)
_LARK = re.compile(
    r"^[^\S\n]*(?:%llguidance\b|[?!]?start(?:\.-?\d+)?[^\S\n]*(?:\[[^\]\n]*\][^\S\n]*)?:(?!:=))", re.MULTILINE
)
_LARK_EXPRESSION = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"?|/((?:[^/\\\n]|\\.)*)/?')
"""Or a comment or a string, which may look like one. What is not closed goes to the end of its line: each character is
read once."""
_SIZE = re.compile(r"too (?:large|many|complex|big)|limit|exceeded", re.IGNORECASE)
_NOT_PLAIN = re.compile(r"[^0-9A-Za-z\x80-\U0010ffff]|[\x85\u2028\u2029]")
_JSON_RULE = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()
_CONTROL = re.compile(r"\\u00[01]")
"""Characters that have no other escape."""


def source_of(structure: Structure, special: Mapping[str, int]) -> str:
    """`special`: the vocabulary's special tokens."""
    kind, source = structure.kind, structure.source
    if kind == "json_schema":
        _check_count(_RULE.findall(source))
    if kind in _SCHEMAS:  # by itself: its errors quote no grammar that nobody wrote
        source = LLMatcher.grammar_from_json_schema(json.dumps(_styled(_SCHEMAS[kind](source))))
    elif kind in RULES:
        source = LLMatcher.grammar_from_lark(f"start: {RULES[kind](source)}")
    elif kind == "structural_tag":
        source = _structural_tag(source, special)
    else:
        source = _lark(source) if kind == "lark" else _gbnf(source)
    _check_count(_RULE.findall(source))
    return source


def rule_of(structure: Structure) -> str:
    """For the kinds that may be a part of a grammar: what stands behind a rule's name."""
    return RULES[structure.kind](structure.source)


def schema_rule(schema: Mapping[str, Any]) -> str:
    """An object's, or any other value's."""
    return f"%json {json.dumps(_styled(schema))}"


def located(structure: Structure, error: str, check: Callable[[str], str]) -> str:
    """The error, and where in a schema it is. `check` returns the error of a source."""
    if structure.kind != "json_schema" or _SIZE.search(error):
        return error
    given = _schema(structure.source)
    place = place_of(_styled(given), given, lambda part: check(LLMatcher.grammar_from_json_schema(json.dumps(part))))
    return f"{error} (at {place})"


def _styled(schema: Mapping[str, Any]) -> dict[str, Any]:
    given = schema.get("x-guidance", {})
    if not isinstance(given, dict):
        raise ValueError("x-guidance must be an object")
    try:
        found = {**prepared(schema), "x-guidance": {**JSON_STYLE, **given}}
        if "json_allowed_escapes" not in given and _CONTROL.search(json.dumps([*_fixed_texts(schema)])):
            del found["x-guidance"]["json_allowed_escapes"]
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return found


def _fixed_texts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """What an answer has to repeat to the letter."""
    for node in schemas_in(schema):
        yield from (node[key] for key in ("const", "enum", "required") if key in node)
        yield from by_name(node, "properties")


def _schema(source: str) -> Mapping[str, Any]:
    schema = _parsed(source)
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"must be an object, not {json.dumps(schema)[:40]}")
    if schema is False:
        raise ValueError("allows no answer at all: the schema is false")
    return {} if schema is True else schema


def _regex(source: str) -> str:
    check_expressions([source])
    if (len(source) - len(source.rstrip("\\"))) % 2:
        raise ValueError("ends in a backslash that escapes nothing")
    return f"/{regex_to_lark(source, use_ascii='dw')}/"  # as in JSON schemas


def _choice(source: str) -> str:
    """One expression: of that, many choices are no more work than few."""
    choices = _parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("must be a list of strings, none of them empty, at least one")
    return f"/{'|'.join(map(pattern_of, choices))}/"


def pattern_of(text: str) -> str:
    """In a regular expression of Lark's."""
    return _NOT_PLAIN.sub(lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def _lark(source: str) -> str:
    _check_nesting(source)
    check_expressions(found[1] for found in _LARK_EXPRESSION.finditer(source) if found[1])
    parts, done = [], 0
    for found in _JSON_RULE.finditer(source):
        if found.start() >= done:
            try:
                schema, end = _DECODER.raw_decode(source, found.end())
            except ValueError:  # llguidance says where
                continue
            parts += [source[done : found.end()], json.dumps(prepared(schema))]
            done = end
    return LLMatcher.grammar_from_lark("".join([*parts, source[done:]]))


def _gbnf(source: str) -> str:
    if _LARK.search(source):
        return _lark(source)
    _check_nesting(source)
    _check_count(range(source.count("::=")))  # the converter compares each rule with all others
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(for_the_converter(source)))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:
        raise ValueError(" ".join(str(error).split())) from error


def _structural_tag(source: str, special: Mapping[str, int]) -> str:
    """What vLLM calls so: text in which tags may begin, and once one has, what follows is as its schema says."""
    described = _parsed(source)
    if not isinstance(described, dict):
        raise ValueError("must be an object")
    structures, triggers = described.get("structures"), described.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        other = "; `format` is not supported" if "format" in described else ""
        raise ValueError(f"must have `structures` and `triggers`, lists that are not empty{other}")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("has a trigger that is not text")
    rules = [f"start: ({' | '.join(f'tag_{number}' for number in range(len(structures)))})* TAG_TEXT"]
    for number, each in enumerate(structures):
        rules += _tag(number, each, triggers, special)
    return LLMatcher.grammar_from_lark("\n".join(["%llguidance {}", *rules, r"TAG_TEXT: /(.|\n)*/", ""]))


def _tag(number: int, structure: Any, triggers: list[str], special: Mapping[str, int]) -> Iterator[str]:
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
    if trigger in special:
        head = f"TAG_TEXT {_mark(trigger, special)}"
    else:
        yield f"tag_{number}_head[lazy]: TAG_TEXT {json.dumps(trigger)}"
        head = f"tag_{number}_head"
    rest = begin.removeprefix(trigger)
    yield f"tag_{number}: {head} {_mark(rest, special)} {schema_rule(schema)} {_mark(end, special)}"


def _mark(text: str, special: Mapping[str, int]) -> str:
    """A text with the special tokens that are named in it."""
    longest_first = sorted(special, key=len, reverse=True)
    named = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if special else [text]
    parts = [f"<[{special[each]}]>" if each in special else json.dumps(each) for each in named if each]
    return " ".join(parts) or '""'


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _check_count(rules: Sized) -> None:
    if len(rules) > MOST_RULES:
        raise ValueError(f"has more than {MOST_RULES} rules or references")


def _check_nesting(source: str) -> None:
    depth = 0
    for character in source:
        if character in "([{":
            depth += 1
            if depth > MOST_NESTED:
                raise ValueError(f"has more than {MOST_NESTED} brackets within brackets")
        elif character in ")]}":
            depth = max(0, depth - 1)


_SCHEMAS: dict[str, Callable[[str], Mapping[str, Any]]] = {"json": lambda _: {"type": "object"}, "json_schema": _schema}
RULES: dict[str, Callable[[str], str]] = {
    "json": lambda source: schema_rule(_SCHEMAS["json"](source)),
    "json_schema": lambda source: schema_rule(_schema(source)),
    "regex": _regex,
    "choice": _choice,
}
"""Kinds that may be one of several things an answer may be."""
