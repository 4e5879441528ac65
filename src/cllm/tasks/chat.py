"""The next message of a conversation: its prompt, and how the answer is parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cllm.dialect.grammar import AnswerForm
from cllm.dialect.reader import AnswerReader
from cllm.structured.structure import Structure
from cllm.text.chat_template import PromptOptions

if TYPE_CHECKING:
    from cllm.dialect.tools import Tool
    from cllm.engine.params import SamplingParams
    from cllm.generation import Generation
    from cllm.llm import AsyncLLM
    from cllm.structured.matcher import Grammar


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
    prompt = llm.encode_chat(messages, params, PromptOptions([tool.for_template() for tool in tools]))
    thinking = dialect.thinking_after(prompt, None)
    grammar = None
    if params.structured is not None or any(tool.strict for tool in tools):
        schemas = [(tool.name, tool.enforced) for tool in tools]
        form = AnswerForm(schemas, structure=params.structured, marks=dialect.marks, thinking=thinking)
        grammar = await llm.compile(Structure("lark", dialect.grammar(form), "tools"))
    reader = dialect.reader(0, tools=tools, thinking=thinking, separate=dialect.separates)
    return ChatTurn(llm, prompt, params, reader, grammar, dialect.shown(tools=bool(tools), reasoning=True))
