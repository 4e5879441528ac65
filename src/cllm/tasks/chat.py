"""The next message of a conversation: its prompt, the grammar of the answer, and how the answer is parsed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cllm.dialect.grammar import AnswerForm
from cllm.dialect.reader import AnswerReader
from cllm.errors import InvalidRequestError
from cllm.structured.sources import RULES
from cllm.structured.structure import Structure
from cllm.text.chat_template import PromptOptions

if TYPE_CHECKING:
    from cllm.dialect.reasoning import Thinking
    from cllm.dialect.tools import Tool
    from cllm.engine.params import SamplingParams
    from cllm.generation import Generation
    from cllm.llm import AsyncLLM
    from cllm.structured.matcher import Grammar

_OF_THE_GRAMMAR = re.compile(r"at \d+\(\d+\): | \d+ \| .*$", re.DOTALL)
"""Place and listing in an error about a grammar that the client did not write."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    llm: AsyncLLM
    prompt: Sequence[int]
    params: SamplingParams
    reader: AnswerReader
    grammar: Grammar | None
    shown: Mapping[int, bytes]

    def submit(self) -> Generation:
        return self.llm.submit(self.prompt, self.params, grammar=self.grammar, shown=self.shown)


async def prepare_chat(
    llm: AsyncLLM, messages: Sequence[Mapping[str, Any]], params: SamplingParams, tools: Sequence[Tool] = ()
) -> ChatTurn:
    """Raises `InvalidRequestError` if the messages or tools cannot be used."""
    dialect = llm.dialect
    prompt = await llm.encode_chat(messages, params, PromptOptions([tool.for_template() for tool in tools]))
    thinking = dialect.thinking_after(prompt, None)
    enforced = await enforce(llm, AnswerRules(params.structured, tools), thinking)
    grammar = None
    if enforced is not None:
        params, grammar = replace(params, structured=enforced.structure), enforced.grammar
    reader = dialect.reader(0, tools=tools, thinking=thinking, separate=dialect.separates, masked=grammar is not None)
    return ChatTurn(llm, prompt, params, reader, grammar, dialect.shown(tools=bool(tools), reasoning=True))


# -- the grammar of an answer ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What a request demands of its answers."""

    structure: Structure | None
    tools: Sequence[Tool]
    required: bool = False
    """Whether an answer must be a call."""
    named: str | None = None
    """The only tool that may be called."""
    several: bool = True
    """Whether an answer may be several calls."""


class Enforced(NamedTuple):
    structure: Structure
    grammar: Grammar
    """The structure, compiled."""


async def enforce(llm: AsyncLLM, rules: AnswerRules, thinking: Thinking) -> Enforced | None:
    """The given structure, guaranteed tool calls, and reasoning before either, in one grammar; None: nothing is
    demanded. Raises `InvalidRequestError`, which names the structure or tool that cannot be enforced."""
    structure = await _whole_structure(llm, rules, thinking)
    if structure is None:
        return None
    try:
        return Enforced(structure, await llm.compile(structure))
    except InvalidRequestError as error:
        if structure is rules.structure:
            raise
        await _blame(llm, rules)
        raise InvalidRequestError(_OF_THE_GRAMMAR.sub("", str(error)), error.param) from None


async def _whole_structure(llm: AsyncLLM, rules: AnswerRules, thinking: Thinking) -> Structure | None:
    given, tools, marks = rules.structure, rules.tools, llm.dialect.marks
    masked = bool(tools) and (rules.required or given is not None or any(tool.strict for tool in tools))
    if not masked and (given is None or marks is None or thinking == "closed" or given.kind not in RULES):
        return given
    form = AnswerForm(
        tools=[(tool.name, tool.enforced) for tool in tools if rules.named in (None, tool.name)],
        required=rules.required,
        several=rules.several,
        structure=given,
        marks=marks,
        thinking=thinking,
    )
    sources = [[tool.parameters for tool in tools], given.source if given is not None else ""]
    param = given.param if given is not None and not tools else "tools"
    try:
        grammar = await llm.text_work.write_grammar(form, sources)
    except ValueError as error:  # a schema that cannot be enforced
        await _blame(llm, rules)
        raise InvalidRequestError(f"{param}: {error}", param) from None
    return Structure("lark", grammar, param)


async def _blame(llm: AsyncLLM, rules: AnswerRules) -> None:
    """Raise for the part of a grammar that is invalid by itself, by its name."""
    with suppress(asyncio.TimeoutError, RecursionError):
        await asyncio.wait_for(_compile_each(llm, rules), llm.config.structured.compile_timeout_s)


async def _compile_each(llm: AsyncLLM, rules: AnswerRules) -> None:
    parts = [] if rules.structure is None else [rules.structure]
    for number, tool in enumerate(rules.tools):
        if tool.enforced is not None:
            source = json.dumps(tool.enforced, ensure_ascii=False)
            parts.append(Structure("json_schema", source, f"tools[{number}]"))
    for part in parts:
        await llm.compile(part)
