"""Schemas that say several things of the same value, two at a time: whatever an accepted one lets through is valid."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema_rs
import pytest

from cllm.structured.matcher import Grammar
from cllm.text.tokenizer import ByteTokenizer
from structured_kit import build, by_schema
from thorough import some

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
SHAPES: list[Any] = [
    True,
    TEXT,
    WHOLE,
    {"type": ["string", "null"]},
    {"type": "number"},
    {"type": "integer", "minimum": 2},
    {"type": "string", "maxLength": 1},
    {"type": "string", "pattern": "^(?!x)[a-z]+$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": WHOLE},
    {"const": 1.0},
    {"enum": ["x", 1, None]},
    {"required": ["b"]},
    {"type": "object", "required": ["b"]},
    {"type": "object", "properties": {"a": TEXT}},
    {"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": WHOLE},
    {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": TEXT}}}},
    {"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False},
    {"type": "object", "patternProperties": {"^a": WHOLE}},
    {"oneOf": [{"type": "object", "required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}, {"type": "null"}]},
    {"allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}], "type": "object"},
    {"anyOf": [{"type": "object", "properties": {"a": WHOLE}}, TEXT]},
]
_PARTS = ["x", "y", "ab", "2020-01-01", 1, 2, 1.5, None, True, {"b": "x"}, {"b": 1, "d": 1}]
VALUES: list[Any] = [
    *_PARTS,
    [],
    [1, 2],
    ["x"],
    {},
    *({name: part} for name in "abd" for part in _PARTS),
    *({"a": one, "b": other} for one, other in itertools.product(["x", 1, None, {"b": "x"}], ["x", 1])),
    {"b": "x", "d": 1},
    {"a": "x", "b": "x", "d": 1},
]


def lets_through(grammar: Grammar, value: Any) -> bool:
    tokens = [*json.dumps(value).encode(), ByteTokenizer.EOS_ID]
    return grammar.start().agreed(tokens) == len(tokens)


def invalid_answers(schema: Any) -> list[Any]:
    try:
        grammar = build(by_schema(schema))
    except ValueError:
        return []
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    return [each for each in VALUES if not validator.is_valid(each) and lets_through(grammar, each)]


@pytest.mark.parametrize("joined", ["oneOf", "anyOf", "allOf", "beside oneOf"])
def test_what_is_let_through_is_valid(joined: str) -> None:
    pairs = [[one, other] for one, other in itertools.product(SHAPES, SHAPES)]
    found = {}
    for one, other in some(pairs, every=2):
        if joined == "beside oneOf":
            schema = {"oneOf": [one, {"type": "null"}, {"required": ["d"]}], **(other if other is not True else {})}
        else:
            schema = {joined: [one, other]}
        if wrong := invalid_answers(schema):
            found[json.dumps(schema)] = wrong
    assert found == {}
