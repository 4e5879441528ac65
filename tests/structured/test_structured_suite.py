"""The schemas of the JSON Schema Test Suite: each is refused by name, or followed."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from cllm.errors import InvalidRequestError
from cllm.structured.closing import closable_objects
from cllm.structured.matcher import Grammar, Matcher
from cllm.structured.nodes import References, schemas_in
from cllm.text.tokenizer import ByteTokenizer
from repository import DATA
from structured_kit import by_schema, make_compiler

SUITE = DATA / "json_schema_test_suite/draft2020-12.jsonl"
CASES = [json.loads(line) for line in SUITE.read_text().splitlines()]
KEYWORDS = sorted({case["keyword"] for case in CASES})
END = ByteTokenizer.EOS_ID
LONG = 250

REASONS = (
    *(
        "has keywords that are not supported: ",
        "oneOf is not supported",
        "Unsatisfiable schema: ",
        "allows no answer at all",
    ),
    *(
        "Unknown format: ",
        "Expected positive integer for '",
        "has values of multipleOf",
        "are not disjoint",
        "Resource '",
    ),
)
WHOLE = {
    *(
        "anchor",
        "const",
        "content",
        "default",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "infinite-loop-detection",
        "items",
        "maximum",
        "minimum",
        "pattern",
    ),
    *("prefixItems", "properties", "required", "type"),
}
"""Keywords none of whose schemas is refused."""

ORDER = "properties come in the order of the schema"
NUMBERS = "whole numbers, and those of const and enum, are written in one way"
FORMATS = "formats are checked, where the standard leaves that open"
NOT_WRITTEN = {
    ("allOf", "allOf", "allOf"): ORDER,
    ("allOf", "allOf with base schema", "valid"): ORDER,
    ("dependentRequired", "dependencies with escaped characters", "CRLF"): ORDER,
    ("const", "const with object", "same object with different property order is valid"): ORDER,
    ("const", "const with 0 does not match other zero-like types", "float zero is valid"): NUMBERS,
    ("const", "const with 1 does not match true", "float one is valid"): NUMBERS,
    ("const", "const with -2.0 matches integer and float types", "float -2.0 is valid"): NUMBERS,
    ("const", "float and integers are equal up to 64-bit representation limits", "float is valid"): NUMBERS,
    ("enum", "enum with 0 does not match false", "float zero is valid"): NUMBERS,
    ("enum", "enum with [0] does not match [false]", "[0.0] is valid"): NUMBERS,
    ("enum", "enum with 1 does not match true", "float one is valid"): NUMBERS,
    ("enum", "enum with [1] does not match [true]", "[1.0] is valid"): NUMBERS,
    ("type", "integer type matches integers", "a float with zero fractional part is an integer"): NUMBERS,
    **{
        ("format", f"{name} format", f"invalid {name} string is only an annotation by default"): FORMATS
        for name in (
            *("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration", "iri"),
            *("idn-email", "idn-hostname", "uri-reference", "iri-reference", "json-pointer", "relative-json-pointer"),
            "uri-template",
        )
    },
}
"""Valid instances that no answer is, and why."""


def allowed(matcher: Matcher) -> list[int]:
    (mask,) = matcher.masks.fill([matcher])
    assert not isinstance(mask, Exception), mask
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def may_be_written(grammar: Grammar, instance: Any) -> bool:
    matcher = grammar.start()
    for token in (*json.dumps(instance, ensure_ascii=False).encode(), END):
        if token not in allowed(matcher):
            return False
        if token != END:
            matcher.accept(token)
    return True


def at_random(grammar: Grammar, seed: int) -> str:
    """An answer of any allowed tokens, which takes the next way out when it gets long."""
    rng, matcher, written = random.Random(seed), grammar.start(), bytearray()
    while True:
        choices = allowed(matcher)
        if len(written) > LONG:
            choices = [token for token in choices if token in (END, *b'"}]')] or choices
        token = END if END in choices and rng.random() < 0.3 else rng.choice(choices)
        if token == END:
            return written.decode()
        matcher.accept(token)
        written.append(token)


def number(text: str) -> float:
    """Python's `inf`, which a number with a large exponent becomes, is not of the type `number` any more."""
    return max(-1e308, min(1e308, float(text)))


def opened(schema: Any) -> Any:
    """The same schema, where objects that say nothing of other properties say that they have some."""
    schema = deepcopy(schema)
    if isinstance(schema, dict):
        closable = closable_objects(schema, References(schema))
        for node in [each for each in schemas_in(schema) if id(each) in closable]:
            node["additionalProperties"] = True
    return schema


async def followed(keyword: str) -> list[tuple[dict[str, Any], Grammar]]:
    pairs, compiler = [], make_compiler()
    for case in CASES:
        if case["keyword"] == keyword:
            try:
                pairs.append((case, await compiler.compile(by_schema(opened(case["schema"])))))
            except InvalidRequestError as refusal:
                assert any(reason in str(refusal) for reason in REASONS), (case["description"], str(refusal))
                assert refusal.param == "structured" and keyword not in WHOLE, (case["description"], str(refusal))
    return pairs


@pytest.mark.parametrize("keyword", KEYWORDS)
async def test_valid_instances_may_be_written_and_no_others(keyword: str) -> None:
    not_written = set()
    for case, grammar in await followed(keyword):
        for test in case["tests"]:
            written = may_be_written(grammar, test["data"])
            assert test["valid"] or not written, (case["description"], test["description"])
            if test["valid"] and not written:
                not_written.add((keyword, case["description"], test["description"]))
    assert not_written == {each for each in NOT_WRITTEN if each[0] == keyword}


@pytest.mark.parametrize("keyword", KEYWORDS)
async def test_whatever_is_written_is_valid(keyword: str) -> None:
    for case, grammar in await followed(keyword):
        validator = jsonschema_rs.Draft202012Validator(case["schema"])
        for seed in range(4):
            answer = at_random(grammar, seed)
            assert validator.is_valid(json.loads(answer, parse_float=number)), (case["description"], answer)
