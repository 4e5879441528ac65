"""The next message of a conversation with a model in this process: its prompt, and how the answer is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cllm.dialect.grammar import AnswerForm
from cllm.dialect.reader import AnswerReader
from cllm.structured.structure import Structure
from cllm.text.chat import PromptOptions

if TYPE_CHECKING:
    from cllm.dialect.tools import Tool
    from cllm.engine.params import SamplingParams
    from cllm.generation import Generation
    from cllm.llm import AsyncLLM
    from cllm.structured.matcher import Grammar


@dataclass(frozen=True, slots=True)
class Question:
    llm: AsyncLLM
    prompt: Sequence[int]
    params: SamplingParams
    reader: AnswerReader
    """Of the one answer."""
    grammar: Grammar | None
    shown: Mapping[int, bytes]

    def submit(self) -> Generation:
        return self.llm.submit(self.prompt, self.params, grammar=self.grammar, shown=self.shown)


async def open_question(
    llm: AsyncLLM, messages: Sequence[Mapping[str, Any]], params: SamplingParams, tools: Sequence[Tool] = ()
) -> Question:
    """Raises `InvalidRequestError` where there can be no answer."""
    dialect = llm.dialect
    prompt = llm.encode_chat(messages, params, PromptOptions([tool.for_template() for tool in tools]))
    thinking = dialect.thinking_after(prompt, None)
    grammar = None
    if params.structured is not None or any(tool.strict for tool in tools):
        schemas = [(tool.name, tool.parameters) for tool in tools]
        form = AnswerForm(schemas, structure=params.structured, marks=dialect.marks, thinking=thinking)
        grammar = await llm.compile(Structure("lark", dialect.grammar(form), "tools"))
    names = [tool.name for tool in tools]
    reader = dialect.reader(0, names=names, thinking=thinking, separate=dialect.separates)
    return Question(llm, prompt, params, reader, grammar, dialect.shown(tools=bool(tools), reasoning=True))
