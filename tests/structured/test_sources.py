"""What becomes of each kind of structure: texts that may be answers, and others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cllm.dialect.tools import Tool
from cllm.structured.schemas import lenient
from cllm.structured.structure import Structure, StructureKind
from cllm.text.tokenizer import ByteTokenizer
from structured_kit import by_schema, grammar

MANY = [f"choice {number}" for number in range(5000)]
CALL = {"structures": [{"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}], "triggers": ["<f>"]}
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPEN = {**CLOSED, "additionalProperties": True}


def fits(structure: Structure, text: str) -> bool:
    tokens = [*text.encode(), ByteTokenizer.EOS_ID]
    return grammar(structure).start().agreed(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("kind", "source", "yes", "no"),
    [
        ("choice", json.dumps(MANY), ["choice 0", "choice 4999"], ["choice 5000", "choice"]),
        ("choice", r'["a/b|c", "\n é\t", " x ", "(\"\\\\"]', ["a/b|c", "\n é\t", " x ", '("\\\\'], ["c", "x", "a/b"]),
        ("gbnf", r'root ::= [\u0041-\u005A\x61]+ "\u00e9\\u0041\U0001F600"', ["AZaé\\u0041😀"], ["bé\\u0041😀"]),
        ("lark", 'start: "x" %json {"format": "path", "type": "string"} "y"', ['x"/a"y'], ["x1y"]),
        ("structural_tag", json.dumps(CALL), ["", "so <f>1</f> and <f>2</f>."], ["<f>3</f>", "<f>1"]),
        ("json_schema", json.dumps(OPEN), ['{"a": 1}', '{"b": "\\n"}'], [r'{"\u0061": "x"}', r'{"b": "\u0062"}']),
        ("json_schema", json.dumps(CLOSED), ['{"a": 1}', "{}"], ['{"b": 1}', '{"a": 1, "b": 1}']),
        ("json_schema", json.dumps({"anyOf": [CLOSED, {"type": "null"}]}), ["null", "{}"], ['{"b": 1}']),
        (
            "json_schema",
            json.dumps({"allOf": [CLOSED, {"properties": {"b": {}}}]}),
            ['{"a": 1, "b": 1}'],
            ['{"a": ""}'],
        ),
        ("json_schema", json.dumps({**CLOSED, "required": ["b"]}), ['{"a": 1, "b": 1}'], ['{"a": 1}']),
        ("json_schema", r'{"type": "string", "pattern": "^[^ \"]+$"}', ['"a"', r'"\\"'], [r'"a\"b"', '"a b"']),
        ("json_schema", r'{"type": "string", "pattern": "^[^\\\\]\\s[\\s^]$"}', ['"a ^"'], [r'"\\ ^"', '"a\x85 "']),
        # What a description says, an answer need not write.
        ("json_schema", json.dumps({**OPEN, "description": "\x1b"}), ['{"a": 1}'], [r'{"\u0061": "x"}']),
        # Several schemas for one value leave other objects closed.
        (
            "json_schema",
            json.dumps({"properties": {"p": CLOSED, "q": {"allOf": [{"type": "integer"}, {"minimum": 1}]}}}),
            ['{"p": {"a": 1}, "q": 2}'],
            ['{"p": {"a": 1, "b": 2}}', '{"r": 1}', '{"q": 0}'],
        ),
        ("json_schema", json.dumps({**CLOSED, "minProperties": 1}), ['{"a": 1}'], ['{"b": 1}', "{}"]),
        (
            "json_schema",
            json.dumps({"properties": {"p": {"allOf": [CLOSED, {"required": ["b"]}]}, "q": CLOSED}}),
            ['{"p": {"a": 1, "b": 2}}'],
            ['{"q": {"b": 2}}'],
        ),
        (
            "json_schema",
            json.dumps(
                {"type": "object", "properties": {"ab": CLOSED}, "patternProperties": {"^a": {"required": ["b"]}}}
            ),
            ['{"ab": {"a": 1, "b": 2}}'],
            ['{"ab": {"a": 1}}'],
        ),
        # Bounds are moved inwards to numbers that are exact.
        (
            "json_schema",
            json.dumps({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
            ["-5", f"{2**53}"],
            [f"{2**53 + 1}"],
        ),
        (
            "json_schema",
            json.dumps({"type": "number", "minimum": 0.12345678901234567, "maximum": 1}),
            ["0.3", "1"],
            ["0.12345678901234566", "1.1"],
        ),
        ("json_schema", json.dumps({"enum": [0.1, 1.5, -7]}), ["0.1", "1.5", "-7"], ["0.2"]),
        (
            "json_schema",
            json.dumps({"type": "object", "propertyNames": {"format": "uuid"}, "additionalProperties": {"const": 1}}),
            ["{}", '{"123e4567-e89b-12d3-a456-426614174000": 1}'],
            ['{"a": 1}'],
        ),
        ("gbnf", 'root ::= ("a"+)? start\nstart ::= "b"', ["b", "aab"], ["", "c"]),
        ("gbnf", 'root ::= (("a" | [b(]){2})* # ("c"\n', ["", "ab", "a(ba"], ["a", "abc"]),
        ("gbnf", 'root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"', ["12"], ["11", "22"]),
        ("gbnf", 'start[capture]: "a"', ["a"], ["b"]),
        ("regex", "a\\\\", ["a\\"], ["a"]),
        ("json_schema", json.dumps({"const": "\x01"}), [r'"\u0001"'], ['""']),
    ],
)
def test_texts(kind: StructureKind, source: str, yes: list[str], no: list[str]) -> None:
    structure = Structure(kind, source)
    assert [text for text in yes if not fits(structure, text)] == []
    assert [text for text in no if fits(structure, text)] == []


def test_schemas_in_grammars_are_bounded_too() -> None:
    with pytest.raises(ValueError, match="multipleOf"):
        grammar(Structure("lark", 'start: %json {"properties": {"a": {"multipleOf": 99999989}}}'))


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("json_schema", '{"allOf": true}', "allOf"),
        ("json_schema", json.dumps({"allOf": [0] * 40_000, "oneOf": [{}] * 20_000}), "schema"),
        ("json_schema", json.dumps({"description": "\na[" * 50_000}), "rules"),
        ("json_schema", json.dumps({"propertyNames": {"enum": MANY}, "additionalProperties": {"enum": MANY}}), "Names"),
        ("lark", 'start: "a' + "\n" * 200_000, "string|quote|lexer|token"),
        ("regex", "(" + " " * 4000, "unclosed group$"),
        ("regex", "a\\", "backslash"),
        ("json_schema", json.dumps({"const": -(2**63)}), "too many digits"),
        ("json_schema", json.dumps({"properties": {"a": {"enum": [{"b": [2**60 + 1]}]}}}), r"\(at /properties/a\)"),
        ("json_schema", json.dumps({"const": 121.48886955472557}), "too many digits"),
        ("json_schema", json.dumps({"type": "integer", "minimum": 2**63, "maximum": 2**64 - 1}), "minimum: 9223"),
        (
            "json_schema",
            json.dumps({"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 8}),
            "maximum: -9223",
        ),
        ("lark", f'start: %json {{"const": {-(2**63)}}}', "too many digits"),
        ("json_schema", json.dumps({"multipleOf": -2}), "above 0"),
    ],
    ids=lambda each: str(each)[:12],
)
def test_hostile_structures_are_refused_at_once(kind: StructureKind, source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        grammar(Structure(kind, source))


PATTERNS: list[dict[str, Any]] = [{"pattern": f".*{number}"} for number in range(30)]
LONG = 60_000


def behind(schema: dict[str, Any], steps: int) -> dict[str, Any]:
    return schema if steps == 0 else {"properties": {"a": behind(schema, steps - 1)}}


HOSTILE: dict[str, tuple[StructureKind, Any]] = {
    "brackets that are not closed": ("json_schema", {"type": "string", "pattern": f"^(?=a){'[' * LONG}"}),
    "a long expression": ("regex", ".*" * LONG),
    "a long pattern": ("json_schema", {"type": "string", "pattern": ".*" * LONG}),
    "many long patterns": (
        "json_schema",
        {"properties": {f"{n}": {"pattern": f"{n}" + ".*" * 1500} for n in range(9)}},
    ),
    "empty lines": ("gbnf", f"{chr(10) * LONG}roof ::= 1"),
    "empty lines in Lark": ("lark", f'start: "a"{chr(10) * LONG}?'),
    "rules": ("gbnf", "".join(f'r{number} ::= "a"\n' for number in range(8000))),
    "a number beyond floats": ("json_schema", {"type": "integer", "multipleOf": 10**400}),
    "an index beyond integers": ("json_schema", {"oneOf": [{"$ref": f"#/oneOf/{'1' * 5000}"}, {"type": "null"}]}),
    "patterns": ("json_schema", {"type": "string", "allOf": PATTERNS}),
    "patterns of a property": ("json_schema", {"allOf": [{"properties": {"a": each}} for each in PATTERNS]}),
    "patterns, one behind the other": (
        "json_schema",
        {
            "$ref": "#/$defs/0",
            "$defs": {f"{number}": {**each, "$ref": f"#/$defs/{number + 1}"} for number, each in enumerate(PATTERNS)},
        },
    ),
    "patterns of items": ("json_schema", {"allOf": [{"prefixItems": [each]} for each in PATTERNS]}),
    "patterns of a list of items": ("json_schema", {"allOf": [{"items": [each]} for each in PATTERNS]}),
    "patterns of other items": ("json_schema", {"allOf": [{"unevaluatedItems": each} for each in PATTERNS]}),
    "patterns of properties by pattern": (
        "json_schema",
        {"type": "object", "patternProperties": {f"^a{'.' * n}": each for n, each in enumerate(PATTERNS)}},
    ),
    "patterns of properties, by name and of all": (
        "json_schema",
        {
            "allOf": [{key: each} for each in PATTERNS[:8] for key in ("additionalProperties",)]
            + [{"properties": {"a": each}} for each in PATTERNS[8:16]]
        },
    ),
    "patterns far inside": (
        "json_schema",
        {"allOf": [{"properties": {"a": {"properties": {"b": {"properties": {"c": each}}}}}} for each in PATTERNS]},
    ),
    "patterns very far inside": ("json_schema", {"allOf": [behind(each, 20) for each in PATTERNS]}),
    "patterns that look ahead": (
        "json_schema",
        {"type": "string", "allOf": [{"pattern": f"^{f'(?=.*{n})' * 8}x"} for n in range(3)]},
    ),
    "a long expression in Lark": ("lark", f"start: /{'.*' * 9000}/"),
    "look-ahead": ("json_schema", {"type": "string", "pattern": f"^{'(?=.*a)' * 2000}b"}),
    "options": ("json_schema", {"oneOf": [{"type": "object", "required": [f"{number}"]} for number in range(5000)]}),
    "options beside many values": (
        "json_schema",
        {"enum": list(range(20_000)), "oneOf": [{"const": f"{number}"} for number in range(3000)]},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_take_minutes_is_refused(name: str) -> None:
    """If it is not, this test takes minutes, too."""
    kind, source = HOSTILE[name]
    with pytest.raises(ValueError, match=r"\w"):
        grammar(Structure(kind, source if isinstance(source, str) else json.dumps(source)))


def test_options_may_each_have_patterns_of_the_same_property() -> None:
    options = [
        {"type": "object", "properties": {"kind": {"const": n}, "id": PATTERNS[n]}, "required": ["kind"]}
        for n in range(20)
    ]
    assert fits(by_schema({"type": "object", "anyOf": options}), '{"kind": 3, "id": "a3"}')


def test_an_escape_that_is_no_character_is_named() -> None:
    with pytest.raises(ValueError, match="ud800"):
        grammar(Structure("gbnf", r'root ::= "\ud800"'))


@pytest.mark.parametrize(("kind", "source"), [("regex", "a("), ("structural_tag", '{"type": "x", "format": {}}')])
def test_errors_show_no_grammar_that_the_client_did_not_write(kind: StructureKind, source: str) -> None:
    with pytest.raises(ValueError, match=r"unclosed group$|`format` is not supported$"):
        grammar(Structure(kind, source))


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "object", "required": ["b"]}, {"type": "object", "properties": {"c": {"type": "string"}}}]},
        {"oneOf": [{"oneOf": [{"type": "object", "required": ["a"]}, {"required": ["b"]}]}, {"type": "integer"}]},
    ],
)
def test_options_that_are_not_apart_are_refused(schema: dict[str, Any]) -> None:
    """Or an answer to what is written instead could be one to two of them."""
    with pytest.raises(ValueError, match="oneOf is not supported") as caught:
        grammar(by_schema({"items": schema, "type": "array"}))
    assert "(at /items)" in str(caught.value)


@pytest.mark.parametrize("pattern", ["^(?=a)?b", "^(?=a)+b", "^(?!a){2}b"])
def test_look_ahead_that_is_repeated_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="look-ahead"):
        grammar(by_schema({"type": "string", "pattern": pattern}))


UNSURE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "name": {"type": "string", "pattern": r"^(?!x)\bname"},
        "size": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "twice": {"type": "string", "pattern": r"^(a|b)\1$"},
        "steps": {"type": "integer", "multipleOf": 99999989},
        "more": {"type": "object", "patternProperties": {"^(?!x)y": {"type": "integer"}}},
    },
    "required": ["tags", "name", "size"],
    "additionalProperties": False,
    "not": {"required": ["x"]},
}


def test_a_lenient_schema_is_enforced_as_far_as_can_be() -> None:
    with pytest.raises(ValueError, match="multipleOf"):
        grammar(by_schema(UNSURE))
    structure = by_schema(lenient(UNSURE))
    assert fits(structure, '{"tags": ["a", "a"], "name": "any", "size": 1}')
    assert not fits(structure, '{"tags": [1], "name": "any", "size": 1}') and not fits(structure, "{}")


def test_calls_of_a_tool_are_lenient_unless_it_is_strict() -> None:
    assert Tool("f", parameters=UNSURE).enforced == lenient(UNSURE)
    assert Tool("f", parameters=UNSURE, strict=True).enforced == UNSURE and Tool("f").enforced is None
