"""Grammars by themselves: the tokens of real tokenizers, what is kept, what is bounded."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from cllm.errors import InvalidRequestError
from cllm.structured.matcher import Matcher
from cllm.structured.structure import Structure
from cllm.text.tokenizer import ByteTokenizer
from repository import DATA
from structured_kit import VOCAB, by_schema, grammar, make_compiler

WORD = Structure("regex", "[a-z]{1,9}")


def allowed(matcher: Matcher) -> list[int]:
    (mask,) = matcher.masks.fill([matcher])
    assert not isinstance(mask, Exception)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_masks_and_forced_tokens_of_a_choice() -> None:
    matcher = grammar(Structure("choice", '["north", "northwest", "south"]')).start()
    assert allowed(matcher) == sorted(b"ns") and not matcher.forced
    matcher.accept(ord("n"))
    assert bytes(matcher.forced) == b"orth"
    assert allowed(matcher) == [ord("o")], "what is forced is all that is allowed"
    for token in b"orth":
        matcher.accept(token)
    assert allowed(matcher) == [ord("w"), ByteTokenizer.EOS_ID]
    assert matcher.agreed(list(b"west")) == 4 and matcher.agreed(list(b"weird")) == 2
    for token in b"west":
        matcher.accept(token)
    assert list(matcher.forced) == [ByteTokenizer.EOS_ID]


def test_copies_go_their_own_ways() -> None:
    first = grammar(WORD).start()
    second = first.twin()
    first.accept(ord("a"))
    assert ByteTokenizer.EOS_ID in allowed(first) and ByteTokenizer.EOS_ID not in allowed(second)


def test_masks_of_many_are_those_of_each() -> None:
    matchers = [grammar(Structure("choice", json.dumps([letter * 3, letter + "x"]))).start() for letter in "abcdefgh"]
    for matcher in matchers[::2]:
        matcher.accept(matcher.forced[0])
    alone = [allowed(matcher) for matcher in matchers]
    together = [np.array(mask) for mask in matchers[0].masks.fill(matchers)]
    assert [np.flatnonzero(np.unpackbits(m.view(np.uint8), bitorder="little")).tolist() for m in together] == alone


async def test_a_model_without_an_end_has_no_structures() -> None:
    tokenizer = ByteTokenizer(VOCAB)
    tokenizer.eos_ids = frozenset()
    with pytest.raises(InvalidRequestError, match="no token that ends"):
        await make_compiler(tokenizer).compile(WORD)


UNKIND = {
    "exploding": "(a?){1000}a{1000}",
    "ambiguous": "(.*a){50}.*",
    "nested counts": "((a{1,100}){1,100}){1,100}",
    "long": "a" * 200_000,
    "anything": ".{0,100000}",
}


@pytest.mark.parametrize("name", UNKIND)
async def test_unkind_expressions_are_refused_or_answered(name: str) -> None:
    compiler = make_compiler()
    try:
        matcher = (await compiler.compile(Structure("regex", UNKIND[name]))).start()
    except InvalidRequestError:
        return
    for _ in range(20):
        (mask,) = matcher.masks.fill([matcher])
        if isinstance(mask, Exception):
            break
        tokens = allowed(matcher)
        matcher.accept(tokens[len(tokens) // 2])
    compiler.close()


SUITE = json.loads((DATA / "schemas.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(len(SUITE)))
def test_instances_of_schemas(number: int) -> None:
    """What a schema allows is allowed, what it forbids is not, where it is supported; the rest is named."""
    case = SUITE[number]
    structure = by_schema(case["schema"])
    if "refused" in case:
        with pytest.raises(ValueError, match=case["refused"]):
            grammar(structure)
        return
    validator = jsonschema_rs.validator_for(case["schema"], validate_formats=True)
    for value in case["valid"]:
        assert validator.is_valid(value)
        assert _follows(structure, value), value
    for value in case["invalid"]:
        assert not validator.is_valid(value)
        assert not _follows(structure, value), value


def _follows(structure: Structure, value: Any) -> bool:
    matcher = grammar(structure).start()
    tokens = [*json.dumps(value, ensure_ascii=False).encode(), ByteTokenizer.EOS_ID]
    return matcher.agreed(tokens) == len(tokens)
