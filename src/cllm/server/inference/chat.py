"""The one path of all chat APIs: from a conversation to a `ChatStream`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cllm.dialect.grammar import AnswerForm
from cllm.dialect.tools import Tool
from cllm.errors import InvalidRequestError
from cllm.server.http.response import as_json
from cllm.server.inference.limits import check_count, check_logprobs, check_params
from cllm.server.inference.pins import pins_of_chat
from cllm.server.inference.streams import ChatStream, CompletionStream, Head
from cllm.server.schema.messages import CacheControl, Mark
from cllm.server.schema.tools import NamedTool, ToolChoice
from cllm.server.state import session_of, tenant_of, time_left
from cllm.structured.sources import RULES
from cllm.structured.structure import Structure
from cllm.text.chat_template import PromptOptions
from cllm.text.token_limit import TokenLimit

if TYPE_CHECKING:
    from fastapi import Request

    from cllm.dialect.reasoning import Thinking
    from cllm.engine.params import SamplingParams
    from cllm.server.state import ModelState, ServerState
    from cllm.structured.matcher import Grammar


_LISTING = re.compile(r" \d+ \| .*$", re.DOTALL)
"""The grammar listing at the end of an error; the client did not write that grammar."""


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
    asks: bool = True
    """Whether the prompt ends with the start of an assistant message."""
    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    marks: Sequence[Mark] = ()
    """cache_control marks: the messages up to each."""
    cache_control: CacheControl | None = None
    """cache_control of the request itself."""


async def open_chat(state: ServerState, request: Request, chat: ChatInput, prefix: str) -> ChatStream:
    """Check, tokenise and prepare a conversation. Everything that can be refused is refused here; nothing runs before
    the stream is entered. Ids begin with `prefix`."""
    model = await state.model(chat.model, request, chat.timeout)
    check_count(state, 1, chat.params.n)
    check_params(model, chat.params)
    tools = () if chat.tool_choice == "none" else chat.tools
    options = _prompt_options(chat, tools)
    prompt = await model.encoder.encode_chat(chat.messages, chat.params, options)
    check_logprobs(model, [prompt], chat.params, "top_logprobs")
    pins = await pins_of_chat(model, chat.marks, chat.cache_control, prompt, chat.params, options)
    dialect = model.llm.dialect
    thinking = dialect.thinking_after(prompt, chat.messages[-1]["content"] if chat.continue_last else None)
    structure = await _structure(model, chat, tools, thinking)
    separate = dialect.separates if chat.separate_reasoning is None else chat.separate_reasoning
    reads = bool(tools) or thinking == "opened" or (separate and dialect.marks is not None and thinking == "none")
    head = Head(f"{prefix}-{request.state.unique_id}", int(time.time()), model.served_name)
    completions = CompletionStream(
        model.llm,
        [prompt],
        chat.params if structure is None else replace(chat.params, structured=structure),
        request_id=head.id,
        priority=chat.priority,
        timeout_s=time_left(request, model, chat.timeout),
        session=session_of(request),
        tenant=tenant_of(request),
        pins=[pins],
        grammar=None if structure is None else await _compiled(model, structure, chat, tools),
        shown=dialect.shown(tools=bool(tools), reasoning=True) if reads else None,
    )
    readers = [
        dialect.reader(
            index,
            tools=tools,
            thinking=thinking,
            separate=separate,
            continues=chat.continue_last,
            most_calls=None if chat.parallel_tool_calls else 1,
            calls_only=chat.tool_choice not in ("auto", "none"),
            include_reasoning=chat.include_reasoning,
        )
        for index in range(chat.params.n if reads else 0)
    ]
    return ChatStream(head, model, completions, readers)


async def tokens_of_chat(state: ServerState, request: Request, chat: ChatInput) -> list[int]:
    """The prompt of a conversation, which may be longer than the context."""
    model = await state.model(chat.model, request, chat.timeout)
    most = max(model.config.server.max_encode_tokens, model.llm.max_context)
    limit = TokenLimit(most, f"at most {most} are counted (server.max_encode_tokens)", "the conversation")
    tools = () if chat.tool_choice == "none" else chat.tools
    return await model.encoder.encode_chat_within(chat.messages, _prompt_options(chat, tools), limit)


def _prompt_options(chat: ChatInput, tools: Sequence[Tool]) -> PromptOptions:
    described = [tool.for_template() for tool in tools]
    return PromptOptions(described, chat.template_arguments, chat.asks, chat.continue_last)


async def _structure(model: ModelState, chat: ChatInput, tools: Sequence[Tool], thinking: Thinking) -> Structure | None:
    """The grammar of the answers: the given structure, guaranteed tool calls, and reasoning before either."""
    given = chat.structure or chat.params.structured
    choice = chat.tool_choice
    named = choice.name if isinstance(choice, NamedTool) else None
    marks = model.llm.dialect.marks
    masked = bool(tools) and (choice != "auto" or given is not None or any(tool.strict for tool in tools))
    if not masked and (given is None or marks is None or thinking == "closed" or given.kind not in RULES):
        return given
    form = AnswerForm(
        tools=[(tool.name, tool.enforced) for tool in tools if named in (None, tool.name)],
        required=choice not in ("auto", "none"),
        several=chat.parallel_tool_calls and named is None,
        structure=given,
        marks=marks,
        thinking=thinking,
    )
    sources = [[tool.parameters for tool in tools], given.source if given is not None else ""]
    param = given.param if given is not None and not tools else "tools"
    try:
        grammar = await model.encoder.run_sized(sources, lambda: model.llm.dialect.grammar(form))
    except ValueError as error:  # a schema that cannot be enforced
        await _blame(model, given, tools)
        raise InvalidRequestError(f"{param}: {error}", param) from None
    return Structure("lark", grammar, param)


async def _compiled(model: ModelState, structure: Structure, chat: ChatInput, tools: Sequence[Tool]) -> Grammar:
    given = chat.structure or chat.params.structured
    try:
        return await model.llm.compile(structure)
    except InvalidRequestError as error:
        if structure is given:
            raise
        await _blame(model, given, tools)
        raise InvalidRequestError(_LISTING.sub("", str(error)), error.param) from None


async def _blame(model: ModelState, given: Structure | None, tools: Sequence[Tool]) -> None:
    """Raise for the part of a grammar that is invalid by itself, by its name."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_compile_each(model, given, tools), model.config.structured.compile_timeout_s)


async def _compile_each(model: ModelState, given: Structure | None, tools: Sequence[Tool]) -> None:
    parts = [] if given is None else [given]
    for number, tool in enumerate(tools):
        if tool.enforced is not None:
            source = await model.encoder.run_sized(tool.parameters, partial(as_json, tool.enforced))
            parts.append(Structure("json_schema", source, f"tools[{number}]"))
    for part in parts:
        await model.llm.compile(part)
