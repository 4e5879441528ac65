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
from cllm.engine.submission import Submission
from cllm.errors import InvalidRequestError
from cllm.structured.sources import RULES
from cllm.structured.structure import Structure
from cllm.text.chat_template import PromptOptions

if TYPE_CHECKING:
    from cllm.dialect.reasoning import Thinking
    from cllm.dialect.tools import Tool
    from cllm.engine.params import SamplingParams
    from cllm.loading.text_model import TextModel
    from cllm.structured.matcher import Grammar

_OF_THE_GRAMMAR = re.compile(r"at \d+\(\d+\): | \d+ \| .*$", re.DOTALL)
"""Place and listing in an error about a grammar that the client did not write."""


class PreparedChat(NamedTuple):
    submission: Submission
    readers: Sequence[AnswerReader]
    """One per answer, or none if answers are nothing but text."""


async def prepare_chat(
    text: TextModel, messages: Sequence[Mapping[str, Any]], params: SamplingParams, tools: Sequence[Tool] = ()
) -> PreparedChat:
    """Raises `InvalidRequestError` if the messages or tools cannot be used."""
    prompt = await text.encode_chat(messages, params, PromptOptions([tool.for_template() for tool in tools]))
    return await prepare_answers(text, prompt, params, AnswerRules(params.structured, tools, shows_marks=True))


async def prepare_answers(
    text: TextModel, prompt: Sequence[int], params: SamplingParams, rules: AnswerRules
) -> PreparedChat:
    """As `prepare_chat`, for a conversation that has become tokens."""
    dialect, tools = text.dialect, rules.tools
    thinking = dialect.thinking_after(prompt, rules.continued)
    enforced = await _enforce(text, rules, thinking)
    separate = dialect.separates if rules.separate is None else rules.separate
    separates = separate and dialect.marks is not None and thinking == "none"
    reads = bool(tools) or thinking == "opened" or separates or rules.shows_marks
    submission = Submission(
        prompt,
        params if enforced is None else replace(params, structured=enforced.structure),
        grammar=None if enforced is None else enforced.grammar,
        shown=dialect.shown(tools=bool(tools), reasoning=True) if reads else None,
    )
    readers = [
        dialect.reader(
            index,
            tools=tools,
            thinking=thinking,
            separate=separate,
            continues=rules.continued is not None,
            most_calls=rules.most_calls,
            calls_only=rules.required,
            masked=enforced is not None,
            include_reasoning=rules.include_reasoning,
        )
        for index in range(params.n if reads else 0)
    ]
    return PreparedChat(submission, readers)


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
    """Whether an answer may be several calls, in its grammar."""
    most_calls: int | None = None
    """Calls after these are dropped."""
    separate: bool | None = None
    """Whether reasoning is separated from the text. None: as chat.reasoning says."""
    include_reasoning: bool = True
    """Whether the client gets the reasoning, if it is separated."""
    continued: str | None = None
    """The message that the answer continues, if it is not a new one."""
    shows_marks: bool = False
    """Whether marks of reasoning that is not separated are part of the text."""


class Enforced(NamedTuple):
    structure: Structure
    grammar: Grammar
    """The structure, compiled."""


async def _enforce(text: TextModel, rules: AnswerRules, thinking: Thinking) -> Enforced | None:
    """The given structure, guaranteed tool calls, and reasoning before either, in one grammar; None: nothing is
    demanded. Raises `InvalidRequestError`, which names the structure or tool that cannot be enforced."""
    structure = await _whole_structure(text, rules, thinking)
    if structure is None:
        return None
    try:
        return Enforced(structure, await text.compile(structure))
    except InvalidRequestError as error:
        if structure is rules.structure:
            raise
        await _blame(text, rules)
        raise InvalidRequestError(_OF_THE_GRAMMAR.sub("", str(error)), error.param) from None


async def _whole_structure(text: TextModel, rules: AnswerRules, thinking: Thinking) -> Structure | None:
    given, tools, marks = rules.structure, rules.tools, text.dialect.marks
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
        grammar = await text.work.write_grammar(form, sources)
    except ValueError as error:  # a schema that cannot be enforced
        await _blame(text, rules)
        raise InvalidRequestError(f"{param}: {error}", param) from None
    return Structure("lark", grammar, param)


async def _blame(text: TextModel, rules: AnswerRules) -> None:
    """Raise for the part of a grammar that is invalid by itself, by its name."""
    with suppress(asyncio.TimeoutError, RecursionError):
        await asyncio.wait_for(_compile_each(text, rules), text.config.structured.compile_timeout_s)


async def _compile_each(text: TextModel, rules: AnswerRules) -> None:
    parts = [] if rules.structure is None else [rules.structure]
    for number, tool in enumerate(rules.tools):
        if tool.enforced is not None:
            source = json.dumps(tool.enforced, ensure_ascii=False)
            parts.append(Structure("json_schema", source, f"tools[{number}]"))
    for part in parts:
        await text.compile(part)
