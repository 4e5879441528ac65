"""Compiles a `Structure` to a `Grammar`: in threads of its own, within limits, and cached.

llguidance releases the GIL while it compiles. What it spends is bounded by the size of the source, by what is counted
beforehand (`effort.py`, `conjunctions.py`) and by its own limits on grammars. It cannot be interrupted: what takes
longer than `compile_timeout_s` is refused while its thread goes on, and another thread works for the others.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from functools import partial

from llguidance import LLMatcher, LLParserLimits

from cllm.config.server import StructuredConfig
from cllm.errors import InvalidRequestError, OverloadedError, ShuttingDownError, StructureError
from cllm.structured.matcher import Grammar, MaskFiller
from cllm.structured.schemas import NOT_APART
from cllm.structured.sources import located, source_of
from cllm.structured.structure import Kind, Structure
from cllm.structured.threads import DaemonThreads, Job
from cllm.structured.vocabulary import Vocabulary

THREADS = 2
TRIALS = 2
"""Answers of one grammar share what its lexer has found out, up to a limit: the second may be one too many."""
MOST_FIXED = 32_768
"""Bytes that every answer begins with: to make tokens of them takes longer than others should wait."""
STACK_BYTES = 64 << 20
LIMITS = LLParserLimits(
    max_items_in_row=4100,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
"""The largest that are compiled in half a second, and whose masks take 10 ms; 1,000 properties, for example."""

_UNKNOWN_KEYS = re.compile(r"(?:^|: )Unimplemented keys: \[(.*?)\]")
_ELSEWHERE = re.compile(r"^(?:Resource|Pointer) '(?:json-schema:///)?(.*?)' (?:is not present|does not exist)")
_WRITTEN_HERE = ("regex", "choice", "structural_tag")
_LISTING = re.compile(r"^at \d+\(\d+\): |\n *\d+ \| .*$", re.DOTALL)
"""Where in a grammar; the client did not write these."""
_WHILE = re.compile(r"\n  while processing .*")
"""Which definition it is in; `located` says it better."""
_Key = tuple[Kind, str]
_Outcome = Grammar | str
"""A grammar, or the reason why there is none. Not an exception: that would keep its callers' frames alive."""


class Compiler:
    """Of one model. `compile` is called on one event loop; the rest happens in threads."""

    def __init__(self, vocabulary: Vocabulary, config: StructuredConfig) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._masks = MaskFiller(vocabulary) if vocabulary.tokens is not None else None
        self._kept: OrderedDict[_Key, Job[_Outcome]] = OrderedDict()
        self._threads: DaemonThreads[_Outcome] = DaemonThreads(THREADS, "cllm-grammar", STACK_BYTES)

    async def compile(self, structure: Structure) -> Grammar:
        """Raises `InvalidRequestError` if the structure is invalid."""
        job = self._job(structure)
        future = job.result
        if not future.done():
            await self._wait(structure, job)
        if future.cancelled():
            raise _closed()
        if future.exception() is not None:  # not the structure's fault: do not cache it
            self._kept.pop((structure.kind, structure.source), None)
        outcome = future.result()
        if isinstance(outcome, str):
            raise _refusal(structure, outcome)
        return outcome

    async def _wait(self, structure: Structure, job: Job[_Outcome]) -> None:
        """Until it is done. It may wait for others as long as it may take."""
        seconds = self._config.compile_timeout_s
        done = asyncio.wrap_future(job.result)
        await asyncio.wait([done], timeout=seconds)
        if not job.result.done() and job.started is not None:
            await asyncio.wait([done], timeout=max(0.0, job.started + seconds - time.monotonic()))
            if not job.result.done():
                self._threads.give_up(job)
                raise _refusal(structure, f"takes longer than {seconds:g} s to compile (structured.compile_timeout_s)")
        elif not job.result.done():
            raise OverloadedError(f"{structure.param} waited {seconds:g} s for others to be compiled")

    def close(self) -> None:
        self._threads.close()

    def _job(self, structure: Structure) -> Job[_Outcome]:
        key = structure.kind, structure.source
        job = self._kept.get(key)
        if job is None:
            self._check(structure)
            job = self._submit(structure)
            self._kept[key] = job
            self._forget_oldest()
        else:
            self._kept.move_to_end(key)
        return job

    def _submit(self, structure: Structure) -> Job[_Outcome]:
        try:
            return self._threads.submit(partial(self._outcome, structure))
        except RuntimeError as error:
            raise _closed() from error

    def _check(self, structure: Structure) -> None:
        if self._vocabulary.tokens is None:
            raise _refusal(structure, "is not supported by this model: it has no token that ends an answer")
        size, most = len(structure.source.encode(errors="replace")), self._config.max_source_kb << 10
        if size > most:
            raise _refusal(structure, f"has {size} bytes; at most {most} are allowed (structured.max_source_kb)")
        if (unfinished := self._threads.unfinished) >= self._config.max_compiling:
            raise OverloadedError(
                f"{unfinished} structures are being compiled, and no more wait (structured.max_compiling)"
            )

    def _forget_oldest(self) -> None:
        """Grammars that are still being compiled stay; there are few."""
        for key in list(self._kept)[: max(len(self._kept) - self._config.max_cached, 0)]:
            if self._kept[key].result.done():
                del self._kept[key]

    def _outcome(self, structure: Structure) -> _Outcome:
        try:
            return self._compile(structure)
        except (ValueError, StructureError) as error:
            return str(error)

    def _compile(self, structure: Structure) -> Grammar:
        assert self._vocabulary.tokens is not None and self._masks is not None
        source = source_of(structure, self._vocabulary.tokenizer.special_tokens)
        beginning = LLMatcher(self._vocabulary.tokens, source, log_level=0, limits=LIMITS)
        if beginning.is_error():
            raise ValueError(located(structure, _readable(beginning.get_error(), structure.kind), self._error_of))
        # Some show only now that nothing can ever follow them, or that it takes too much to tell. Masks come first:
        # while one is made the GIL is released, and what was found out for it need not be found out for fixed text.
        for _ in range(TRIALS):
            trial = beginning.deep_copy()
            trial.compute_bitmask()
            if trial.is_error():
                raise ValueError(_readable(trial.get_error(), structure.kind))
        if len(beginning.deep_copy().compute_ff_bytes()) > MOST_FIXED:
            raise ValueError(f"begins with more than {MOST_FIXED} bytes of fixed text, or never ends")
        grammar = Grammar(beginning, self._masks)
        matcher = grammar.start()
        if matcher.forced:
            matcher.accept(matcher.forced[0])
        return grammar

    def _error_of(self, source: str) -> str:
        return _readable(LLMatcher.validate_grammar(source, self._vocabulary.tokens, limits=LIMITS), "json_schema")


def _readable(error: str, kind: Kind) -> str:
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


def _closed() -> ShuttingDownError:
    return ShuttingDownError("the model was closed before the structure was compiled")


def _refusal(structure: Structure, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{structure.param}: {reason}", structure.param)
