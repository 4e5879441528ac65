"""Grammars by themselves: the tokens of real tokenizers, what is kept, what is bounded."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from cllm.config.server import StructuredConfig
from cllm.errors import InvalidRequestError, OverloadedError, ShuttingDownError
from cllm.structured.compiler import THREADS, Compiler
from cllm.structured.matcher import Grammar, Matcher
from cllm.structured.structure import Structure
from cllm.structured.vocabulary import Vocabulary
from cllm.text.tokenizer import ByteTokenizer, Tokenizer
from repository import DATA
from structured_kit import TOKENIZER, VOCAB, by_schema, grammar

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


def make(tokenizer: Tokenizer = TOKENIZER, **settings: Any) -> Compiler:
    return Compiler(Vocabulary(tokenizer, VOCAB), StructuredConfig(**settings))


async def test_what_was_compiled_is_kept_the_most_recent_ones() -> None:
    compiler = make(max_cached=2)
    first = await compiler.compile(WORD)
    assert await compiler.compile(Structure("regex", WORD.source, param="another")) is first
    for number in range(3):
        await compiler.compile(Structure("regex", f"x{number}"))
    assert await compiler.compile(WORD) is not first
    compiler.close()


async def test_as_many_are_kept_as_may_be() -> None:
    compiler = make(max_cached=4)
    structures = [Structure("regex", f"x{number}") for number in range(4)]
    first = [await compiler.compile(each) for each in structures]
    assert [await compiler.compile(each) for each in structures] == first
    compiler.close()


async def test_many_who_ask_for_the_same_wait_for_one() -> None:
    compiler = make()
    found: list[Grammar] = await asyncio.gather(*(compiler.compile(WORD) for _ in range(20)))
    assert len({id(each) for each in found}) == 1
    compiler.close()


async def test_a_refusal_that_is_kept_holds_none_of_those_who_got_it() -> None:
    """Each gets an error of his own, with the name of his field."""
    compiler = make()
    refusals = []
    for number in range(20):
        with pytest.raises(InvalidRequestError, match="is not JSON") as caught:
            await compiler.compile(Structure("json_schema", "{no", param=f"field_{number}"))
        refusals.append(caught.value)
    assert [each.param for each in refusals] == [f"field_{number}" for number in range(20)]
    lengths = {len(list(traceback.walk_tb(each.__traceback__))) for each in refusals}
    assert len(lengths) == 1 and all(each.__context__ is None for each in refusals)
    compiler.close()


async def test_a_failure_that_is_not_the_structure_s_fault_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make()

    def fail(structure: Structure) -> Grammar:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_compile", fail)
        with pytest.raises(MemoryError):
            await compiler.compile(WORD)
    assert isinstance(await compiler.compile(WORD), Grammar)
    compiler.close()


async def test_whoever_waits_when_the_model_is_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make()
    begun, going_on = threading.Semaphore(0), threading.Event()

    def compile_slowly(_: Structure) -> object:
        begun.release()
        return going_on.wait(30)

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_compile", compile_slowly)
        waiting = [asyncio.ensure_future(compiler.compile(Structure("regex", f"x{n}"))) for n in range(THREADS + 1)]
        for _ in range(THREADS):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        compiler.close()
        with pytest.raises(ShuttingDownError):
            await waiting[-1]
        with pytest.raises(ShuttingDownError):
            await compiler.compile(WORD)
        going_on.set()
        await asyncio.gather(*waiting[:-1])


async def test_more_than_may_wait_are_sent_away() -> None:
    compiler = make(max_compiling=1)
    structures = [Structure("regex", f"[a-z]{{{n}}}x") for n in range(1, 20)]
    results = await asyncio.gather(*map(compiler.compile, structures), return_exceptions=True)
    assert any(isinstance(each, OverloadedError) for each in results) and isinstance(results[0], Grammar)
    compiler.close()


async def test_a_model_without_an_end_has_no_structures() -> None:
    tokenizer = ByteTokenizer(VOCAB)
    tokenizer.eos_ids = frozenset()
    with pytest.raises(InvalidRequestError, match="no token that ends"):
        await make(tokenizer).compile(WORD)


UNKIND = {
    "exploding": "(a?){1000}a{1000}",
    "ambiguous": "(.*a){50}.*",
    "nested counts": "((a{1,100}){1,100}){1,100}",
    "long": "a" * 200_000,
    "anything": ".{0,100000}",
}


@pytest.mark.parametrize("name", UNKIND)
async def test_unkind_expressions_are_refused_or_answered(name: str) -> None:
    compiler = make()
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
