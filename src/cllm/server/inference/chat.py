"""The one path of all chat APIs: from a conversation to a `ChatStream`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cllm.dialect.tools import Tool
from cllm.server.inference.limits import check_count, check_logprobs, check_params, pins_of_chat
from cllm.server.inference.streams import ChatStream, CompletionStream, Head, sent_by
from cllm.server.inference.truncation import Truncation
from cllm.server.schema.messages import CacheControl, Mark
from cllm.server.schema.tools import NamedTool, ToolChoice
from cllm.structured.structure import Structure
from cllm.tasks.chat import AnswerRules, prepare_answers
from cllm.text.chat_template import PromptOptions
from cllm.text.tokenizer import TokenLimit

if TYPE_CHECKING:
    from fastapi import Request

    from cllm.engine.params import SamplingParams
    from cllm.server.state import ModelState, ServerState


@dataclass(slots=True)
class ChatInput:
    """What every chat API turns its body into."""

    messages: list[dict[str, Any]]
    """As chat templates take them: system, user, assistant and tool; content as text; tool_calls as
    `{"id", "type", "function": {"name", "arguments": dict}}`; reasoning_content."""
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    structure: Structure | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """From chat_template_kwargs, reasoning_effort and the like."""
    separate_reasoning: bool | None = None
    """Whether reasoning is separated from the text. None: as chat.reasoning says."""
    include_reasoning: bool = True
    """Whether the client gets the reasoning, if it is separated."""
    continue_last: bool = False
    """Continue the last message, which must be the assistant's, instead of starting a new one."""
    truncation: Truncation | None = None
    asks: bool = True
    """Whether the prompt ends with the start of an assistant message."""
    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    marks: Sequence[Mark] = ()
    """cache_control marks: the messages up to each."""
    cache_control: CacheControl | None = None
    """cache_control of the request itself."""
    cache_details: bool = False


async def open_chat(state: ServerState, request: Request, chat: ChatInput, prefix: str) -> ChatStream:
    """Check, tokenise and prepare a conversation. Everything that can be refused is refused here; nothing runs before
    the stream is entered. Ids begin with `prefix`."""
    model = await state.model(chat.model, request, chat.timeout)
    check_count(state, 1, chat.params.n)
    check_params(model, chat.params)
    tools = () if chat.tool_choice == "none" else chat.tools
    options = _prompt_options(chat, tools)
    prompt = await _prompt(model, chat, options)
    check_logprobs(model, [prompt], chat.params, "top_logprobs")
    pins = await pins_of_chat(model, chat.marks, chat.cache_control, prompt, chat.params, options)
    prepared = await prepare_answers(model.llm.text, prompt, chat.params, _rules(chat, tools))
    head = Head(f"{prefix}{request.state.unique_id}", int(time.time()), model.served_name)
    submission = replace(prepared.submission, pins=pins)
    sent = sent_by(request, model, [submission], head.id, priority=chat.priority, timeout=chat.timeout)
    completions = CompletionStream(model.llm, sent, cache_details=chat.cache_details)
    return ChatStream(head, model, completions, prepared.readers)


async def _prompt(model: ModelState, chat: ChatInput, options: PromptOptions) -> Sequence[int]:
    if chat.truncation is None:
        return await model.encoder.encode_chat(chat.messages, chat.params, options)
    truncation = chat.truncation.checked(model.llm, chat.params)
    limit = truncation.reading_limit(model.config)
    return truncation.cut(await model.encoder.encode_chat_within(chat.messages, options, limit))


async def tokens_of_chat(state: ServerState, request: Request, chat: ChatInput) -> list[int]:
    """The prompt of a conversation, which may be longer than the context."""
    model = await state.model(chat.model, request, chat.timeout)
    most = max(model.config.server.max_encode_tokens, model.llm.text.max_context)
    limit = TokenLimit(most, f"at most {most} are counted (server.max_encode_tokens)", "the conversation")
    tools = () if chat.tool_choice == "none" else chat.tools
    return await model.encoder.encode_chat_within(chat.messages, _prompt_options(chat, tools), limit)


def _prompt_options(chat: ChatInput, tools: Sequence[Tool]) -> PromptOptions:
    described = [tool.for_template() for tool in tools]
    return PromptOptions(described, chat.template_arguments, chat.asks, chat.continue_last)


def _rules(chat: ChatInput, tools: Sequence[Tool]) -> AnswerRules:
    choice = chat.tool_choice
    named = choice.name if isinstance(choice, NamedTool) else None
    return AnswerRules(
        chat.structure or chat.params.structured,
        tools,
        required=choice not in ("auto", "none"),
        named=named,
        several=chat.parallel_tool_calls and named is None,
        most_calls=None if chat.parallel_tool_calls else 1,
        separate=chat.separate_reasoning,
        include_reasoning=chat.include_reasoning,
        continued=chat.messages[-1]["content"] if chat.continue_last else None,
    )
