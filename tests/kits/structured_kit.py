"""Grammars over the fake backend's tokens, schemas of all kinds, and what an answer is when it is alone."""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
from hypothesis import strategies as st

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.config.server import StructuredConfig
from cllm.engine.draw import masks_for
from cllm.engine.params import SamplingParams
from cllm.engine.request import Request
from cllm.engine.sampling import TokenChooser, choose
from cllm.kv.ops import SlotGeometry
from cllm.structured.building import Builder
from cllm.structured.compiler import Compiler
from cllm.structured.effort import NotSmallError
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure
from cllm.structured.vocabulary import Vocabulary
from cllm.text.tokenizer import ByteTokenizer, Tokenizer
from cllm.work.worker import Limits, RefusedError
from engine_kit import make_request
from step_of import rows_of

VOCAB = 320
TOKENIZER = ByteTokenizer(VOCAB)
CONTEXT = 1024


@functools.cache
def builder() -> Builder:
    return Builder(Vocabulary(TOKENIZER, VOCAB))


def build(structure: Structure) -> Grammar:
    """As the compiler does, but all of it in this process. Raises `ValueError` if the structure is invalid."""
    try:
        return builder().build_small(structure).grammar
    except NotSmallError:
        return builder().build(**builder().try_out(structure)).grammar


grammar = functools.cache(build)


def make_compiler(tokenizer: Tokenizer = TOKENIZER, **settings: Any) -> Compiler:
    """It tries structures out in this process."""
    vocabulary = Vocabulary(tokenizer, VOCAB)

    async def try_out(structure: Structure, limits: Limits) -> Mapping[str, Any]:
        try:
            return Builder(vocabulary).try_out(structure)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    return Compiler(vocabulary, StructuredConfig(**settings), try_out)


def by_schema(schema: Any) -> Structure:
    return Structure("json_schema", json.dumps(schema))


def constrained(prompt: str, structure: Structure, params: SamplingParams, **options: Any) -> Request:
    return make_request(prompt, params, max_context=CONTEXT, constraint=grammar(structure).start(), **options)


def alone(request: Request, structure: Structure, answer: int = 0) -> list[int]:
    """One token after another, each from its own row."""
    backend = FakeBackend()
    backend.allocate(SlotGeometry(1, 4096))
    chooser = TokenChooser(
        request.params,
        request.prompt,
        end_ids=request.end_ids,
        seed=(request.params.seed or 0) + answer,
        vocab_size=VOCAB,
        constraint=grammar(structure).start(),
    )
    tokens: array[int] = array("i", request.prompt)
    done = 0
    while True:
        logits = rows_of(backend, [Chunk(tokens[done:], done, 1)])
        done = len(tokens)
        [choice] = choose(logits, [(0, chooser)], masks_for([chooser.constraint]))
        assert isinstance(choice, tuple), choice
        tokens.append(choice.token_id)
        if choice.token_id in request.end_ids or len(tokens) >= request.sequences[answer].max_length:
            return tokens[len(request.prompt) :].tolist()


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


def check_valid(schema: Any, tokens: list[int]) -> None:
    jsonschema_rs.validator_for(schema).validate(json.loads(text_of(tokens)))


_STRINGS = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
    st.just({"type": "string", "format": "date"}),
)
_NUMBERS = st.one_of(
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
              st.integers(-500, 500), st.integers(0, 900)),
    st.just({"type": "number", "minimum": 0, "exclusiveMaximum": 2}),
)  # fmt: skip
_FIXED = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda value: {"const": value}, st.text("abc \"\\é\n", max_size=30)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text("xyz", max_size=4) | st.integers(0, 9), min_size=1,
                                                        max_size=4, unique=True)),
)  # fmt: skip


def _object(names: list[str], kinds: list[Any], optional: int) -> Any:
    properties = dict(zip(names, kinds, strict=False))
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[optional:],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    _STRINGS | _NUMBERS | _FIXED,
    lambda inner: st.one_of(
        st.builds(
            _object,
            st.lists(st.sampled_from(["a", "name", "a_long_key_that_is_always_the_same", "é", "x y"]), unique=True),
            st.lists(inner, min_size=5, max_size=5),
            st.integers(0, 2),
        ),
        st.builds(lambda each, most: {"type": "array", "items": each, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda kinds: {"anyOf": kinds}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)
