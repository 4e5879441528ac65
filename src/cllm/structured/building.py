"""From a `Structure` to llguidance's matcher: all that may fail, and all that takes time."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cllm.machine.resident import give_heap_back, resident_bytes
from cllm.structured.effort import NotSmallError, only_small
from cllm.structured.matcher import Grammar, MaskFiller
from cllm.structured.schemas import NOT_APART
from cllm.structured.sources import located, source_of
from cllm.structured.structure import Structure, StructureKind
from cllm.structured.vocabulary import Vocabulary

TRIALS = 2
"""Answers of one grammar share what its lexer has found out, up to a limit: the second may be one too many."""
MOST_FIXED = 32_768
"""Bytes that every answer begins with: to make tokens of them takes longer than others should wait."""
SMALL_SOURCE = 49_152
"""Bytes that llguidance gets. With these, and within `SMALL_LIMITS`, it takes a few tens of milliseconds at most."""
SMALL_FIXED = 2048
LOCATED_HERE = 4096
"""To say where in a source an error is, parts of it are compiled, one after another."""
MATCHER_BYTES, BYTES_PER_BYTE = 1 << 18, 400
"""Memory of a small grammar: so much, and so much for each byte of its source. Measured; a test holds it."""


def _limits(lexer_fuel: int, grammar_size: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=4100,
        initial_lexer_fuel=lexer_fuel,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=grammar_size,
        verbose_errors=False,
    )


LIMITS = _limits(1_000_000, 20_000)
"""The largest that are compiled in half a second, and whose masks take 10 ms; 1,000 properties, for example."""
SMALL_LIMITS = _limits(30_000, 4_000)

_UNKNOWN_KEYS = re.compile(r"(?:^|: )Unimplemented keys: \[(.*?)\]")
_ELSEWHERE = re.compile(r"^(?:Resource|Pointer) '(?:json-schema:///)?(.*?)' (?:is not present|does not exist)")
_WRITTEN_HERE = ("regex", "choice", "structural_tag")
_LISTING = re.compile(r"^at \d+\(\d+\): |\n *\d+ \| .*$", re.DOTALL)
"""Where in a grammar; the client did not write these."""
_WHILE = re.compile(r"\n  while processing .*")
"""Which definition it is in; `located` says it better."""
_TOO_MUCH = re.compile(r"fuel|too (?:large|many|complex|big)|limit|exceeded", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Built:
    grammar: Grammar
    memory: int


class Builder:
    """For one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        assert vocabulary.tokens is not None
        self._tokens: LLTokenizer = vocabulary.tokens
        self._special = vocabulary.tokenizer.special_tokens
        self._masks = MaskFiller(vocabulary)

    def build_small(self, structure: Structure) -> Built:
        """Raises `NotSmallError` if that is more work than a server may do itself, and `ValueError` if the structure
        is invalid."""
        with only_small():
            source = source_of(structure, self._special)
        if len(source) > SMALL_SOURCE:
            raise NotSmallError
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=SMALL_LIMITS)
        if matcher.is_error() and (len(source) > LOCATED_HERE or _TOO_MUCH.search(matcher.get_error())):
            raise NotSmallError
        self._check(structure, matcher, SMALL_FIXED)
        return Built(self._grammar(matcher), MATCHER_BYTES + BYTES_PER_BYTE * len(source))

    def try_out(self, structure: Structure) -> dict[str, Any]:
        """What llguidance gets, and the memory it takes. Raises `ValueError` if the structure is invalid."""
        source = source_of(structure, self._special)
        gc.collect()
        give_heap_back()  # otherwise a grammar would fit into what an earlier one has left
        before = resident_bytes()
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=LIMITS)
        self._check(structure, matcher, MOST_FIXED)
        self._grammar(matcher)
        return {"source": source, "memory": max(resident_bytes() - before, MATCHER_BYTES)}

    def build(self, source: str, memory: int) -> Built:
        """What has been tried out."""
        return Built(self._grammar(LLMatcher(self._tokens, source, log_level=0, limits=LIMITS)), memory)

    def _check(self, structure: Structure, matcher: LLMatcher, most_fixed: int) -> None:
        """Some show only now that nothing can ever follow them, or that it takes too much to tell. Masks come first:
        while one is made the GIL is released, and what was found out for it need not be found out for fixed text."""
        if matcher.is_error():
            raise ValueError(located(structure, _readable(matcher.get_error(), structure.kind), self._error_of))
        for _ in range(TRIALS):
            trial = matcher.deep_copy()
            trial.compute_bitmask()
            if trial.is_error():
                raise ValueError(_readable(trial.get_error(), structure.kind))
        if len(matcher.deep_copy().compute_ff_bytes()) > most_fixed:
            if most_fixed < MOST_FIXED:
                raise NotSmallError
            raise ValueError(f"begins with more than {MOST_FIXED} bytes of fixed text, or never ends")

    def _grammar(self, beginning: LLMatcher) -> Grammar:
        grammar = Grammar(beginning, self._masks)
        matcher = grammar.start()
        if matcher.forced:
            matcher.accept(matcher.forced[0])
        return grammar

    def _error_of(self, source: str) -> str:
        return _readable(LLMatcher.validate_grammar(source, self._tokens, limits=LIMITS), "json_schema")


def _readable(error: str, kind: StructureKind) -> str:
    if kind in _WRITTEN_HERE:
        error = _LISTING.sub("", error)
    lines = " ".join(_WHILE.sub("", error).replace("<non-verbose/>", "").split())
    if lines.startswith("recursion limit exceeded"):
        return "is nested too deeply"
    if lines.startswith("oneOf constraints are not supported"):
        return NOT_APART
    if "Unable to determine if regex is empty" in lines:
        return "has patterns that are too much together for the same text"
    if found := _UNKNOWN_KEYS.search(lines):
        return f"has keywords that are not supported: {found[1]}"
    if found := _ELSEWHERE.search(lines):
        return f"refers to {found[1]}, which is not in the schema"
    return re.sub(r"^NoExtensionBias$|^NoExtension$", "allows no answer at all", lines)[:500]
